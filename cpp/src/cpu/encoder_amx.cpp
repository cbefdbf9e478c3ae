// The steps of encoders for AMX INT8.
#include "cpu/encoder_set.h"

#include "cpu/amx_tiles.h"

#ifdef __x86_64__

namespace ts::cpu {
namespace {

TS_ENCODER_SET(Avx512, TS_AVX512, 64, 8);

constexpr int kTileRows = 16, kLine = 64;
constexpr int64_t kBlockTokens = 2 * kTileRows;  // multiplied at once

using V = Vector<float, kLine>;
using I = Vector<int32_t, kLine>;
using U = Vector<uint32_t, kLine>;

// Sums of int32 of some tokens and the features of a panel.
struct PanelSums {
    alignas(kLine) int32_t sums[kBlockTokens][kPanelFeatures];
    int64_t token, tokens, feature;
};

// Tiles 0 to 3: sums; 4 and 5: tokens; 6 and 7: features.
void configure_panels(int64_t depth) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = static_cast<uint8_t>(tile < 6 ? kTileRows : depth / 4);
        config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? depth : kLine);
    }
    config.load();
}

// Products of one or two tiles of tokens stay in tiles 0 to 3.
template <int Tiles>
TS_INLINE void multiply_block(const PanelProduct& p, int64_t panel, int64_t token) {
    const int64_t step_bytes = p.values.depth * kPanelFeatures;
    const int8_t* const x = p.x + token * p.ld;
    tile_zero<0>(), tile_zero<1>();
    if constexpr (Tiles == 2) tile_zero<2>(), tile_zero<3>();
    const int64_t last = p.values.first[panel + 1];
    for (int64_t step = p.values.first[panel]; step < last; ++step) {
        const int8_t* const values = p.values.values + step * step_bytes;
        const int8_t* const rows = x + p.values.k[step];
        tile_load<6>(values, kLine);
        tile_load<4>(rows, p.ld);
        tile_multiply<true, 0, 4, 6>();
        if constexpr (Tiles == 2) {
            tile_load<5>(rows + kTileRows * p.ld, p.ld);
            tile_multiply<true, 2, 5, 6>();
        }
        tile_load<7>(values + step_bytes / 2, kLine);
        tile_multiply<true, 1, 4, 7>();
        if constexpr (Tiles == 2) tile_multiply<true, 3, 5, 7>();
    }
}

template <int Tiles>
TS_INLINE void store_block(PanelSums& to) {
    constexpr int64_t stride = kPanelFeatures * sizeof(int32_t);
    tile_store<0>(to.sums, stride), tile_store<1>(&to.sums[0][kTileRows], stride);
    if constexpr (Tiles == 2)
        tile_store<2>(to.sums[kTileRows], stride), tile_store<3>(&to.sums[kTileRows][kTileRows], stride);
}

template <Activation activation>
TS_INLINE void finish_block(const PanelProduct& p, const PanelSums& of) {
    V scales[2], bias[2];
    TS_UNROLL
    for (int i = 0; i < 2; ++i) {
        scales[i] = load<V>(p.feature_scales + of.feature + i * kTileRows);
        bias[i] = p.bias != nullptr ? load<V>(p.bias + of.feature + i * kTileRows) : V{};
    }
    float* to = p.result + of.token * p.result_ld + of.feature;
    const int64_t ld = p.result_ld, tokens = of.tokens;  // no store can change them
    const float* const token_scales = p.token_scales + of.token;
    for (int64_t row = 0; row < tokens; ++row, to += ld) {
        TS_UNROLL
        for (int i = 0; i < 2; ++i) {
            const V sum = __builtin_convertvector(load<I>(of.sums[row] + i * kTileRows), V);
            const V value = settled(sum * token_scales[row] * scales[i]) + bias[i];
            store(to + i * kTileRows, activate<activation>(value));
        }
    }
}

