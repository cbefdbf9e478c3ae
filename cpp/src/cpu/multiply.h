// The step that multiplies panels, for vectors of any length.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

template <class V>
struct Products {
    using Operand = V;
    using Sum = V;
    static TS_INLINE void add(Sum& sum, const Operand& x, element_t<V> w) { sum += x * w; }
};

// Adds the products of both bfloat16 of each pair. In assembly, because intrinsics could not be inlined
// into code that is written for every instruction set.
template <int Bytes>
struct PairProducts {
    using Operand = Vector<uint32_t, Bytes>;
    using Sum = Vector<float, Bytes>;
    static TS_INLINE void add(Sum& sum, const Operand& x, uint32_t w) { add(sum, x, Operand{} + w); }
    static TS_INLINE void add(Sum& sum, const Operand& x, const Operand& w) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    }
};

// Adds entries [first, last) to Rows x Vectors sums in registers; entry 0 starts from zero.
// AcrossRows: a_row is 1, otherwise a_step is.
template <class P, int Rows, int Vectors, bool AcrossRows>
TS_INLINE void multiply_rows(const RowTile& s, int row, int64_t first, int64_t last) {
    using X = typename P::Operand;
    using V = typename P::Sum;
    using E = element_t<X>;
    constexpr int lanes = lanes_of<V>, width = Vectors * lanes;
    constexpr int kLine = 64 / sizeof(E);
    const auto values_of = [&](int64_t e, int64_t first_row) {
        return static_cast<const E*>(s.a) + (s.slot ? s.slot[e] : e) * s.a_entry + first_row * s.a_row;
    };
    const auto panel_of = [&](int64_t e) {
        return static_cast<const E*>(s.b) + (s.idx ? s.idx[e] : e) * s.depth * width;
    };
    auto* to = static_cast<element_t<V>*>(s.sums) + row * width;
    V sums[Rows][Vectors];
    TS_UNROLL
    for (int i = 0; i < Rows; ++i) {
        TS_UNROLL
        for (int v = 0; v < Vectors; ++v) sums[i][v] = first ? load<V>(to + i * width + v * lanes) : V{};
    }
    // After the last entry come the next rows with the same entries, or else the first rows with the next
    // ones.
    const bool last_rows = row + Rows >= s.rows;
    const int after_row = last_rows ? 0 : row + Rows;
    const int64_t after = last_rows ? last : first;
    const int64_t ahead = std::max<int64_t>(1, kAheadRowBytes / (s.depth * static_cast<int64_t>(sizeof(E))));
    for (int64_t e = first; e < last; ++e) {
        // Blocks are too short for the processor to notice how they are read, so while one is multiplied the
        // values of another are fetched, and, by the first rows, the next one's panel.
        const bool turns = e + ahead >= last;
        const int64_t fetched = turns ? std::min(after + e + ahead - last, s.entries - 1) : e + ahead;
        const E* values = values_of(fetched, turns ? after_row : row);
        const E* panel = row == 0 ? panel_of(std::min(e + 1, s.entries - 1)) : nullptr;
        const E* a = values_of(e, row);
        const E* b = panel_of(e);
        for (int64_t d = 0; d < s.depth; ++d, b += width) {
            __builtin_prefetch(values + d * (AcrossRows ? s.a_step : Rows));
            if (panel != nullptr) {
                TS_UNROLL
                for (int i = 0; i < width; i += kLine) __builtin_prefetch(panel + d * width + i);
            }
            X x[Vectors];
            TS_UNROLL
            for (int v = 0; v < Vectors; ++v) x[v] = load<X>(b + v * lanes);
            TS_UNROLL
            for (int i = 0; i < Rows; ++i) {
                E w;
                std::memcpy(&w, AcrossRows ? a + d * s.a_step + i : a + i * s.a_row + d, sizeof w);
                TS_UNROLL
                for (int v = 0; v < Vectors; ++v) P::add(sums[i][v], x[v], w);
            }
        }
    }
    TS_UNROLL
    for (int i = 0; i < Rows; ++i) {
        TS_UNROLL
        for (int v = 0; v < Vectors; ++v) store(to + i * width + v * lanes, sums[i][v]);
    }
}

// All rows of the row tile, Rows at a time, over entries [first, last).
template <class P, int Rows, int Vectors, bool AcrossRows>
TS_INLINE void multiply_entries(const RowTile& s, int64_t first, int64_t last) {
    for (int row = 0; row < s.rows; row += Rows)
        multiply_rows<P, Rows, Vectors, AcrossRows>(s, row, first, last);
}

// All rows pass over as many entries as the first-level cache holds panels of, then over the next.
template <class P, int Rows, int Vectors>
TS_INLINE void multiply_tile(const RowTile& s) {
    // A single vector leaves registers for twice the rows, but not for as many addresses.
    constexpr int across_rows = Vectors == 1 ? 2 * Rows : Rows;
    const int64_t panel_bytes = s.depth * Vectors * static_cast<int64_t>(sizeof(typename P::Operand));
    const int64_t batch = std::max<int64_t>(1, kFirstCacheBytes / panel_bytes);
    int64_t first = s.first;
    do {
        const int64_t last = std::min(first + batch, s.entries);
        if (s.a_row == 1)
            multiply_entries<P, across_rows, Vectors, true>(s, first, last);
        else
            multiply_entries<P, Rows, Vectors, false>(s, first, last);
        first = last;
    } while (first < s.entries);
}

template <class P, int Rows>
TS_INLINE void multiply(const RowTile& s) {
    switch (s.columns / lanes_of<typename P::Sum>) {
        case 1:
            return multiply_tile<P, Rows, 1>(s);
        case 2:
            return multiply_tile<P, Rows, 2>(s);
        case 3:
            return multiply_tile<P, Rows, 3>(s);
    }
}

}  // namespace ts::cpu
