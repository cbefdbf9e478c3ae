// The steps of blocks with sides of any length, for vectors of any length.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

// Rows x Vectors sums in registers. AcrossRows: rows of the tile lie side by side in a block, else its depths
// do. Depth: that of a block, or 0 where only `depth` has it.
template <class Vec, int Rows, int Vectors, bool AcrossRows, int Depth>
struct BlockRows {
    using E = element_t<Vec>;
    using Arguments = BlockTile;

    static TS_INLINE void add(Vec (&sums)[Rows][Vectors], const E* a, const E* b, int64_t d,
                              const BlockTile& t) {
        Vec x[Vectors];
        TS_UNROLL
        for (int v = 0; v < Vectors; ++v) x[v] = load<Vec>(b + d * t.ldb + v * lanes_of<Vec>);
        TS_UNROLL
        for (int i = 0; i < Rows; ++i) {
            const E w = AcrossRows ? a[d * t.block_cols + i] : a[i * t.block_cols + d];
            TS_UNROLL
            for (int v = 0; v < Vectors; ++v) sums[i][v] += x[v] * w;
        }
    }

    static TS_INLINE void run(const BlockTile& t) {
        constexpr int64_t ahead = 4;  // blocks whose order the processor does not foresee
        constexpr int lanes = lanes_of<Vec>;
        auto* const to = static_cast<E*>(t.sums);
        Vec sums[Rows][Vectors];
        TS_UNROLL
        for (int i = 0; i < Rows; ++i) {
            TS_UNROLL
            for (int v = 0; v < Vectors; ++v)
                sums[i][v] =
                    t.adds ? load<Vec>(to + i * t.sums_ld + v * lanes, t.columns - v * lanes) : Vec{};
        }
        for (int64_t e = 0; e < t.entries; ++e) {
            const auto* const a = static_cast<const E*>(t.a) + (t.slot ? t.slot[e] : e) * t.entry;
            const auto* const b = static_cast<const E*>(t.b) + t.idx[e] * t.depth * t.ldb;
            if (e + ahead < t.entries) {
                const auto* const x = static_cast<const E*>(t.b) + t.idx[e + ahead] * t.depth * t.ldb;
                for (int64_t d = 0; d < t.depth; ++d) __builtin_prefetch(x + d * t.ldb);
                if (AcrossRows && t.slot) {
                    const auto* const next = static_cast<const E*>(t.a) + t.slot[e + ahead] * t.entry;
                    for (int64_t i = 0; i < t.depth * t.block_cols; i += 64 / sizeof(E))
                        __builtin_prefetch(next + i);
                }
            }
            if (t.idx[e] == t.last) {
                for (int64_t d = 0; d < t.last_depth; ++d) add(sums, a, b, d, t);
            } else if constexpr (Depth > 0) {
                TS_UNROLL
                for (int d = 0; d < Depth; ++d) add(sums, a, b, d, t);
            } else {
                for (int64_t d = 0; d < t.depth; ++d) add(sums, a, b, d, t);
            }
        }
        TS_UNROLL
        for (int i = 0; i < Rows; ++i) {
            TS_UNROLL
            for (int v = 0; v < Vectors; ++v)
                store(to + i * t.sums_ld + v * lanes, sums[i][v], t.columns - v * lanes);
        }
    }
};

// One column, vectors along the depths of a block. Lanes beyond the end of a block take part in sums of their
// own.
template <class Vec, int Rows>
struct BlockVector {
    using E = element_t<Vec>;
    using Arguments = BlockTile;

