// The step that multiplies values of 8 bits by their scale, for vectors of any length.
#pragma once

#include <cstdint>

#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

// 8 bits in words. In two steps, since GCC widens vectors of bytes to words one by one.
template <int Lanes>
TS_INLINE Vector<uint32_t, 4 * Lanes> widened(const Vector<uint8_t, Lanes>& bytes) {
    const auto halves = __builtin_convertvector(bytes, Vector<uint16_t, 2 * Lanes>);
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
        const auto bits = widened<lanes>(load<Vector<uint8_t, lanes>>(values + i));
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

}  // namespace ts::cpu