// While the tile registers multiply a block, vectors finish the one before.
template <Activation activation>
TS_AVX512 __attribute__((noinline)) void multiply_panels_with(const PanelProduct& p) {
    PanelSums blocks[2];
    int64_t count = 0;
    configure_panels(p.values.depth);
    for (int64_t panel = p.first; panel < p.last; ++panel)
        for (int64_t token = 0; token < p.tokens; token += kBlockTokens, ++count) {
            PanelSums &block = blocks[count % 2], &before = blocks[(count + 1) % 2];
            block.token = token;
            block.tokens = std::min(kBlockTokens, p.tokens - token);
            block.feature = panel * kPanelFeatures;
            const bool is_whole = block.tokens > kTileRows;
            is_whole ? multiply_block<2>(p, panel, token) : multiply_block<1>(p, panel, token);
            if (count > 0) finish_block<activation>(p, before);
            is_whole ? store_block<2>(block) : store_block<1>(block);
        }
    if (count > 0) finish_block<activation>(p, blocks[(count + 1) % 2]);
    tile_release();
}

void multiply_panels(const PanelProduct& p) {
    switch (p.activation) {
        case Activation::none:
            return multiply_panels_with<Activation::none>(p);
        case Activation::relu:
            return multiply_panels_with<Activation::relu>(p);
        case Activation::gelu:
            return multiply_panels_with<kNearGelu>(p);
        case Activation::silu:
            return multiply_panels_with<Activation::silu>(p);
    }
}

// ---- attention ----
//
// Lanes are queries: scores are [keys, 16 queries], so that neither their maxima nor their sums have to be
// taken across lanes. Of probabilities, of 14 bits, the low and the high bytes are multiplied apart.

constexpr int64_t kKeys = 64;  // multiplied by probabilities at once

struct HeadMemory {
    HeadMemory(std::byte* scratch, int64_t tokens, int64_t features)
        : depth(std::min(features, kKeys)), width(round_up(features, depth)), workspace(scratch) {
        const int64_t padded = round_up(tokens, kKeys);
        q = take<int8_t>(padded * width);
        k = take<int8_t>(padded * width);
        v = take<int8_t>(padded * features);
        queries = take<uint32_t>(width * kTileRows / 4);
        q_scales = take<float>(padded);
        k_scales = take<float>(padded);
        v_scales = take<float>(padded);
        inverses = take<float>(padded);
        scores = take<float>(padded * kTileRows);
        low = take<U>(padded / 4);
        high = take<U>(padded / 4);
    }

    template <class T>
    T* take(int64_t count) {
        return reinterpret_cast<T*>(workspace.take(count * static_cast<int64_t>(sizeof(T))));
    }

    int64_t depth, width;  // of a step over features; features padded to steps
    Workspace workspace;
    int8_t *q, *k;      // [tokens, width]
    int8_t* v;          // [features / 16][keys / 64][16][64]
    uint32_t* queries;  // [width / 4][16] groups of q
    float *q_scales, *k_scales, *v_scales, *inverses;
    float* scores;  // [keys, 16]
    U *low, *high;  // bytes of probabilities, [keys / 4]
};

TS_INLINE V value_at(const AttentionStep& s, const float* from, bool turns, int64_t token, int64_t i) {
    token = std::min(token, s.tokens - 1);
    const float* const rotary = turns && s.rotary != nullptr ? s.rotary + token * s.features : nullptr;
    return turned<V>(from + token * s.ld, rotary, i, s.features);
}

// Scales of whole vectors of tokens, and their inverses.
TS_INLINE void find_scales(const AttentionStep& s, const float* from, bool turns, float* scales,
                           float* inverses) {
    for (int64_t first = 0; first < s.tokens; first += kTileRows) {
        I most[kTileRows] = {};
        for (int64_t i = 0; i < s.features; i += kTileRows) {
            TS_UNROLL
            for (int t = 0; t < kTileRows; ++t) {
                const I bits = bit_cast_vector<I>(value_at(s, from, turns, first + t, i)) & 0x7fffffff;
                most[t] = larger(most[t], bits);
            }
        }
        const Scale<V> found(combined_lanes(most, larger<I>));
        store(scales + first, found.scale);
        store(inverses + first, found.inverse);
    }
}

