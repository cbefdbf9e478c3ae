#include "cpu/amx.h"

#ifdef __x86_64__

#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cpu/amx_tiles.h"

namespace ts::cpu {
namespace {

// Sums of 16 * Rows rows and 16 * (J, ...) columns, in float32 or int32, stay in tiles 0 to 3; A follows,
// then B.
template <bool Int8, int Rows, int... J>
void multiply_tiles(const RowTile& s, int64_t row, int64_t column, int64_t depth,
                    std::integer_sequence<int, J...>) {
    constexpr int cols = sizeof...(J), a_tile = 4, b_tile = 4 + Rows, b_tiles = 4 - Rows;
    const auto* a_rows = static_cast<const uint32_t*>(s.a) + row * s.a_row;
    const auto* panel = static_cast<const uint32_t*>(s.b) + column;
    const int64_t a_stride = s.a_row * 4, stride = s.columns * 4;
    (tile_zero<J>(), ...);
    if constexpr (Rows == 2) (tile_zero<cols + J>(), ...);
    const auto values_of = [&](int64_t e) { return a_rows + (s.slot ? s.slot[e] : e) * s.a_entry; };
    constexpr int64_t kLine = 64 / sizeof(uint32_t), kAhead = 3;  // entries
    for (int64_t e = 0; e < s.entries; ++e) {
        const uint32_t* a = values_of(e);
        // Blocks are too short for the processor to notice how they are read.
        if (column == 0 && e + kAhead < s.entries && s.a_row == s.depth)
            for (int64_t i = 0; i < 16 * Rows * s.depth; i += kLine)
                __builtin_prefetch(values_of(e + kAhead) + i);
        const uint32_t* b = panel + (s.idx ? s.idx[e] : e) * s.depth * s.columns;
        for (int64_t d = 0; d < s.depth; d += depth) {
            tile_load<a_tile>(a + d, a_stride);
            if constexpr (Rows == 2) tile_load<a_tile + 1>(a + d + 16 * s.a_row, a_stride);
            const auto column_products = [&]<int j>() {
                constexpr int b_j = b_tile + j % b_tiles;
                tile_load<b_j>(b + d * s.columns + 16 * j, stride);
                tile_multiply<Int8, j, a_tile, b_j>();
                if constexpr (Rows == 2) tile_multiply<Int8, cols + j, a_tile + 1, b_j>();
            };
            (column_products.template operator()<J>(), ...);
        }
    }
    auto* to = static_cast<uint32_t*>(s.sums) + row * s.columns + column;
    (tile_store<J>(to + 16 * J, stride), ...);
    if constexpr (Rows == 2) (tile_store<cols + J>(to + 16 * s.columns + 16 * J, stride), ...);
}

template <bool Int8, int Rows, int Cols>
int64_t multiply_columns(const RowTile& s, int64_t row, int64_t column, int64_t depth) {
    for (; column + 16 * Cols <= s.columns; column += 16 * Cols)
        multiply_tiles<Int8, Rows>(s, row, column, depth, std::make_integer_sequence<int, Cols>{});
    return column;
}

// Sums in tiles 0 to 3 and A in tiles 6 and 7 have that many rows, B in tiles 4 and 5 is `depth` pairs deep.
void configure_token_tiles(int rows, int64_t depth) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = static_cast<uint8_t>(tile == 4 || tile == 5 ? depth : rows);
        config.row_bytes[tile] = static_cast<uint16_t>(tile < 6 ? 64 : 4 * depth);
    }
    config.load();
}

// Sums of one or two tiles of tokens and 32 features.
template <int Rows>
void multiply_token_tiles(const TokenTile& s, int64_t token, int64_t depth) {
    const char* const x = static_cast<const char*>(s.x) + token * s.x_ld;
    const auto* w = static_cast<const uint32_t*>(s.w);
    tile_zero<0>(), tile_zero<1>();
    if constexpr (Rows == 2) tile_zero<2>(), tile_zero<3>();
    for (int64_t e = 0; e < s.entries; ++e) {
        for (int64_t d = 0; d < s.depth; d += depth, w += depth * kMaxRows) {
            const char* const pairs = x + (s.idx[e] * s.depth + d) * 4;
            tile_load<4>(w, kMaxRows * 4);
            tile_load<5>(w + 16, kMaxRows * 4);
            tile_load<6>(pairs, s.x_ld);
            tile_multiply<false, 0, 6, 4>();
            tile_multiply<false, 1, 6, 5>();
            if constexpr (Rows == 2) {
                tile_load<7>(pairs + 16 * s.x_ld, s.x_ld);
                tile_multiply<false, 2, 7, 4>();
                tile_multiply<false, 3, 7, 5>();
            }
        }
    }
    float* const to = s.sums + token * s.sums_ld;
    tile_store<0>(to, s.sums_ld * 4);
    tile_store<1>(to + 16, s.sums_ld * 4);
    if constexpr (Rows == 2) {
        tile_store<2>(to + 16 * s.sums_ld, s.sums_ld * 4);
        tile_store<3>(to + 16 * s.sums_ld + 16, s.sums_ld * 4);
    }
}

// `feature`: the bit of CPUID for the instruction that multiplies.
bool request_amx(unsigned feature) {
#ifdef __linux__
    constexpr unsigned kTiles = 1u << 24, kTileData = 18, kRequestPermission = 0x1023;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & feature && d & kTiles &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

template <bool Int8>
void multiply_amx(const RowTile& s) {
    const int64_t depth = std::min<int64_t>(s.depth, 16);
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = 16;
        config.row_bytes[tile] = 64;
    }
    const int first_b = s.rows == 32 ? 6 : 5;
    for (int tile = 4; tile < first_b; ++tile) config.row_bytes[tile] = 4 * depth;
    for (int tile = first_b; tile < 8; ++tile) config.rows[tile] = depth;
    config.load();
    if (s.rows == 32) {
        const int64_t column = multiply_columns<Int8, 2, 2>(s, 0, 0, depth);
        multiply_columns<Int8, 2, 1>(s, 0, column, depth);
    } else {
        int64_t column = multiply_columns<Int8, 1, 4>(s, 0, 0, depth);
        column = multiply_columns<Int8, 1, 2>(s, 0, column, depth);
        multiply_columns<Int8, 1, 1>(s, 0, column, depth);
    }
    tile_release();
}

}  // namespace

bool request_amx_bf16() { return request_amx(1u << 22); }
bool request_amx_int8() { return request_amx(1u << 25); }

void multiply_amx_bf16(const RowTile& s) { multiply_amx<false>(s); }
void multiply_amx_int8(const RowTile& s) { multiply_amx<true>(s); }

void multiply_tokens_amx(const TokenTile& s) {
    const int64_t depth = std::min<int64_t>(s.depth, 16);
    int64_t token = 0;
    configure_token_tiles(16, depth);
    for (; token + 32 <= s.tokens; token += 32) multiply_token_tiles<2>(s, token, depth);
    for (; token + 16 <= s.tokens; token += 16) multiply_token_tiles<1>(s, token, depth);
    if (token < s.tokens) {
        configure_token_tiles(static_cast<int>(s.tokens - token), depth);
        multiply_token_tiles<1>(s, token, depth);
    }
    tile_release();
}

}  // namespace ts::cpu

#endif
