// Sums over a part of what a tile is summed over, kept in memory until all parts are there.
#pragma once

#include <cstdint>

namespace ts::sm90 {

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

template <int kSums>
__device__ inline void add_sums(const float4* from, float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
        const float4 next = __ldcs(from + 128 * i);
        sums[4 * i] += next.x;
        sums[4 * i + 1] += next.y;
        sums[4 * i + 2] += next.z;
        sums[4 * i + 3] += next.w;
    }
}

}  // namespace ts::sm90
