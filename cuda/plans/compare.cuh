// Comparison of arrays with their copies.
#pragma once

#include "plans/sets.cuh"

namespace ts::plans {

constexpr int kComparers = 1024;  // threads of the block that compares a pair

// Pairs lie in memory of the host, which is far: each block reads its own once.
static __global__ void compare_arrays(ArrayPair* pairs, int64_t mark) {
    __shared__ ArrayPair pair;
    if (threadIdx.x == 0) pair = pairs[blockIdx.x];
    __syncthreads();
    bool same = true;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < pair.count; i += kComparers)
        same = same && pair.first[i] == pair.second[i];
    // The first mark stays: it says since when they differ.
    if (!__syncthreads_and(same) && threadIdx.x == 0 && pair.differs == 0) pairs[blockIdx.x].differs = mark;
}

}  // namespace ts::plans
