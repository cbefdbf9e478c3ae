// Sums over a part of what a tile is summed over, kept in memory until all parts are there.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ts::tma {

// Address of the thread's sums of its warpgroup's `place`-th partial sums: in vectors of 16 bytes, those of a
// warpgroup side by side, [places][kSums / 4][128].
template <int kSums>
__device__ inline float4* partial_sums(float4* partial, int64_t place) {
    return partial + place * (kSums / 4 * 128) + threadIdx.x % 128;
}

// A sum, float or int32, as the words that are kept.
__device__ inline float as_word(float sum) { return sum; }
__device__ inline float as_word(int32_t sum) { return __int_as_float(sum); }
template <class Sum>
__device__ inline Sum from_word(float word) {
    if constexpr (std::is_same_v<Sum, int32_t>)
        return __float_as_int(word);
    else
        return word;
}

template <class Sum, int kSums>
__device__ inline void store_sums(float4* to, const Sum (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i)
        to[128 * i] = make_float4(as_word(sums[4 * i]), as_word(sums[4 * i + 1]), as_word(sums[4 * i + 2]),
                                  as_word(sums[4 * i + 3]));
}

template <class Sum>
__device__ inline void add_vector(const float4& vector, Sum* sums) {
    sums[0] += from_word<Sum>(vector.x);
    sums[1] += from_word<Sum>(vector.y);
    sums[2] += from_word<Sum>(vector.z);
    sums[3] += from_word<Sum>(vector.w);
}

// Adds the partial sums of that many parts, which lie `distance` apart, always in the same order. Several are
// read at a time: memory takes long to answer.
template <class Sum, int kSums>
__device__ inline void add_parts(const float4* from, int64_t distance, int parts, Sum (&sums)[kSums]) {
    constexpr int kAtOnce = 4, kVectors = kSums / 4;
    for (int first = 0; first < parts; first += kAtOnce) {
        float4 next[kAtOnce][kVectors];
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part)
            if (first + part < parts)
#pragma unroll
                for (int i = 0; i < kVectors; ++i)
                    next[part][i] = __ldcs(from + (first + part) * distance + 128 * i);
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part)
            if (first + part < parts)
#pragma unroll
                for (int i = 0; i < kVectors; ++i) add_vector(next[part][i], sums + 4 * i);
    }
}

template <int kSums>
__device__ inline void add_sums(const float4* from, float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) add_vector(__ldcs(from + 128 * i), sums + 4 * i);
}

}  // namespace ts::tma
