// The step that writes results, for vectors of any length.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/activation.h"
#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

// The numbers of columns, or that of a row: less zero, which the compiler leaves out.
template <class V>
TS_INLINE V numbers_at(const element_t<V>* numbers, bool of_columns, int64_t row, int64_t column) {
    return of_columns ? load<V>(numbers + column) : numbers[row] - V{};
}

// Sums that are results but for bias and activation.
struct PlainSums {
    explicit PlainSums(const Output&) {}
    template <class V>
    TS_INLINE V at(const Output& o, int64_t row, int64_t column) const {
        return load<V>(static_cast<const element_t<V>*>(o.sums) + row * o.sums_ld + column);
    }
};

// Sums of products of 8 bits, in int32 or float32.
template <bool IsInteger>
struct RescaledSums {
    // Copies, as those of the bias: no store can change them. None of a token is read that does not exist.
    alignas(64) float token_scales[kTaskFeatures] = {};
    alignas(64) float feature_scales[kTaskFeatures] = {};
    alignas(64) int32_t offsets[kTaskFeatures] = {};

    TS_INLINE explicit RescaledSums(const Output& o) {
        const int64_t tokens = o.columns_are_features ? o.rows : o.columns;
        const int64_t features = o.columns_are_features ? o.columns : o.rows;
        std::memcpy(token_scales, o.rescale.token_scales, tokens * sizeof(float));
        std::memcpy(feature_scales, o.rescale.feature_scales, features * sizeof(float));
        if constexpr (IsInteger) std::memcpy(offsets, o.rescale.offsets, features * sizeof(int32_t));
    }
    template <class V>
    TS_INLINE V at(const Output& o, int64_t row, int64_t column) const {
        using U = Vector<uint32_t, sizeof(V)>;
        using I = Vector<int32_t, sizeof(V)>;
        const bool features = o.columns_are_features;
        V sum = PlainSums(o).at<V>(o, row, column);
        if constexpr (IsInteger) {
            const auto offset = numbers_at<I>(offsets, features, row, column);
            const U difference = bit_cast_vector<U>(sum) - bit_cast_vector<U>(offset);
            sum = __builtin_convertvector(bit_cast_vector<I>(difference), V);
        }
        sum *= numbers_at<V>(token_scales, !features, row, column);
        return settled(sum * numbers_at<V>(feature_scales, features, row, column));
    }
};

// Either of them and the bias.
template <class Codec, class Sums>
struct BiasedSums {
    using V = typename Codec::V;
    const Sums sums;
    alignas(64) element_t<V> bias[kTaskFeatures] = {};

    TS_INLINE explicit BiasedSums(const Output& o) : sums(o) {
        const auto* from = static_cast<const typename Codec::Stored*>(o.bias);
        const int64_t features = o.columns_are_features ? o.columns : o.rows;
        for (int i = 0; from && i < features; i += lanes_of<V>)
            store(bias + i, Codec::decode(load<typename Codec::S>(from + i, features - i)));
    }
    template <class V>
    TS_INLINE V at(const Output& o, int64_t row, int64_t column) const {
        return sums.template at<V>(o, row, column) + numbers_at<V>(bias, o.columns_are_features, row, column);
    }
};

template <Activation activation, class V, class Sums>
TS_INLINE void activate_sums(const Output& o, const Sums& sums) {
    for (int64_t row = 0; row < o.rows; ++row) {
        auto* to = static_cast<element_t<V>*>(o.sums) + row * o.sums_ld;
        for (int64_t column = 0; column < o.columns; column += lanes_of<V>)
            store(to + column, activate<activation>(sums.template at<V>(o, row, column)));
    }
}

// Gelu: the one that computes Activation::gelu.
template <class Codec, class Sums, Activation Gelu>
TS_INLINE void activate_sums(const Output& o) {
    using V = typename Codec::V;
    const BiasedSums<Codec, Sums> sums(o);
    switch (o.activation) {
        case Activation::none:
            return activate_sums<Activation::none, V>(o, sums);
        case Activation::relu:
            return activate_sums<Activation::relu, V>(o, sums);
        case Activation::gelu:
            return activate_sums<Gelu, V>(o, sums);
        case Activation::silu:
            return activate_sums<Activation::silu, V>(o, sums);
    }
}