TS_INLINE U encoded(const AttentionStep& s, const float* from, bool turns, const float* inverses,
                    int64_t token, int64_t i) {
    return encode_int8<U>(settled(value_at(s, from, turns, token, i) * inverses[token]));
}

TS_INLINE void quantize_rows(const AttentionStep& s, const float* from, const float* inverses, int64_t width,
                             int8_t* to) {
    for (int64_t token = 0; token < s.tokens; ++token, to += width) {
        for (int64_t i = 0; i < s.features; i += kTileRows)
            store_integers(to + i, encoded(s, from, true, inverses, token, i));
        for (int64_t i = s.features; i < width; i += kTileRows) store_integers(to + i, U{});
    }
}

// Keys of v as columns. Of four neighbours the inner two change places, as those of probabilities do.
TS_INLINE void quantize_columns(const AttentionStep& s, const float* inverses, int8_t* to) {
    for (int64_t i = 0; i < s.features; i += kTileRows)
        for (int64_t key = 0; key < s.tokens; key += kKeys, to += kTileRows * kKeys) {
            U square[kTileRows];
            TS_UNROLL
            for (int group = 0; group < kTileRows; ++group) {
                const auto at = [&](int n) __attribute__((always_inline)) {
                    return encoded(s, s.v, false, inverses, key + 4 * group + n, i);
                };
                square[group] = (at(0) & 0xff) | (at(2) & 0xff) << 8 | (at(1) & 0xff) << 16 | at(3) << 24;
            }
            transpose(square);
            TS_UNROLL
            for (int f = 0; f < kTileRows; ++f) store(to + f * kKeys, square[f]);
        }
}

// Tiles 0 to 3: sums; 4 and 6: of keys and queries; 5 and 7: of v and probabilities.
TS_INLINE void configure_attention(int64_t depth) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        config.rows[tile] = static_cast<uint8_t>(tile == 6 ? depth / 4 : kTileRows);
        config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 ? depth : kLine);
    }
    config.load();
}

// Products of 64 keys from `key` on and the packed queries.
TS_INLINE void multiply_keys(const HeadMemory& m, int64_t key) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    const int64_t rows = kTileRows * m.width;
    for (int64_t d = 0; d < m.width; d += m.depth) {
        const int8_t* const k = m.k + key * m.width + d;
        tile_load<6>(m.queries + d / 4 * kTileRows, kLine);
        tile_load<4>(k, m.width);
        tile_multiply<true, 0, 4, 6>();
        tile_load<4>(k + rows, m.width);
        tile_multiply<true, 1, 4, 6>();
        tile_load<4>(k + 2 * rows, m.width);
        tile_multiply<true, 2, 4, 6>();
        tile_load<4>(k + 3 * rows, m.width);
        tile_multiply<true, 3, 4, 6>();
    }
    float* const to = m.scores + key * kTileRows;
    constexpr int64_t tile = kTileRows * kTileRows;
    tile_store<0>(to, kLine), tile_store<1>(to + tile, kLine);
    tile_store<2>(to + 2 * tile, kLine), tile_store<3>(to + 3 * tile, kLine);
}

