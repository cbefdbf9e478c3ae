// The step that multiplies values of 8 or 4 bits by their scale, for vectors of any length.
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

// Two values to a byte, the earlier in its low half, as numbers of 32 bits.
template <class V, int Lanes>
TS_INLINE V decode_int4(const Vector<uint8_t, Lanes / 2>& bytes) {
    const auto pairs = __builtin_convertvector(bytes, Vector<uint16_t, Lanes>);
    const auto apart = bit_cast_vector<Vector<uint8_t, Lanes>>((pairs << 4 & 0xf0) | (pairs & 0xf0) << 8);
    using I = Vector<int32_t, sizeof(V)>;
    return __builtin_convertvector(bit_cast_vector<I>(widened<Lanes>(apart) << 24) >> 28, V);
}

// A vector of values from the i-th on.
template <DType kDType, class V, int Lanes>
TS_INLINE V decode_values(const uint8_t* values, int64_t i) {
    if constexpr (kDType == DType::int4) {
        return decode_int4<V, Lanes>(load<Vector<uint8_t, Lanes / 2>>(values + i / 2));
    } else {
        const auto bits = widened<Lanes>(load<Vector<uint8_t, Lanes>>(values + i));
        if constexpr (kDType == DType::int8)
            return decode_int8<V>(bits);
        else
            return decode_float8<V>(bits);
    }
}

template <class Codec, DType kDType>
TS_INLINE void scale(const Scaling& s) {
    constexpr int lanes = sizeof(typename Codec::V) / sizeof(float);
    using V = Vector<float, 4 * lanes>;
    auto* to = static_cast<typename Codec::Stored*>(s.target);
    const uint8_t* const values = s.values;
    const float scale = s.scale;
    for (int64_t i = 0, count = s.count; i < count; i += lanes) {
        const V weight = decode_values<kDType, V, lanes>(values, i) * scale;
        if constexpr (sizeof(typename Codec::Stored) == 8)
            store(to + i, __builtin_convertvector(weight, Vector<double, 8 * lanes>));
        else
            store(to + i, Codec::encode(weight));
    }
}

template <class Codec>
TS_INLINE void scale(const Scaling& s) {
    if (s.dtype == DType::int4)
        scale<Codec, DType::int4>(s);
    else if (s.dtype == DType::int8)
        scale<Codec, DType::int8>(s);
    else
        scale<Codec, DType::float8_e4m3fn>(s);
}

// Copies values as they are summed.
template <class C>
struct BlockDecode {
    using Arguments = DecodedValues;

    static TS_INLINE void run(const DecodedValues& d) {
        using V = typename C::V;
        const auto* const from = static_cast<const typename C::Stored*>(d.values);
        auto* const to = static_cast<element_t<V>*>(d.target);
        for (int64_t i = 0; i < d.count; i += lanes_of<V>)
            store(to + i, C::decode(load<typename C::S>(from + i, d.count - i)), d.count - i);
    }
};

}  // namespace ts::cpu
