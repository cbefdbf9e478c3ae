// The steps of blocks with sides of any length, for vectors of any length.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "cpu/steps.h"
#include "cpu/vectors.h"

// Loops are unrolled by hand. What else -O3 does makes sums of one column a sixth slower and all a tenth
// larger.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2", "unswitch-loops", "fp-contract=fast")
#endif

namespace ts::cpu {

// Rows of blocks with sides of any length, of a block row:
// sums[i][c] = sum over entries e and depths d of A(e, i, d) * b[(idx[e] * depth + d) * ldb + c], where A(e,
// i, d) is a[slot[e] * entry + i * block_cols + d], or where rows lie side by side a[slot[e] * entry + d *
// block_cols + i]. Where slot is null it is e itself. Of the block at idx `last` only the first `last_depth`
// depths are read.
struct BlockTile {
    const void* a;
    const int32_t* slot;
    int64_t entry, block_cols;
    const void* b;
    int64_t ldb;
    const int32_t* idx;
    int64_t entries, depth;
    int64_t last, last_depth;
    int64_t safe_slots, safe_idx;  // below which a vector may be read beyond a block, of values and of b
    const int32_t* ptr;  // null, or where the entries of `count` block rows begin: their sums follow
    int64_t count;       // each other, as many rows as are summed apart
    bool adds;           // to the sums that are there
    int64_t columns;     // of which the last vector may have fewer than lanes
    void* sums;
    int64_t sums_ld;
};

// sums[i][c] = sum over tokens t of y[t * y_ld + i] * x[t * x_ld + c].
struct OuterTile {
    const void* y;
    int64_t y_ld;
    const void* x;
    int64_t x_ld;
    int64_t tokens, columns;
    bool safe;  // whole vectors of x may be read
    void* sums;
    int64_t sums_ld;
};

#ifdef __clang__
#define TS_ROLLED _Pragma("nounroll")
#else
#define TS_ROLLED _Pragma("GCC unroll 1")
#endif

constexpr int kBlockRows = 8;  // most rows of a block that are summed at once

struct BlockSteps {
    using Multiply = void (*)(const BlockTile&);
    using Outer = void (*)(const OuterTile&);
    int32_t lanes;
    Multiply multiply[2][kBlockRows]
                     [4];               // [rows side by side][rows - 1][log2 of vectors]; null: too many sums
    Multiply square[2][kBlockRows][4];  // likewise, of as many depths as rows
    Multiply vector[2][3][kBlockRows];  // one column: [fewer depths than lanes][log2 of bytes / 16][rows - 1]
    Multiply columns[3];                // one column, rows side by side: [log2 of vectors]
    Outer outer[kBlockRows][2];         // [rows - 1][log2 of vectors]
    Outer narrow_outer[kBlockRows];     // of half a vector
};

// Sums of `columns` columns, of which the last vector may have fewer than lanes. Those are handled in memory,
// by code that all rows share.
template <class Vec, int Rows, int Vectors>
TS_INLINE void store_rows(element_t<Vec>* to, int64_t ld, const Vec (&sums)[Rows][Vectors], int64_t columns) {
    constexpr int lanes = lanes_of<Vec>, whole = Vectors - 1;
    const int64_t last = columns - whole * lanes;
    TS_UNROLL
    for (int i = 0; i < Rows; ++i) {
        TS_UNROLL
        for (int v = 0; v < whole; ++v) store(to + i * ld + v * lanes, sums[i][v]);
        if (last >= lanes) store(to + i * ld + whole * lanes, sums[i][whole]);
    }
    if (last >= lanes) return;
    Vec lines[Rows];
    TS_UNROLL
    for (int i = 0; i < Rows; ++i) lines[i] = sums[i][whole];
    TS_ROLLED
    for (int i = 0; i < Rows; ++i) store(to + i * ld + whole * lanes, lines[i], last);
}

template <class Vec, int Rows, int Vectors>
TS_INLINE void load_rows(Vec (&sums)[Rows][Vectors], const element_t<Vec>* from, int64_t ld,
                         int64_t columns) {
    constexpr int lanes = lanes_of<Vec>;
    Vec lines[Rows][Vectors];
    TS_ROLLED
    for (int i = 0; i < Rows; ++i) {
        TS_UNROLL
        for (int v = 0; v < Vectors; ++v)
            lines[i][v] = load<Vec>(from + i * ld + v * lanes, columns - v * lanes);
    }
    TS_UNROLL
    for (int i = 0; i < Rows; ++i) {
        TS_UNROLL
        for (int v = 0; v < Vectors; ++v) sums[i][v] = lines[i][v];
    }
}

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
        for (int64_t row = 0; row < t.count; ++row) {
            const int64_t first = t.ptr ? t.ptr[row] - t.ptr[0] : 0;
            sum(t, first, t.ptr ? t.ptr[row + 1] - t.ptr[0] : t.entries,
                static_cast<E*>(t.sums) + row * Rows * t.sums_ld);
        }
    }

    static TS_INLINE void sum(const BlockTile& t, int64_t first, int64_t end, E* to) {
        constexpr int64_t ahead = 4;  // blocks whose order the processor does not foresee
        Vec sums[Rows][Vectors] = {};
        if (t.adds) load_rows(sums, to, t.sums_ld, t.columns);
        for (int64_t e = first; e < end; ++e) {
            const auto* const a = static_cast<const E*>(t.a) + (t.slot ? t.slot[e] : e) * t.entry;
            const auto* const b = static_cast<const E*>(t.b) + t.idx[e] * t.depth * t.ldb;
            if (e + ahead < end) {
                const auto* const x = static_cast<const E*>(t.b) + t.idx[e + ahead] * t.depth * t.ldb;
                for (int64_t d = 0; d < t.depth; ++d) __builtin_prefetch(x + d * t.ldb);
                if (AcrossRows && t.slot) {
                    const auto* const next = static_cast<const E*>(t.a) + t.slot[e + ahead] * t.entry;
                    for (int64_t i = 0; i < t.depth * t.block_cols; i += 64 / sizeof(E))
                        __builtin_prefetch(next + i);
                }
            }
            const int64_t depth = t.idx[e] == t.last ? t.last_depth : t.depth;
            if (depth == Depth) {
                TS_UNROLL
                for (int d = 0; d < Depth; ++d) add(sums, a, b, d, t);
            } else {
                for (int64_t d = 0; d < depth; ++d) add(sums, a, b, d, t);
            }
        }
        store_rows(to, t.sums_ld, sums, t.columns);
    }
};

