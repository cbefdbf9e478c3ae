// The steps that quantize activations to 8 bits, for vectors of any length.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

template <class Codec>
TS_INLINE uint32_t largest_magnitude(const void* source, int64_t count) {
    using V = typename Codec::V;
    using S = typename Codec::S;
    using I = Vector<int32_t, sizeof(V)>;
    const auto* const x = static_cast<const typename Codec::Stored*>(source);
    I most{};
    for (int64_t i = 0; i < count; i += lanes_of<V>) {
        const I bits = bit_cast_vector<I>(Codec::decode(load<S>(x + i, count - i))) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    int32_t largest = 0;
    for (int i = 0; i < lanes_of<V>; ++i) largest = std::max(largest, most[i]);
    return static_cast<uint32_t>(largest);
}

// The integer nearest to |x| <= 127, ties to even, in the low byte: 1.5 * 2^23 leaves no fraction.
template <class U, class V>
TS_INLINE U encode_int8(const V& x) {
    return bit_cast_vector<U>(x + 0x1.8p23f);
}

// |x| is at most 448, but for the error of a quotient and a product, which rounding takes away.
template <class U, class V>
TS_INLINE U encode_float8(const V& x) {
    const U bits = bit_cast_vector<U>(x), magnitude = bits & 0x7fffffff;
    const U normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    // 2^14 has the last place of the smallest numbers, 2^-9.
    const U subnormal = bit_cast_vector<U>(bit_cast_vector<V>(magnitude) + 0x1p14f) - (141u << 23);
    return (magnitude < (121u << 23) ? subnormal : normal) | (bits >> 24 & 0x80);
}

template <class Codec, bool ToFloat8>
TS_INLINE void quantize(const Quantizing& q) {
    using V = typename Codec::V;
    using U = Vector<uint32_t, sizeof(V)>;
    using Halves = Vector<uint16_t, sizeof(V) / 2>;
    using Bytes = Vector<uint8_t, sizeof(V) / 4>;
    const auto* const x = static_cast<const typename Codec::Stored*>(q.x);
    for (int64_t i = 0; i < q.count; i += lanes_of<V>) {
        const V scaled = settled(Codec::decode(load<typename Codec::S>(x + i, q.count - i)) * q.inverse);
        U result;
        if constexpr (ToFloat8)
            result = encode_float8<U>(scaled);
        else
            result = encode_int8<U>(scaled);
        // In two steps, as GCC narrows vectors of words to bytes one by one.
        const auto halves = __builtin_convertvector(result & 0xff, Halves);
        store(q.target + i, __builtin_convertvector(halves, Bytes), q.count - i);
    }
}

template <class Codec>
TS_INLINE void quantize(const Quantizing& q) {
    if (q.inverse == 0)
        std::fill_n(q.target, q.count, uint8_t{0});
    else if (q.to_float8)
        quantize<Codec, true>(q);
    else
        quantize<Codec, false>(q);
}

}  // namespace ts::cpu