    static TS_INLINE void run(const BlockTile& t) {
        constexpr int64_t ahead = 8;
        constexpr int lanes = lanes_of<Vec>;
        const int64_t whole = t.depth / lanes * lanes;
        const bool has_rest = whole < t.depth;
        Vec sums[Rows] = {}, rests[Rows] = {};
        for (int64_t e = 0; e < t.entries; ++e) {
            const int64_t slot = t.slot ? t.slot[e] : e, idx = t.idx[e];
            const auto* const a = static_cast<const E*>(t.a) + slot * t.entry;
            const auto* const x = static_cast<const E*>(t.b) + idx * t.depth;
            if (e + ahead < t.entries)
                __builtin_prefetch(static_cast<const E*>(t.b) + t.idx[e + ahead] * t.depth);
            if (slot >= t.safe_slots || idx >= t.safe_idx) {  // near the end of the operands
                const int64_t depth = idx == t.last ? t.last_depth : t.depth;
                for (int64_t d = 0; d < depth; d += lanes) {
                    const Vec b = load<Vec>(x + d, depth - d);
                    Vec* const target = d < whole ? sums : rests;
                    for (int i = 0; i < Rows; ++i)
                        target[i] += b * load<Vec>(a + i * t.block_cols + d, depth - d);
                }
                continue;
            }
            for (int64_t d = 0; d < whole; d += lanes) {
                const Vec b = load<Vec>(x + d);
                TS_UNROLL
                for (int i = 0; i < Rows; ++i) sums[i] += b * load<Vec>(a + i * t.block_cols + d);
            }
            if (has_rest) {
                const Vec b = load<Vec>(x + whole);
                TS_UNROLL
                for (int i = 0; i < Rows; ++i) rests[i] += b * load<Vec>(a + i * t.block_cols + whole);
            }
        }
        auto* const to = static_cast<E*>(t.sums);
        TS_UNROLL
        for (int i = 0; i < Rows; ++i) {
            E sum = t.adds ? to[i] : E{};
            if (whole > 0) {
                TS_UNROLL
                for (int j = 0; j < lanes; ++j) sum += sums[i][j];
            }
            alignas(64) E rest[lanes];
            store(rest, rests[i]);
            for (int64_t j = 0; j < t.depth - whole; ++j) sum += rest[j];
            to[i] = sum;
        }
    }
};

// One column of the transposed blocks, vectors along their columns: Vectors of them.
template <class Vec, int Vectors>
struct BlockColumns {
    using E = element_t<Vec>;
    using Arguments = BlockTile;

    static TS_INLINE void run(const BlockTile& t) {
        constexpr int64_t ahead = 8;
        constexpr int lanes = lanes_of<Vec>;
        Vec sums[2][Vectors] = {};
        for (int64_t e = 0; e < t.entries; ++e) {
            const int64_t slot = t.slot ? t.slot[e] : e, idx = t.idx[e];
            const auto* const a = static_cast<const E*>(t.a) + slot * t.entry;
            const auto* const x = static_cast<const E*>(t.b) + idx * t.depth;
            if (e + ahead < t.entries) {
                __builtin_prefetch(static_cast<const E*>(t.b) + t.idx[e + ahead] * t.depth);
                if (t.slot) {
                    const auto* const next = static_cast<const E*>(t.a) + t.slot[e + ahead] * t.entry;
                    for (int64_t i = 0; i < t.depth * t.block_cols; i += 64 / sizeof(E))
                        __builtin_prefetch(next + i);
                }
            }
            const int64_t depth = idx == t.last ? t.last_depth : t.depth;
            if (slot >= t.safe_slots) {
                for (int64_t d = 0; d < depth; ++d)
                    for (int v = 0; v < Vectors; ++v)
                        sums[0][v] +=
                            load<Vec>(a + d * t.block_cols + v * lanes, t.columns - v * lanes) * x[d];
                continue;
            }
            for (int64_t d = 0; d + 1 < depth; d += 2) {
                TS_UNROLL
                for (int v = 0; v < Vectors; ++v) {
                    sums[0][v] += load<Vec>(a + d * t.block_cols + v * lanes) * x[d];
                    sums[1][v] += load<Vec>(a + (d + 1) * t.block_cols + v * lanes) * x[d + 1];
                }
            }
            if (depth % 2) {
                TS_UNROLL
                for (int v = 0; v < Vectors; ++v)
                    sums[0][v] += load<Vec>(a + (depth - 1) * t.block_cols + v * lanes) * x[depth - 1];
            }
        }
        auto* const to = static_cast<E*>(t.sums);
        TS_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            const int64_t count = t.columns - v * lanes;
            Vec sum = sums[0][v] + sums[1][v];
            if (t.adds) sum += load<Vec>(to + v * lanes, count);
            store(to + v * lanes, sum, count);
        }
    }
};

// A part of a block of y^T x: Rows features of y by Vectors of x.
template <class Vec, int Rows, int Vectors>
struct BlockOuter {
    using E = element_t<Vec>;
    using Arguments = OuterTile;