template <class Codec, Activation Gelu>
TS_INLINE void finish_sums(const Output& o) {
    if constexpr (sizeof(element_t<typename Codec::V>) == sizeof(float)) {
        if (o.rescale.offsets) return activate_sums<Codec, RescaledSums<true>, Gelu>(o);
        if (o.rescale.token_scales) return activate_sums<Codec, RescaledSums<false>, Gelu>(o);
    }
    if (o.bias || o.activation != Activation::none) activate_sums<Codec, PlainSums, Gelu>(o);
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

// Two squares at a time: what two stores write is one line of memory where results are float32, and no other
// line takes its place in the cache in between.
template <class Codec>
TS_INLINE void store_transposed(const Output& o) {
    using V = typename Codec::V;
    const PlainSums sums(o);
    constexpr int lanes = lanes_of<V>, squares = 2;
    for (int64_t column = 0; column < o.columns; column += lanes)
        for (int64_t row = 0; row < o.rows; row += squares * lanes) {
            auto* to = static_cast<typename Codec::Stored*>(o.data) + column * o.ld + row;
            V square[squares][lanes];
            TS_UNROLL
            for (int j = 0; j < squares; ++j) {
                TS_UNROLL
                for (int i = 0; i < lanes; ++i) square[j][i] = sums.at<V>(o, row + j * lanes + i, column);
                transpose(square[j]);
            }
            const int64_t count = o.columns - column;
            TS_UNROLL
            for (int i = 0; i < lanes; ++i) {
                if (i >= count) continue;
                TS_UNROLL
                for (int j = 0; j < squares; ++j) {
                    V value = square[j][i];
                    if (o.added)
                        value = with_added(o, value, added_at<Codec>(o, column + i, row + j * lanes));
                    store(to + i * o.ld + j * lanes, Codec::encode(value));
                }
            }
        }
}

template <class Codec, class Square>
TS_INLINE void store_output(const Output& o) {
    if (o.transposed)
        store_transposed<Square>(o);
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
template <class Codec, class Square>
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
    store_output<Codec, Square>(o);
}

// The results that most products of int8 have, in one pass: sums become results once they are transposed, as
// then what belongs to features stays in registers.
template <class Codec, int SquareBytes, Activation activation>
TS_INLINE void store_rescaled(const Output& o) {
    using V = typename Codec::V;
    using I = Vector<int32_t, sizeof(V)>;
    using U = Vector<uint32_t, sizeof(V)>;
    constexpr int lanes = lanes_of<V>, tokens = SquareBytes / sizeof(int32_t);
    const BiasedSums<Codec, RescaledSums<true>> numbers(o);
    for (int64_t column = 0; column < o.columns; column += tokens)
        for (int64_t row = 0; row < o.rows; row += lanes) {
            const auto* from = static_cast<const int32_t*>(o.sums) + row * o.sums_ld + column;
            I square[tokens];
            TS_UNROLL
            for (int i = 0; i < tokens; ++i)
                square[i] = load_parts<SquareBytes, I>(from + i * o.sums_ld, from + (tokens + i) * o.sums_ld);
            transpose(square);
            const U offsets = load<U>(numbers.sums.offsets + row);
            const V scales = load<V>(numbers.sums.feature_scales + row), bias = load<V>(numbers.bias + row);
            auto* to = static_cast<typename Codec::Stored*>(o.data) + column * o.ld + row;
            const int64_t count = std::min<int64_t>(o.columns - column, tokens);
            const auto result = [&](int i) __attribute__((always_inline)) {
                const U difference = bit_cast_vector<U>(square[i]) - offsets;
                const V sum = __builtin_convertvector(bit_cast_vector<I>(difference), V);
                square[i] =
                    bit_cast_vector<I>(settled(sum * numbers.sums.token_scales[column + i] * scales) + bias);
            };
            const auto write = [&](int i) __attribute__((always_inline)) {
                V value = activate<activation>(bit_cast_vector<V>(square[i]));
                if (o.added) value = with_added(o, value, added_at<Codec>(o, column + i, row));
                store(to + i * o.ld, Codec::encode(value));
            };
            TS_UNROLL
            for (int i = 0; i < tokens; ++i) {
                if (i >= count) continue;
                result(i);
                if constexpr (activation == Activation::none) write(i);
            }
            // Unrolled it would not leave its constants in registers.
            if constexpr (activation != Activation::none)
                for (int i = 0; i < count; ++i) write(i);
        }
}

template <class Codec, int SquareBytes, Activation Gelu>
TS_INLINE void store_rescaled_as(const Output& o) {
    switch (o.activation) {
        case Activation::none:
            return store_rescaled<Codec, SquareBytes, Activation::none>(o);
        case Activation::relu:
            return store_rescaled<Codec, SquareBytes, Activation::relu>(o);
        case Activation::gelu:
            return store_rescaled<Codec, SquareBytes, Gelu>(o);
        case Activation::silu:
            return store_rescaled<Codec, SquareBytes, Activation::silu>(o);
    }
}

// Takes the output by value: no store can change a copy, so what is read of it stays in registers.
template <class Codec, class Square, Activation Gelu = Activation::gelu>
TS_INLINE void finish(Output o) {
    if constexpr (sizeof(element_t<typename Square::V>) == sizeof(float))
        if (o.rescale.offsets && o.transposed && !o.gated)
            return store_rescaled_as<Codec, sizeof(typename Square::V), Gelu>(o);
    finish_sums<Codec, Gelu>(o);
    if (o.gated)
        store_gated<Codec, Square>(o);
    else
        store_output<Codec, Square>(o);
}

}  // namespace ts::cpu