// Turns products of keys [first, last) into probabilities times the scales of v, and returns what sums of
// those with v are divided by.
TS_INLINE V softmax_columns(const AttentionStep& s, const HeadMemory& m, int64_t query, int64_t first,
                            int64_t last) {
    I numbers;
    for (int i = 0; i < kTileRows; ++i) numbers[i] = i;
    const V never = V{} - __builtin_inff(), scale = load<V>(m.q_scales + query) * s.scale;
    V most = never;
    const auto visit = [&](int64_t key, bool biased, bool masked) __attribute__((always_inline)) {
        float* const at = m.scores + key * kTileRows;
        V score = __builtin_convertvector(load<I>(at), V) * scale * m.k_scales[key];
        if (biased) {
            // Lane i has the distance key - query - i.
            I reversed;
            for (int i = 0; i < kTileRows; ++i) reversed[i] = kTileRows - 1 - i;
            const int64_t middle = s.positions - 1, distance = key - query;
            const int64_t lanes = std::min<int64_t>(kTileRows, middle + distance + 1);
            float line[kTileRows] = {};
            std::memcpy(line + kTileRows - lanes, s.position_bias + middle + distance + 1 - lanes,
                        lanes * sizeof(float));
            score += __builtin_shuffle(load<V>(line), reversed);
        }
        if (masked) {
            const I distance = numbers + static_cast<int32_t>(query - key);
            const auto most_distance = static_cast<int32_t>(s.window);
            const I outside = (distance > most_distance) | (distance < -most_distance);
            score = outside != 0 ? never : score;
        }
        store(at, score);
        most = score > most ? score : most;
    };
    const bool masks = s.window > 0;
    if (s.position_bias != nullptr) {
        for (int64_t key = first; key < last; ++key) visit(key, true, masks);
    } else if (masks) {
        for (int64_t key = first; key < last; ++key) visit(key, false, true);
    } else {
        for (int64_t key = first; key < last; ++key) visit(key, false, false);
    }
    const int64_t groups = ceil_div(last - first, 4), tiles = ceil_div(last - first, kKeys);
    for (int64_t key = last; key < first + 4 * groups; ++key) store(m.scores + key * kTileRows, never);
    V total{};
    for (int64_t group = 0; group < groups; ++group) {
        U units[4];
        TS_UNROLL
        for (int n = 0; n < 4; ++n) {
            const int64_t key = first + 4 * group + n;
            const V power = exp_of_difference<V>(load<V>(m.scores + key * kTileRows) - most);
            total += power;
            units[n] = bit_cast_vector<U>(settled(power * m.v_scales[key]) + 0x1.8p23f);
        }
        const U ahead = (units[0] & 0xffff) | units[1] << 16, behind = (units[2] & 0xffff) | units[3] << 16;
        constexpr uint32_t kLow = 0x00ff00ff, kHigh = 0xff00ff00;
        store(m.low + group, (ahead & kLow) | (behind << 8 & kHigh));
        store(m.high + group, (ahead >> 8 & kLow) | (behind & kHigh));
    }
    for (int64_t group = groups; group < tiles * kTileRows; ++group)
        store(m.low + group, U{}), store(m.high + group, U{});
    return total;
}

// Sums over tiles of keys of one or two tiles of features and 16 queries: of low bytes and of high ones.
template <int Tiles>
TS_INLINE void multiply_values(const int8_t* v, int64_t next, const U* low, const U* high, int64_t tiles,
                               int32_t (*sums)[kTileRows][kTileRows]) {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (Tiles == 2) tile_zero<2>(), tile_zero<3>();
    for (int64_t tile = 0; tile < tiles; ++tile, v += kTileRows * kKeys) {
        tile_load<7>(low + tile * kTileRows, kLine);
        tile_load<5>(v, kLine);
        tile_multiply_unsigned<0, 5, 7>();
        if constexpr (Tiles == 2) tile_load<5>(v + next, kLine), tile_multiply_unsigned<2, 5, 7>();
        tile_load<7>(high + tile * kTileRows, kLine);
        tile_load<5>(v, kLine);
        tile_multiply_unsigned<1, 5, 7>();
        if constexpr (Tiles == 2) tile_load<5>(v + next, kLine), tile_multiply_unsigned<3, 5, 7>();
    }
    tile_store<0>(sums[0], kLine), tile_store<1>(sums[1], kLine);
    if constexpr (Tiles == 2) tile_store<2>(sums[2], kLine), tile_store<3>(sums[3], kLine);
}