    static TS_INLINE void add(Vec (&sums)[Rows][Vectors], const OuterTile& t, int64_t token, bool whole) {
        const auto* const x = static_cast<const E*>(t.x) + token * t.x_ld;
        const auto* const y = static_cast<const E*>(t.y) + token * t.y_ld;
        Vec b[Vectors];
        TS_UNROLL
        for (int v = 0; v < Vectors; ++v)
            b[v] = whole ? load<Vec>(x + v * lanes_of<Vec>)
                         : load<Vec>(x + v * lanes_of<Vec>, t.columns - v * lanes_of<Vec>);
        TS_UNROLL
        for (int i = 0; i < Rows; ++i) {
            TS_UNROLL
            for (int v = 0; v < Vectors; ++v) sums[i][v] += b[v] * y[i];
        }
    }

    static TS_INLINE void run(const OuterTile& t) {
        constexpr int lanes = lanes_of<Vec>;
        Vec sums[Rows][Vectors] = {};
        if (t.safe)
            for (int64_t token = 0; token < t.tokens; ++token) add(sums, t, token, true);
        else
            for (int64_t token = 0; token < t.tokens; ++token) add(sums, t, token, false);
        auto* const to = static_cast<E*>(t.sums);
        TS_UNROLL
        for (int i = 0; i < Rows; ++i) {
            TS_UNROLL
            for (int v = 0; v < Vectors; ++v)
                store(to + i * t.sums_ld + v * lanes, sums[i][v], t.columns - v * lanes);
        }
    }
};

template <class Set, class E>
constexpr BlockSteps block_steps_of() {
    constexpr int bytes = Set::kBytes, registers = bytes == 64 ? 24 : bytes == 32 ? 12 : 8;
    using Vec = Vector<E, bytes>;
    BlockSteps steps{};
    steps.lanes = lanes_of<Vec>;
    const auto each = [&]<int... Row>(std::integer_sequence<int, Row...>) {
        const auto of_rows = [&]<int Rows>(std::integral_constant<int, Rows>) {
            const auto of_vectors = [&]<int Log>(std::integral_constant<int, Log>) {
                constexpr int vectors = 1 << Log;
                if constexpr (Rows * vectors <= registers) {
                    constexpr bool square = Rows == 3 || Rows == 4 || Rows == 6 || Rows == 8;
                    steps.multiply[0][Rows - 1][Log] =
                        Set::template run_with<BlockRows<Vec, Rows, vectors, false, 0>>;
                    steps.multiply[1][Rows - 1][Log] =
                        Set::template run_with<BlockRows<Vec, Rows, vectors, true, 0>>;
                    if constexpr (square) {
                        steps.square[0][Rows - 1][Log] =
                            Set::template run_with<BlockRows<Vec, Rows, vectors, false, Rows>>;
                        steps.square[1][Rows - 1][Log] =
                            Set::template run_with<BlockRows<Vec, Rows, vectors, true, Rows>>;
                    }
                    if constexpr (Log < 2)
                        steps.outer[Rows - 1][Log] = Set::template run_with<BlockOuter<Vec, Rows, vectors>>;
                }
            };
            of_vectors(std::integral_constant<int, 0>{});
            of_vectors(std::integral_constant<int, 1>{});
            of_vectors(std::integral_constant<int, 2>{});
            of_vectors(std::integral_constant<int, 3>{});
            // Vectors as short as a row of a block.
            steps.vector[0][Rows - 1] = Set::template run_with<BlockVector<Vector<E, 16>, Rows>>;
            if constexpr (bytes >= 32)
                steps.vector[1][Rows - 1] = Set::template run_with<BlockVector<Vector<E, 32>, Rows>>;
            if constexpr (bytes >= 64)
                steps.vector[2][Rows - 1] = Set::template run_with<BlockVector<Vector<E, 64>, Rows>>;
            steps.narrow_outer[Rows - 1] =
                Set::template run_with<BlockOuter<Vector<E, (bytes > 16 ? bytes / 2 : 16)>, Rows, 1>>;
        };
        (of_rows(std::integral_constant<int, Row + 1>{}), ...);
    };
    each(std::make_integer_sequence<int, kBlockRows>{});
    steps.columns[0] = Set::template run_with<BlockColumns<Vec, 1>>;
    steps.columns[1] = Set::template run_with<BlockColumns<Vec, 2>>;
    steps.columns[2] = Set::template run_with<BlockColumns<Vec, 4>>;
    return steps;
}

}  // namespace ts::cpu
