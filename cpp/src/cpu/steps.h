// The three steps of every CPU product, written once over vectors of any length:
//
//   pack      copies an operand into panels that the multiplication reads front to back,
//   multiply  sums one strip of 16 or 32 features x some columns over the kept blocks,
//   finish    adds the bias, applies the activation, adds the residual or multiplies by the gate, rounds and
//             writes the output's layout.
//
// Everything is inlined into functions compiled for one instruction set (see steps.cpp). Vectors are
// loaded and stored through memcpy: no operand has to be aligned.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/problem.h"

namespace ts::cpu {

constexpr int kMinRows = 16, kMaxRows = 32;     // features summed at once, a strip
constexpr int kTaskFeatures = 64;               // features written at once: whole lines of memory
constexpr int64_t kFirstCacheBytes = 24 << 10;  // of panels that all rows of a strip pass over in turn
constexpr int64_t kFewBytes = 8 << 10;          // of values that all of a few tokens pass over in turn
constexpr int kMostFewTokens = 8;
constexpr int64_t kAheadRowBytes = 256;  // of a row of values, between those multiplied and those fetched

// A copy of a row-major matrix [rows, cols], or its transpose, zero-filled up to the padded size.
// Elements that are multiplied in pairs are copied as pairs, which lie along the rows or the columns
// of the source; `cols`, `padded_cols` (or rows) then still count single elements.
struct Pack {
    const void* source;
    int64_t ld;
    int64_t rows, cols;
    int64_t padded_rows, padded_cols;
    void* target;
    int64_t target_ld;
    bool transpose;
    bool pair_rows;
};

// sums[i][c] = sum over entries e and depths d of A(e, i, d) * B(e, d, c), where
//   A(e, i, d) = a[slot[e] * a_entry + i * a_row + d * a_step], where a_row is 1, or else a_step is 1
//                and a_row is depth
//   B(e, d, c) = b[(idx[e] * depth + d) * columns + c]
// Elements are pairs where the kernel multiplies pairs. Where slot or idx is null it is e itself.
struct Strip {
    const void* a;
    const int32_t* slot;
    int64_t a_entry, a_row, a_step;
    const void* b;
    const int32_t* idx;
    int64_t entries, depth;
    int64_t rows, columns;  // 16 or 32; whole vectors, at most a tile
    void* sums;             // [rows, columns]
};

// The same the other way round, for row-major x and strips of 32 features: sums[t][f] = sum over entries e
// and depths d of the products of the pairs x[t, idx[e] * depth + d] and w[e, d, f], with x read where it
// lies.
struct TokenStrip {
    const void* x;
    int64_t x_ld;   // bytes
    const void* w;  // pairs [entries, depth, 32]
    const int32_t* idx;
    int64_t entries, depth;
    int64_t tokens;  // at most a tile
    float* sums;
    int64_t sums_ld;
};

// A strip of few tokens, for row-major x and blocks that lie along k, which are read where they lie:
// sums[t][f] = sum over entries e and depths d of
//   x[t * x_ld + idx[e] * depth + d] * values[slot[e] * entry + f * depth + d].
struct FewTokensStrip {
    const void* x;  // packed, as [tokens, k]; where an element is packed as it is stored it need not be
    int64_t x_ld;
    const void* values;
    const int32_t* slot;
    int64_t entry;
    const int32_t* idx;
    int64_t entries, depth;
    int64_t rows, tokens;  // features: 16 or 32; at most few_tokens
    void* sums;
    int64_t sums_ld;
};

// Element (i, c) of a strip goes to data[i * ld + c], or to data[c * ld + i] if transposed.
struct Output {
    void* sums;  // changed in place
    int64_t sums_ld;
    int64_t rows, columns;  // rows at most kTaskFeatures; columns without padding
    void* data;
    int64_t ld;
    bool transposed;
    const void* bias;  // [rows], or [columns] if it is theirs, or null
    bool bias_of_columns;
    Activation activation;
    const void* added;  // after the activation, or null: lies as data does, and may be data itself
    int64_t added_ld;
    bool gated;  // added is a gate, which is activated and multiplied by
    Activation gate_activation;
};

// Values of 8 bits, int8 or float8_e4m3fn, times a scale, rounded to the dtype of the target.
struct Scaling {
    const uint8_t* values;
    bool is_float8;
    float scale;
    int64_t count;  // a multiple of 16
    void* target;
};

// The steps of one instruction set for one dtype.
struct Steps {
    int32_t tile;         // columns multiplied at once, a multiple of `lanes`
    int32_t lanes;        // columns of one vector
    int32_t pair;         // 2 if elements are multiplied in pairs, otherwise 1
    int32_t packed_size;  // bytes of a packed element or pair
    bool values_direct;   // values are multiplied as they are stored
    void (*pack)(const Pack&);
    void (*multiply)(const Strip&);
    void (*finish)(const Output&);
    void (*multiply_tokens)(const TokenStrip&);  // or null
    void (*multiply_few)(const FewTokensStrip&);
    int32_t few_tokens;  // up to which multiply_few is the faster one; 0: there is none
    void (*scale)(const Scaling&);
};

#define TS_INLINE inline __attribute__((always_inline))
#ifdef __clang__
#define TS_UNROLL _Pragma("unroll")
#else
#define TS_UNROLL _Pragma("GCC unroll 16")
#endif

template <class Element, int Bytes>
struct VectorOf {
    typedef Element type __attribute__((vector_size(Bytes)));
};
template <class Element, int Bytes>
using Vector = typename VectorOf<Element, Bytes>::type;

template <class V>
using element_t = std::remove_cvref_t<decltype(std::declval<V>()[0])>;
template <class V>
constexpr int lanes_of = sizeof(V) / sizeof(element_t<V>);

template <class To, class From>
TS_INLINE To bit_cast_vector(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// The first `count` lanes, the others zero. Half a vector is common: pairs of the smallest blocks.
template <class V>
TS_INLINE V load(const void* from, int64_t count = lanes_of<V>) {
    V v{};
    if (count >= lanes_of<V>)
        std::memcpy(&v, from, sizeof v);
    else if (2 * count == lanes_of<V>)
        std::memcpy(&v, from, sizeof v / 2);
    else if (count > 0)
        std::memcpy(&v, from, count * sizeof(element_t<V>));
    return v;
}

template <class V>
TS_INLINE void store(void* to, const V& v, int64_t count = lanes_of<V>) {
    if (count >= lanes_of<V>)
        std::memcpy(to, &v, sizeof v);
    else if (2 * count == lanes_of<V>)
        std::memcpy(to, &v, sizeof v / 2);
    else if (count > 0)
        std::memcpy(to, &v, count * sizeof(element_t<V>));
}

// ---- element types: how a dtype is stored, and summed in V ----

template <DType, int Bytes>
struct Codec;

template <class T, int Bytes>
struct PlainCodec {
    using Stored = T;
    using V = Vector<T, Bytes>;
    using S = V;
    static TS_INLINE V decode(const S& s) { return s; }
    static TS_INLINE S encode(const V& v) { return v; }
};
template <int Bytes>
struct Codec<DType::float64, Bytes> : PlainCodec<double, Bytes> {};
template <int Bytes>
struct Codec<DType::float32, Bytes> : PlainCodec<float, Bytes> {};

template <int Bytes>
struct Codec<DType::bfloat16, Bytes> {
    using Stored = uint16_t;
    using V = Vector<float, Bytes>;
    using U = Vector<uint32_t, Bytes>;
    using S = Vector<uint16_t, Bytes / 2>;
    static TS_INLINE V decode(const S& s) { return bit_cast_vector<V>(__builtin_convertvector(s, U) << 16); }
    static TS_INLINE S encode(const V& v) {
        const U bits = bit_cast_vector<U>(v);
        const U rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const U quiet_nan = bits >> 16 | 0x40;
        const U result = v == v ? rounded : quiet_nan;
        return __builtin_convertvector(result, S);
    }
};

// Integer arithmetic on the bits: exact for subnormals whatever the processor's flush mode is.
template <int Bytes>
struct Codec<DType::float16, Bytes> {
    using Stored = uint16_t;
    using V = Vector<float, Bytes>;
    using U = Vector<uint32_t, Bytes>;
    using S = Vector<uint16_t, Bytes / 2>;
    static constexpr uint32_t kBias = 112u << 23;         // difference of the exponents' biases
    static constexpr uint32_t kLeastNormal = 113u << 23;  // 2^-14
    static constexpr uint32_t kHalf = 126u << 23;         // 0.5, whose last place is 2^-24
    static constexpr uint32_t kOverflow = 143u << 23;     // 2^16
    static constexpr uint32_t kInfinity = 255u << 23;

    static TS_INLINE V decode(const S& s) {
        const U wide = __builtin_convertvector(s, U);
        const U magnitude = (wide & 0x7fff) << 13;
        const U shifted = magnitude + kBias;
        const U subnormal = bit_cast_vector<U>(bit_cast_vector<V>(magnitude + kLeastNormal) - 0x1p-14f);
        const U finite = magnitude < (1u << 23) ? subnormal : shifted;
        const U result = magnitude >= (31u << 23) ? shifted + kBias : finite;
        return bit_cast_vector<V>(result | (wide & 0x8000) << 16);
    }
    static TS_INLINE S encode(const V& v) {
        const U bits = bit_cast_vector<U>(v);
        const U magnitude = bits & 0x7fffffff;
        const U normal = (magnitude - kBias + 0xfff + (magnitude >> 13 & 1)) >> 13;
        const U subnormal = bit_cast_vector<U>(bit_cast_vector<V>(magnitude) + 0.5f) - kHalf;
        const U finite = magnitude < kLeastNormal ? subnormal : normal;
        const U special = magnitude > kInfinity ? U{} + 0x7e00 : U{} + 0x7c00;
        const U result = magnitude >= kOverflow ? special : finite;
        return __builtin_convertvector(result | (bits >> 16 & 0x8000), S);
    }
};

// ---- pack ----

// One stage of the butterfly that transposes a square of vectors: exchanges the halves of every
// run of 2 * Half lanes between rows i and i + Half.
template <int Half, class V, int... J>
TS_INLINE void exchange(V& a, V& b, std::integer_sequence<int, J...>) {
    constexpr int lanes = sizeof...(J);
#ifdef __clang__
    const V low = __builtin_shufflevector(a, b, (J & Half ? lanes + J - Half : J)...);
    b = __builtin_shufflevector(a, b, (J & Half ? lanes + J : J + Half)...);
#else
    using Index = Vector<std::conditional_t<sizeof(element_t<V>) == 8, int64_t, int32_t>, sizeof(V)>;
    const V low = __builtin_shuffle(a, b, Index{(J & Half ? lanes + J - Half : J)...});
    b = __builtin_shuffle(a, b, Index{(J & Half ? lanes + J : J + Half)...});
#endif
    a = low;
}

template <int Half, class V>
TS_INLINE void transpose_stage(V (&rows)[lanes_of<V>]) {
    if constexpr (Half < lanes_of<V>) {
        TS_UNROLL
        for (int i = 0; i < lanes_of<V>; ++i)
            if (!(i & Half))
                exchange<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, lanes_of<V>>{});
        transpose_stage<2 * Half>(rows);
    }
}

template <class V>
TS_INLINE void transpose(V (&rows)[lanes_of<V>]) {
    transpose_stage<1>(rows);
}

template <int Half, class V>
TS_INLINE void add_lanes(V (&rows)[lanes_of<V>]) {
    if constexpr (Half < lanes_of<V>) {
        TS_UNROLL
        for (int i = 0; i < lanes_of<V>; i += 2 * Half) {
            exchange<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, lanes_of<V>>{});
            rows[i] += rows[i + Half];
        }
        add_lanes<2 * Half>(rows);
    }
}

