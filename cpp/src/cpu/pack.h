// The step that packs operands, for vectors of any length.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

// Reads vectors of decoded elements.
template <class Codec>
struct Single {
    using V = typename Codec::V;
    static constexpr int row_step = 1, col_step = 1;
    template <bool Full>
    static TS_INLINE V read(const Pack& p, int64_t row, int64_t col) {
        const auto* from = static_cast<const typename Codec::Stored*>(p.source) + row * p.ld + col;
        if constexpr (Full) return Codec::decode(load<typename Codec::S>(from));
        return Codec::decode(load<typename Codec::S>(from, row < p.rows ? p.cols - col : 0));
    }
};

// Reads vectors of pairs of neighbours in a row.
template <int Bytes>
struct ColumnPairs {
    using V = Vector<uint32_t, Bytes>;
    static constexpr int row_step = 1, col_step = 2;
    template <bool Full>
    static TS_INLINE V read(const Pack& p, int64_t row, int64_t col) {
        using S = Vector<uint16_t, Bytes>;
        const auto* from = static_cast<const uint16_t*>(p.source) + row * p.ld + col;
        if constexpr (Full) return bit_cast_vector<V>(load<S>(from));
        return bit_cast_vector<V>(load<S>(from, row < p.rows ? p.cols - col : 0));
    }
};

// Reads vectors of pairs of neighbours in a column.
template <int Bytes>
struct RowPairs {
    using V = Vector<uint32_t, Bytes>;
    static constexpr int row_step = 2, col_step = 1;
    template <bool Full>
    static TS_INLINE V read(const Pack& p, int64_t row, int64_t col) {
        using S = Vector<uint16_t, Bytes / 2>;
        const auto* from = static_cast<const uint16_t*>(p.source) + row * p.ld + col;
        const int64_t count = Full ? lanes_of<S> : p.cols - col;
        const S low = load<S>(from, Full || row < p.rows ? count : 0);
        const S high = load<S>(from + p.ld, Full || row + 1 < p.rows ? count : 0);
        return __builtin_convertvector(low, V) | __builtin_convertvector(high, V) << 16;
    }
};

// Copies the square of vectors at (row, col), counted in single elements of the source.
template <class Reader, bool Full>
TS_INLINE void pack_square(const Pack& p, int64_t row, int64_t col) {
    using V = typename Reader::V;
    constexpr int lanes = lanes_of<V>;
    V square[lanes];
    TS_UNROLL
    for (int i = 0; i < lanes; ++i)
        square[i] = Reader::template read<Full>(p, row + i * Reader::row_step, col);
    if (p.transpose) transpose(square);

    int64_t height = (p.padded_rows - row) / Reader::row_step,
            width = (p.padded_cols - col) / Reader::col_step;
    row /= Reader::row_step;
    col /= Reader::col_step;
    if (p.transpose) {
        std::swap(row, col);
        std::swap(height, width);
    }
    auto* to = static_cast<element_t<V>*>(p.target) + row * p.target_ld + col;
    TS_UNROLL
    for (int i = 0; i < lanes; ++i) {
        if constexpr (Full)
            store(to + i * p.target_ld, square[i]);
        else if (i < height)
            store(to + i * p.target_ld, square[i], width);
    }
}

template <class Reader>
TS_INLINE void pack(const Pack& p) {
    constexpr int lanes = lanes_of<typename Reader::V>;
    constexpr int64_t rows = lanes * Reader::row_step, cols = lanes * Reader::col_step;
    for (int64_t row = 0; row < p.padded_rows; row += rows)
        for (int64_t col = 0; col < p.padded_cols; col += cols) {
            if (row + rows <= p.rows && col + cols <= p.cols)
                pack_square<Reader, true>(p, row, col);
            else
                pack_square<Reader, false>(p, row, col);
        }
}

}  // namespace ts::cpu