// Adds sums [features, queries] times the factors of queries to results.
TS_INLINE void finish_values(const int32_t (*sums)[kTileRows][kTileRows], const float* factors,
                             int64_t queries, bool adds, float* to, int64_t ld) {
    U square[kTileRows];
    TS_UNROLL
    for (int f = 0; f < kTileRows; ++f) square[f] = load<U>(sums[0][f]) + (load<U>(sums[1][f]) << 8);
    transpose(square);
    TS_UNROLL
    for (int i = 0; i < kTileRows; ++i) {
        if (i >= queries) continue;
        V value = __builtin_convertvector(bit_cast_vector<I>(square[i]), V) * factors[i];
        if (adds) value += load<V>(to + i * ld);
        store(to + i * ld, value);
    }
}

TS_AVX512 void attend(const AttentionStep& s) {
    const HeadMemory m(s.scratch, s.tokens, s.features);
    const int64_t tokens = s.tokens, tiles = ceil_div(tokens, kKeys), tile_bytes = kTileRows * kKeys;
    find_scales(s, s.q, true, m.q_scales, m.inverses);
    quantize_rows(s, s.q, m.inverses, m.width, m.q);
    find_scales(s, s.k, true, m.k_scales, m.inverses);
    quantize_rows(s, s.k, m.inverses, m.width, m.k);
    find_scales(s, s.v, false, m.v_scales, m.inverses);
    quantize_columns(s, m.inverses, m.v);
    const float v_scale = merge_scales<V>(m.k_scales, m.v_scales, tokens, tiles * kKeys);
    configure_attention(m.depth);
    for (int64_t query = 0; query < tokens; query += kTileRows) {
        const int64_t queries = std::min<int64_t>(kTileRows, tokens - query);
        const int64_t first = s.window > 0 ? std::max<int64_t>(query - s.window, 0) / kKeys * kKeys : 0;
        const int64_t last = s.window > 0 ? std::min(query + queries + s.window, tokens) : tokens;
        pack<ColumnGroups<kLine, 0>>({m.q + query * m.width, m.width, queries, m.width, kTileRows, m.width,
                                      m.queries, kTileRows, true, false});
        for (int64_t key = first; key < last; key += kKeys) multiply_keys(m, key);
        const V total = softmax_columns(s, m, query, first, last);
        alignas(kLine) float factors[kTileRows];
        store(factors, v_scale / kProbabilityUnits / total);
        for (int64_t key = first; key < last; key += kExactKeys) {
            const int64_t count = ceil_div(std::min(last - key, kExactKeys), kKeys);
            const U *const low = m.low + (key - first) / 4, *const high = m.high + (key - first) / 4;
            alignas(kLine) int32_t sums[4][kTileRows][kTileRows];
            const int64_t next = tiles * tile_bytes;  // tile of features
            for (int64_t feature = 0; feature < s.features;) {
                const int8_t* const v = m.v + feature / kTileRows * next + key / kKeys * tile_bytes;
                float* const to = s.result + query * s.result_ld + feature;
                if (feature + 2 * kTileRows <= s.features) {
                    multiply_values<2>(v, next, low, high, count, sums);
                    finish_values(sums, factors, queries, key > first, to, s.result_ld);
                    finish_values(sums + 2, factors, queries, key > first, to + kTileRows, s.result_ld);
                    feature += 2 * kTileRows;
                } else {
                    multiply_values<1>(v, next, low, high, count, sums);
                    finish_values(sums, factors, queries, key > first, to, s.result_ld);
                    feature += kTileRows;
                }
            }
        }
    }
    tile_release();
}

constexpr EncoderSteps amx_encoder() {
    EncoderSteps steps = group_encoder<Avx512, false>();
    steps.multiply_panels = multiply_panels;
    steps.attention = attend;
    steps.attention_bytes = [](int64_t tokens, int64_t features) {
        return static_cast<int64_t>(HeadMemory(nullptr, tokens, features).workspace.size());
    };
    return steps;
}

}  // namespace

const EncoderSteps encoder_amx_int8 = amx_encoder();

}  // namespace ts::cpu

#endif