// One column, vectors along the depths of a block. Lanes beyond the end of a block take part in sums of their
// own. Short: the depths of a block are fewer than lanes.
template <class Vec, int Rows, bool Short>
struct BlockVector {
    using E = element_t<Vec>;
    using Arguments = BlockTile;

    static TS_INLINE void run(const BlockTile& t) {
        for (int64_t row = 0; row < t.count; ++row) {
            const int64_t first = t.ptr ? t.ptr[row] - t.ptr[0] : 0;
            sum(t, first, t.ptr ? t.ptr[row + 1] - t.ptr[0] : t.entries,
                static_cast<E*>(t.sums) + row * Rows);
        }
    }

    static TS_INLINE void sum(const BlockTile& t, int64_t first, int64_t end, E* to) {
        constexpr int64_t ahead = 8;
        constexpr int lanes = lanes_of<Vec>;
        const int64_t whole = Short ? 0 : t.depth / lanes * lanes;
        Vec sums[Rows] = {}, rests[Rows] = {};
        E ends[Rows] = {};  // of blocks near the end of the operands
        for (int64_t e = first; e < end; ++e) {
            const int64_t slot = t.slot ? t.slot[e] : e, idx = t.idx[e];
            const auto* const a = static_cast<const E*>(t.a) + slot * t.entry;
            const auto* const x = static_cast<const E*>(t.b) + idx * t.depth;
            if (slot >= t.safe_slots || idx >= t.safe_idx) {
                const int64_t depth = idx == t.last ? t.last_depth : t.depth;
                for (int i = 0; i < Rows; ++i)
                    for (int64_t d = 0; d < depth; ++d) ends[i] += x[d] * a[i * t.block_cols + d];
                continue;
            }
            __builtin_prefetch(a + ahead * t.entry);
            if (e + ahead < end) __builtin_prefetch(static_cast<const E*>(t.b) + t.idx[e + ahead] * t.depth);
            if constexpr (!Short) {
                for (int64_t d = 0; d < whole; d += lanes) {
                    const Vec b = load<Vec>(x + d);
                    TS_UNROLL
                    for (int i = 0; i < Rows; ++i) sums[i] += b * load<Vec>(a + i * t.block_cols + d);
                }
            }
            if (Short || whole < t.depth) {
                const Vec b = load<Vec>(x + whole);
                TS_UNROLL
                for (int i = 0; i < Rows; ++i) rests[i] += b * load<Vec>(a + i * t.block_cols + whole);
            }
        }
        const auto finish = [&](int i, const auto& lines, const auto& rest) {
            E sum = t.adds ? to[i] + ends[i] : ends[i];
            if constexpr (!Short) {
                TS_UNROLL
                for (int j = 0; j < lanes; ++j) sum += lines[j];
            }
            TS_UNROLL
            for (int j = 0; j < lanes - 1; ++j)
                if (j < t.depth - whole) sum += rest[j];
            to[i] = sum;
        };
        if constexpr (lanes <= 4) {
            TS_UNROLL
            for (int i = 0; i < Rows; ++i) finish(i, sums[i], rests[i]);
        } else {  // in memory, by code that all rows share
            E lines[Rows][lanes], rest[Rows][lanes];
            TS_UNROLL
            for (int i = 0; i < Rows; ++i) store(lines[i], sums[i]), store(rest[i], rests[i]);
            TS_ROLLED
            for (int i = 0; i < Rows; ++i) finish(i, lines[i], rest[i]);
        }
    }
};

