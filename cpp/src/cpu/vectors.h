// Vectors of any length, and how elements of each dtype become their lanes.
//
// Everything is inlined into functions compiled for one instruction set (see steps.cpp). Vectors are
// loaded and stored through memcpy: no operand has to be aligned.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/problem.h"

namespace ts::cpu {

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

// A vector as it would be stored: keeps the compiler from fusing the operation that gave it with the next
// one, which would give other bits than an instruction set that cannot.
template <class V>
TS_INLINE V settled(V v) {
#ifdef __x86_64__
    asm("" : "+x"(v));
#else
    asm("" : "+m"(v));
#endif
    return v;
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

// ---- sums and transposes of lanes ----

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

template <int Half, class V, int Count>
TS_INLINE void transpose_stage(V (&rows)[Count]) {
    if constexpr (Half < Count) {
        TS_UNROLL
        for (int i = 0; i < Count; ++i)
            if (!(i & Half))
                exchange<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, lanes_of<V>>{});
        transpose_stage<2 * Half>(rows);
    }
}

// Transposes each square of Count lanes that lie side by side in the rows.
template <class V, int Count>
TS_INLINE void transpose(V (&rows)[Count]) {
    transpose_stage<1>(rows);
}

// A vector whose halves come from two places, or from `low` alone where it is no longer than Bytes.
template <int Bytes, class V>
TS_INLINE V load_parts(const void* low, const void* high) {
    if constexpr (sizeof(V) == Bytes) return load<V>(low);
#ifdef __x86_64__
    using Half = char[Bytes];
    V v;
    asm("vmovdqu32 %1, %t0\n\tvinserti64x4 $1, %2, %0, %0"
        : "=&v"(v)
        : "m"(*static_cast<const Half*>(low)), "m"(*static_cast<const Half*>(high)));
    return v;
#else
    V v;
    std::memcpy(&v, low, Bytes);
    std::memcpy(reinterpret_cast<char*>(&v) + Bytes, high, Bytes);
    return v;
#endif
}

// Integers modulo 2^32: parts of sums of x with an offset may be beyond.
template <class V>
TS_INLINE V sum_of(const V& a, const V& b) {
    if constexpr (std::is_same_v<element_t<V>, int32_t>) {
        using U = Vector<uint32_t, sizeof(V)>;
        return bit_cast_vector<V>(bit_cast_vector<U>(a) + bit_cast_vector<U>(b));
    } else {
        return a + b;
    }
}

template <int Half, class V, int Count, class Combine>
TS_INLINE void combine_lanes(V (&rows)[Count], const Combine& combine) {
    if constexpr (Half < Count) {
        TS_UNROLL
        for (int i = 0; i < Count; i += 2 * Half) {
            exchange<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, lanes_of<V>>{});
            rows[i] = combine(rows[i], rows[i + Half]);
        }
        combine_lanes<2 * Half>(rows, combine);
    }
}

// Lane i is what all lanes of vector i combine to.
template <class V, class Combine>
TS_INLINE V combined_lanes(V (&rows)[lanes_of<V>], const Combine& combine) {
    combine_lanes<1>(rows, combine);
    return rows[0];
}

// Every lane is what all lanes combine to.
template <class V, class Combine, int Half = lanes_of<V> / 2>
TS_INLINE V combined(V v, const Combine& combine) {
    V other = v;
    exchange<Half>(v, other, std::make_integer_sequence<int, lanes_of<V>>{});
    const V both = combine(v, other);
    if constexpr (Half > 1) return combined<V, Combine, Half / 2>(both, combine);
    return both;
}

// Lane Runs * i + r of the result comes from lane `length` * r + i.
template <int Runs, class V, int... J>
TS_INLINE V interleave_runs(const V& v, std::integer_sequence<int, J...>) {
    constexpr int length = lanes_of<V> / Runs;
#ifdef __clang__
    return __builtin_shufflevector(v, v, (J % Runs * length + J / Runs)...);
#else
    using Index = Vector<std::conditional_t<sizeof(element_t<V>) == 8, int64_t, int32_t>, sizeof(V)>;
    return __builtin_shuffle(v, Index{(J % Runs * length + J / Runs)...});
#endif
}

// Lane i is the sum of all lanes of vector i. Or each vector has Runs runs of neighbours, of which each has a
// sum of its own.
template <int Runs, class V>
TS_INLINE V sum_of_lanes(const V* vectors) {
    constexpr int lanes = lanes_of<V>;
    V rows[lanes / Runs];
    TS_UNROLL
    for (int i = 0; i < lanes / Runs; ++i) rows[i] = vectors[i];
    combine_lanes<1>(rows,
                     [](const V& a, const V& b) __attribute__((always_inline)) { return sum_of(a, b); });
    if constexpr (Runs == 1) return rows[0];
    return interleave_runs<Runs>(rows[0], std::make_integer_sequence<int, lanes>{});
}

}  // namespace ts::cpu
