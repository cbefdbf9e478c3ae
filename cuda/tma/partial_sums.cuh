// Sums over a part of what a tile is summed over, kept in memory until all parts are there.
#pragma once

#include <cstdint>

namespace ts::tma {

// Where the thread keeps the sums that are its warpgroup's `place`-th: in vectors of 16 bytes, those of a
// warpgroup side by side, [places][kSums / 4][128].
template <int kSums>
__device__ inline float4* partial_sums(float4* partial, int64_t place) {
    return partial + place * (kSums / 4 * 128) + threadIdx.x % 128;
}

template <int kSums>
__device__ inline void store_sums(float4* to, const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i)
        to[128 * i] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
}

__device__ inline void add_vector(const float4& vector, float* sums) {
    sums[0] += vector.x;
    sums[1] += vector.y;
    sums[2] += vector.z;
    sums[3] += vector.w;
}

// Of so many parts, which lie `distance` apart, always in the same order. Several are read at a time: memory
// takes long to answer.
template <int kSums>
__device__ inline void add_parts(const float4* from, int64_t distance, int parts, float (&sums)[kSums]) {
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