// One column of the transposed blocks, vectors along their columns: Vectors of them.
template <class Vec, int Vectors>
struct BlockColumns {
    using E = element_t<Vec>;
    using Arguments = BlockTile;

    static TS_INLINE void run(const BlockTile& t) {
        for (int64_t row = 0; row < t.count; ++row) {
            const int64_t first = t.ptr ? t.ptr[row] - t.ptr[0] : 0;
            sum(t, first, t.ptr ? t.ptr[row + 1] - t.ptr[0] : t.entries,
                static_cast<E*>(t.sums) + row * t.block_cols);
        }
    }

    static TS_INLINE void sum(const BlockTile& t, int64_t first, int64_t end, E* to) {
        constexpr int64_t ahead = 8;
        constexpr int lanes = lanes_of<Vec>;
        Vec sums[2][Vectors] = {};
        for (int64_t e = first; e < end; ++e) {
            const int64_t slot = t.slot ? t.slot[e] : e, idx = t.idx[e];
            const auto* const a = static_cast<const E*>(t.a) + slot * t.entry;
            const auto* const x = static_cast<const E*>(t.b) + idx * t.depth;
            if (e + ahead < end) {
                __builtin_prefetch(static_cast<const E*>(t.b) + t.idx[e + ahead] * t.depth);
                if (t.slot) {
                    const auto* const next = static_cast<const E*>(t.a) + t.slot[e + ahead] * t.entry;
                    for (int64_t i = 0; i < t.depth * t.block_cols; i += 64 / sizeof(E))
                        __builtin_prefetch(next + i);
                }
            }
            const int64_t depth = idx == t.last ? t.last_depth : t.depth;
            if (slot >= t.safe_slots) {
                for (int64_t d = 0; d < depth; ++d) {
                    TS_UNROLL
                    for (int v = 0; v < Vectors; ++v)
                        sums[0][v] +=
                            load<Vec>(a + d * t.block_cols + v * lanes, t.columns - v * lanes) * x[d];
                }
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
            b[v] = whole || v + 1 < Vectors ? load<Vec>(x + v * lanes_of<Vec>)
                                            : load<Vec>(x + v * lanes_of<Vec>, t.columns - v * lanes_of<Vec>);
        TS_UNROLL
        for (int i = 0; i < Rows; ++i) {
            TS_UNROLL
            for (int v = 0; v < Vectors; ++v) sums[i][v] += b[v] * y[i];
        }
    }

    static TS_INLINE void run(const OuterTile& t) {
        Vec sums[Rows][Vectors] = {};
        if (t.safe)
            for (int64_t token = 0; token < t.tokens; ++token) add(sums, t, token, true);
        else
            for (int64_t token = 0; token < t.tokens; ++token) add(sums, t, token, false);
        store_rows(static_cast<E*>(t.sums), t.sums_ld, sums, t.columns);
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
            const auto of_bytes = [&]<int Bytes, bool Short>(std::integral_constant<int, Bytes>,
                                                             std::bool_constant<Short>) {
                constexpr int log = Bytes == 16 ? 0 : Bytes == 32 ? 1 : 2;
                if constexpr (Bytes <= bytes)
                    steps.vector[Short][log][Rows - 1] =
                        Set::template run_with<BlockVector<Vector<E, Bytes>, Rows, Short>>;
            };
            const auto of_kind = [&](auto is_short) {
                of_bytes(std::integral_constant<int, 16>{}, is_short);
                of_bytes(std::integral_constant<int, 32>{}, is_short);
                of_bytes(std::integral_constant<int, 64>{}, is_short);
            };
            of_kind(std::false_type{});
            of_kind(std::true_type{});
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