// Lane i is the sum of all lanes of vector i.
template <class V>
TS_INLINE V sum_of_lanes(const V* vectors) {
    V rows[lanes_of<V>];
    TS_UNROLL
    for (int i = 0; i < lanes_of<V>; ++i) rows[i] = vectors[i];
    add_lanes<1>(rows);
    return rows[0];
}

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

// ---- multiply ----

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
    static TS_INLINE void add(Sum& sum, const Operand& x, uint32_t w) {
        const Operand pair = Operand{} + w;
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(pair));
    }
};

// Adds entries [first, last) to Rows x Vectors sums in registers; entry 0 starts from zero.
// AcrossRows: a_row is 1, otherwise a_step is.
template <class P, int Rows, int Vectors, bool AcrossRows>
TS_INLINE void multiply_rows(const Strip& s, int row, int64_t first, int64_t last) {
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

// All rows of the strip, Rows at a time, over entries [first, last).
template <class P, int Rows, int Vectors, bool AcrossRows>
TS_INLINE void multiply_entries(const Strip& s, int64_t first, int64_t last) {
    for (int row = 0; row < s.rows; row += Rows)
        multiply_rows<P, Rows, Vectors, AcrossRows>(s, row, first, last);
}

// All rows pass over as many entries as the first-level cache holds panels of, then over the next.
template <class P, int Rows, int Vectors>
TS_INLINE void multiply_tile(const Strip& s) {
    // A single vector leaves registers for twice the rows, but not for as many addresses.
    constexpr int across_rows = Vectors == 1 ? 2 * Rows : Rows;
    const int64_t panel_bytes = s.depth * Vectors * static_cast<int64_t>(sizeof(typename P::Operand));
    const int64_t batch = std::max<int64_t>(1, kFirstCacheBytes / panel_bytes);
    int64_t first = 0;
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
TS_INLINE void multiply(const Strip& s) {
    switch (s.columns / lanes_of<typename P::Sum>) {
        case 1:
            return multiply_tile<P, Rows, 1>(s);
        case 2:
            return multiply_tile<P, Rows, 2>(s);
        case 3:
            return multiply_tile<P, Rows, 3>(s);
    }
}

// Vectors lie along k, so that no lane is without work where a tile of tokens would be nearly empty. Each
// lane has a sum of its own, which are added up in the end.
template <class V>
constexpr int kFewSums = sizeof(V) == 64 ? 16 : 8;  // in registers

template <class Codec>
TS_INLINE typename Codec::V read(const typename Codec::Stored* from) {
    return Codec::decode(load<typename Codec::S>(from));
}

// Adds entries [first, last) to sums [Tokens][kMinRows] of vectors; entry 0 starts from zero.
template <class Codec, class XCodec, int Tokens>
TS_INLINE void multiply_few_rows(const FewTokensStrip& s, int64_t row, int64_t token, int64_t first,
                                 int64_t last, typename Codec::V* to) {
    using V = typename Codec::V;
    using Stored = typename Codec::Stored;
    constexpr int rows = kFewSums<V> / Tokens;
    V sums[Tokens][rows];
    TS_UNROLL
    for (int t = 0; t < Tokens; ++t) {
        TS_UNROLL
        for (int i = 0; i < rows; ++i) sums[t][i] = first ? to[t * kMinRows + i] : V{};
    }
    const auto values_of = [&](int64_t e) {
        return static_cast<const Stored*>(s.values) + s.slot[e] * s.entry + row * s.depth;
    };
    const int64_t ahead =
        std::max<int64_t>(1, kAheadRowBytes / (s.depth * static_cast<int64_t>(sizeof(Stored))));
    for (int64_t e = first; e < last; ++e) {
        const auto* const w = values_of(e);
        const auto* const fetched = values_of(std::min(e + ahead, s.entries - 1));
        const auto* const x =
            static_cast<const typename XCodec::Stored*>(s.x) + token * s.x_ld + s.idx[e] * s.depth;
        for (int64_t d = 0; d < s.depth; d += lanes_of<V>) {
            V of_tokens[Tokens];
            TS_UNROLL
            for (int t = 0; t < Tokens; ++t) of_tokens[t] = read<XCodec>(x + t * s.x_ld + d);
            TS_UNROLL
            for (int i = 0; i < rows; ++i) {
                const V values = read<Codec>(w + i * s.depth + d);
                __builtin_prefetch(fetched + i * s.depth + d);
                TS_UNROLL
                for (int t = 0; t < Tokens; ++t) sums[t][i] += values * of_tokens[t];
            }
        }
    }
    TS_UNROLL
    for (int t = 0; t < Tokens; ++t) {
        TS_UNROLL
        for (int i = 0; i < rows; ++i) to[t * kMinRows + i] = sums[t][i];
    }
}

// The same for kMinRows rows and as many tokens as are left, Tokens at a time; returns the first that is not
// among them.
template <class Codec, class XCodec, int Tokens>
TS_INLINE int64_t multiply_few_tokens(const FewTokensStrip& s, int64_t row, int64_t token, int64_t first,
                                      int64_t last, typename Codec::V* sums) {
    for (; token + Tokens <= s.tokens; token += Tokens)
        for (int i = 0; i < kMinRows; i += kFewSums<typename Codec::V> / Tokens)
            multiply_few_rows<Codec, XCodec, Tokens>(s, row + i, token, first, last,
                                                     sums + token * kMinRows + i);
    return token;
}

// All tokens pass over as many entries as the first-level cache holds, then over the next.
template <class Codec, class XCodec>
TS_INLINE void multiply_few(const FewTokensStrip& s) {
    using V = typename Codec::V;
    const int64_t entry_bytes = kMinRows * s.depth * static_cast<int64_t>(sizeof(typename Codec::Stored));
    const int64_t batch = std::max<int64_t>(1, kFewBytes / entry_bytes);
    V sums[kMostFewTokens * kMinRows];
    for (int64_t row = 0; row < s.rows; row += kMinRows) {
        int64_t first = 0;
        do {
            const int64_t last = std::min(first + batch, s.entries);
            int64_t token = multiply_few_tokens<Codec, XCodec, 4>(s, row, 0, first, last, sums);
            token = multiply_few_tokens<Codec, XCodec, 2>(s, row, token, first, last, sums);
            multiply_few_tokens<Codec, XCodec, 1>(s, row, token, first, last, sums);
            first = last;
        } while (first < s.entries);
        for (int64_t token = 0; token < s.tokens; ++token)
            for (int i = 0; i < kMinRows; i += lanes_of<V>)
                store(static_cast<element_t<V>*>(s.sums) + token * s.sums_ld + row + i,
                      sum_of_lanes(sums + token * kMinRows + i));
    }
}

// ---- finish ----

template <class V>
TS_INLINE V exp_vector(const V& x) {
    if constexpr (std::is_same_v<element_t<V>, double>) {
        V result;
        for (int i = 0; i < lanes_of<V>; ++i) result[i] = std::exp(x[i]);
        return result;
    } else {
        // x = n log 2 + r, |r| <= log(2) / 2; the Taylor series of exp(r) is good to 1e-8.
        using I = Vector<int32_t, sizeof(V)>;
        const V low = V{} - 87.0f, high = V{} + 88.0f;
        const V clamped = x < low ? low : x > high ? high : x;
        const V magic = V{} + 0x1.8p23f;
        const V n = (clamped * 1.44269504f + magic) - magic;
        const V r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
        V series = r * (1.0f / 5040) + 1.0f / 720;
        series = series * r + 1.0f / 120;
        series = series * r + 1.0f / 24;
        series = series * r + 1.0f / 6;
        series = series * r + 0.5f;
        series = series * r + 1.0f;
        series = series * r + 1.0f;
        const I exponent = (__builtin_convertvector(n == n ? n : V{}, I) + 127) << 23;
        const V result = series * bit_cast_vector<V>(exponent);
        const V limited = x < low ? V{} : x > high ? V{} + __builtin_inff() : result;
        return limited;
    }
}

// The distribution function of the normal distribution.
template <class V>
TS_INLINE V normal_cdf(const V& x) {
    if constexpr (std::is_same_v<element_t<V>, double>) {
        V result;
        for (int i = 0; i < lanes_of<V>; ++i) result[i] = 0.5 * std::erfc(-x[i] * 0.70710678118654752440);
        return result;
    } else {
        // erfc(z) exp(z^2) as a polynomial in t = 1 / (1 + z / 2), fitted to a relative error of
        // 4.3e-8 on 0 <= z <= 10 (the form is Abramowitz and Stegun, 7.1.26).
        constexpr float kFit[] = {-0.059069693739f, 0.28457843164f,   -0.48720682272f,
                                  0.27807475171f,   -0.026630641922f, 0.20268885567f,
                                  0.24310329358f,   0.28237536815f,   0.28208641476f};
        const V z = (x < 0 ? -x : x) * 0.707106781f;
        const V t = 1.0f / (1.0f + 0.5f * z);
        V fit{};
        TS_UNROLL
        for (const float coefficient : kFit) fit = (fit + coefficient) * t;
        const V tail = 0.5f * fit * exp_vector(-0.5f * x * x);
        const V result = x < 0 ? tail : 1.0f - tail;
        return result;
    }
}

template <Activation activation, class V>
TS_INLINE V activate(const V& x) {
    if constexpr (activation == Activation::relu) {
        const V result = x < 0 ? V{} : x;  // keeps NaN
        return result;
    }
    if constexpr (activation == Activation::gelu) return x * normal_cdf(x);
    if constexpr (activation == Activation::silu) return x / (1 + exp_vector(-x));
    return x;
}

template <Activation activation, class V>
TS_INLINE void activate_sums(const Output& o, const element_t<V>* bias) {
    for (int64_t row = 0; row < o.rows; ++row) {
        auto* sums = static_cast<element_t<V>*>(o.sums) + row * o.sums_ld;
        for (int64_t column = 0; column < o.columns; column += lanes_of<V>) {
            const V added = o.bias_of_columns ? load<V>(bias + column) : V{} + bias[row];
            store(sums + column, activate<activation>(load<V>(sums + column) + added));
        }
    }
}

template <class Codec>
TS_INLINE void activate_sums(const Output& o) {
    using S = typename Codec::S;
    using V = typename Codec::V;
    element_t<V> bias[kTaskFeatures] = {};
    const int64_t features = o.bias_of_columns ? o.columns : o.rows;
    for (int i = 0; o.bias && i < features; i += lanes_of<V>)
        store(bias + i, Codec::decode(load<S>(static_cast<const typename Codec::Stored*>(o.bias) + i)));
    switch (o.activation) {
        case Activation::none:
            return activate_sums<Activation::none, V>(o, bias);
        case Activation::relu:
            return activate_sums<Activation::relu, V>(o, bias);
        case Activation::gelu:
            return activate_sums<Activation::gelu, V>(o, bias);
        case Activation::silu:
            return activate_sums<Activation::silu, V>(o, bias);
    }
}

template <class Codec>
TS_INLINE typename Codec::V added_at(const Output& o, int64_t line, int64_t first,
                                     int64_t count = lanes_of<typename Codec::V>) {
    const auto* from = static_cast<const typename Codec::Stored*>(o.added) + line * o.added_ld + first;
    return Codec::decode(load<typename Codec::S>(from, count));
}

template <class V>
TS_INLINE V with_added(const Output& o, const V& sum, const V& added) {
    return o.gated ? sum * added : sum + added;
}

template <class Codec>
TS_INLINE void store_rows(const Output& o) {
    using V = typename Codec::V;
    for (int64_t row = 0; row < o.rows; ++row) {
        const auto* sums = static_cast<const element_t<V>*>(o.sums) + row * o.sums_ld;
        auto* to = static_cast<typename Codec::Stored*>(o.data) + row * o.ld;
        for (int64_t column = 0; column < o.columns; column += lanes_of<V>) {
            const int64_t count = o.columns - column;
            V value = load<V>(sums + column);
            if (o.added) value = with_added(o, value, added_at<Codec>(o, row, column, count));
            store(to + column, Codec::encode(value), count);
        }
    }
}

template <class Codec>
TS_INLINE void store_transposed(const Output& o) {
    using V = typename Codec::V;
    constexpr int lanes = lanes_of<V>;
    for (int64_t column = 0; column < o.columns; column += lanes)
        for (int64_t row = 0; row < o.rows; row += lanes) {
            const auto* sums = static_cast<const element_t<V>*>(o.sums) + row * o.sums_ld + column;
            auto* to = static_cast<typename Codec::Stored*>(o.data) + column * o.ld + row;
            V square[lanes];
            TS_UNROLL
            for (int i = 0; i < lanes; ++i) square[i] = load<V>(sums + i * o.sums_ld);
            transpose(square);
            const int64_t count = o.columns - column;
            TS_UNROLL
            for (int i = 0; i < lanes; ++i) {
                if (i >= count) continue;
                if (o.added) square[i] = with_added(o, square[i], added_at<Codec>(o, column + i, row));
                store(to + i * o.ld, Codec::encode(square[i]));
            }
        }
}

template <class Codec>
TS_INLINE void store_output(const Output& o) {
    if (o.transposed)
        store_transposed<Codec>(o);
    else
        store_rows<Codec>(o);
}

template <Activation activation, class Codec>
TS_INLINE void activate_gate(const Output& o, int64_t lines, int64_t length, void* to) {
    constexpr int lanes = lanes_of<typename Codec::V>;
    for (int64_t line = 0; line < lines; ++line)
        for (int64_t at = 0; at < length; at += lanes)
            store(static_cast<typename Codec::Stored*>(to) + line * kTaskFeatures + at,
                  Codec::encode(activate<activation>(added_at<Codec>(o, line, at, length - at))));
}

// Stores with a copy of the gate that is activated.
template <class Codec>
TS_INLINE void store_gated(Output o) {
    alignas(64) typename Codec::Stored activated[kTaskFeatures * kTaskFeatures];
    const int64_t lines = o.transposed ? o.columns : o.rows, length = o.transposed ? o.rows : o.columns;
    switch (o.gate_activation) {
        case Activation::none:
            break;
        case Activation::relu:
            activate_gate<Activation::relu, Codec>(o, lines, length, activated);
            break;
        case Activation::gelu:
            activate_gate<Activation::gelu, Codec>(o, lines, length, activated);
            break;
        case Activation::silu:
            activate_gate<Activation::silu, Codec>(o, lines, length, activated);
            break;
    }
    if (o.gate_activation != Activation::none) {
        o.added = activated;
        o.added_ld = kTaskFeatures;
    }
    store_output<Codec>(o);
}

template <class Codec>
TS_INLINE void finish(const Output& o) {
    if (o.bias || o.activation != Activation::none) activate_sums<Codec>(o);
    if (o.gated)
        store_gated<Codec>(o);
    else
        store_output<Codec>(o);
}

// ---- scale ----

// 8 bits in words. In two steps, since GCC widens vectors of bytes to words one by one.
template <int Lanes>
TS_INLINE Vector<uint32_t, 4 * Lanes> widened(const uint8_t* bytes) {
    const auto halves =
        __builtin_convertvector(load<Vector<uint8_t, Lanes>>(bytes), Vector<uint16_t, 2 * Lanes>);
    return __builtin_convertvector(halves, Vector<uint32_t, 4 * Lanes>);
}

// In integers, as float16 is decoded: exact whatever the processor does with subnormal numbers.
template <class V, class U>
TS_INLINE V decode_float8(const U& bits) {
    const U magnitude = (bits & 0x7f) << 20;
    const U normal = magnitude + (120u << 23);  // the difference of the exponents' biases
    const U subnormal = bit_cast_vector<U>(bit_cast_vector<V>(magnitude + (121u << 23)) - 0x1p-6f);
    const U finite = magnitude < (1u << 23) ? subnormal : normal;
    const U result = magnitude == (0x7fu << 20) ? U{} + 0x7fc00000 : finite;
    return bit_cast_vector<V>(result | (bits & 0x80) << 24);
}

template <class V, class U>
TS_INLINE V decode_int8(const U& bits) {
    using I = Vector<int32_t, sizeof(V)>;
    return __builtin_convertvector(bit_cast_vector<I>(bits << 24) >> 24, V);
}

template <class Codec, bool IsFloat8>
TS_INLINE void scale(const Scaling& s) {
    constexpr int lanes = sizeof(typename Codec::V) / sizeof(float);
    using V = Vector<float, 4 * lanes>;
    auto* to = static_cast<typename Codec::Stored*>(s.target);
    const uint8_t* const values = s.values;
    const float scale = s.scale;
    for (int64_t i = 0, count = s.count; i < count; i += lanes) {
        const auto bits = widened<lanes>(values + i);
        V weight;
        if constexpr (IsFloat8)
            weight = decode_float8<V>(bits) * scale;
        else
            weight = decode_int8<V>(bits) * scale;
        if constexpr (sizeof(typename Codec::Stored) == 8)
            store(to + i, __builtin_convertvector(weight, Vector<double, 8 * lanes>));
        else
            store(to + i, Codec::encode(weight));
    }
}

template <class Codec>
TS_INLINE void scale(const Scaling& s) {
    if (s.is_float8)
        scale<Codec, true>(s);
    else
        scale<Codec, false>(s);
}

// ---- instruction sets, defined in steps.cpp ----

struct InstructionSet {
    bool (*available)();  // on this machine
    const char* missing;  // the reason to give where it is not
    Steps steps[4];       // by DType
};

extern const InstructionSet portable;
#ifdef __x86_64__
extern const InstructionSet avx2, avx512, avx512_bf16, amx_bf16;
#endif

// The widest instruction set of this machine that has steps for every dtype.
const InstructionSet& widest();

}  // namespace ts::cpu
