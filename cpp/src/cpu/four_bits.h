// Decode of values of int4: a byte of each lane, whose low half is multiplied by one vector of x and whose
// high half by another. Weights are value times scale in float32.
#pragma once

#include <cstdint>

#include "cpu/multiply_decode.h"
#include "cpu/scale.h"
#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

template <int Bytes>
struct DecodeInt4 {
    using Value = uint8_t;
    using X = float;
    using Sum = Vector<float, Bytes>;
    using Narrower = DecodeInt4<Bytes / 2>;
    using Words = Vector<int32_t, Bytes>;
    static constexpr int kPerValue = 2, kRows = 1, kLanes = lanes_of<Sum>;
    static constexpr int kStep = 2 * kLanes;  // of k
#ifdef __clang__
    static constexpr bool kLooksUp = false;
#else
    static constexpr bool kLooksUp = kLanes == 16;  // in a vector of all weights that four bits stand for
#endif

    struct Pair {
        Sum low, high;
    };
    using Row = Sum;  // these weights, or the scale

    static TS_INLINE Row row(float scale) {
        if constexpr (kLooksUp)
            return Sum{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1} * scale;
        else
            return Sum{} + scale;
    }
    static TS_INLINE Pair values(const Value* from, const Row& row) {
        const auto words = bit_cast_vector<Words>(widened<kLanes>(load<Vector<uint8_t, kLanes>>(from)));
#ifndef __clang__
        if constexpr (kLooksUp) return {__builtin_shuffle(row, words), __builtin_shuffle(row, words >> 4)};
#endif
        return {__builtin_convertvector(words << 28 >> 28, Sum) * row,
                __builtin_convertvector(words << 24 >> 28, Sum) * row};
    }
    static TS_INLINE Pair x(const X* from) { return {load<Sum>(from), load<Sum>(from + kLanes)}; }
    static TS_INLINE void add(Sum& sum, const Pair& x, const Pair& values) {
        sum += values.low * x.low;
        sum += values.high * x.high;
    }
};

}  // namespace ts::cpu
