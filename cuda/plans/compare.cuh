// Whether arrays hold what their copies do.
#pragma once

#include "plans/sets.cuh"

namespace ts::plans {

constexpr int kComparers = 8;  // thread blocks for each pair, so that the longest one does not last

static __global__ void compare_arrays(ArrayPair* pairs, int64_t mark) {
    ArrayPair& pair = pairs[blockIdx.x / kComparers];
    const int64_t step = int64_t{kComparers} * blockDim.x;
    bool same = true;
#pragma unroll 4
    for (int64_t i = int64_t{blockIdx.x % kComparers} * blockDim.x + threadIdx.x; i < pair.count; i += step)
        same = same && pair.first[i] == pair.second[i];
    // The first mark stays: it says since when they differ.
    if (!__syncthreads_and(same) && threadIdx.x == 0 && pair.differs == 0) pair.differs = mark;
}

}  // namespace ts::plans
