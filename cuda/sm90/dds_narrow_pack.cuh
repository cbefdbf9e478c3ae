// Packs the weight for the dds kernel for narrow blocks: its blocks one after another in the order in which
// they are multiplied, [nnz] packed blocks as the weight's format has them.
#pragma once

#include "sm90/dds_arguments.cuh"

namespace ts::sm90 {

// One warp for each block.
template <class Weight, bool kTransposed>
__global__ void __launch_bounds__(256)
    pack_narrow_kernel(const PlanHeader* header, int key, int blocks,
                       const typename Weight::Element* __restrict__ values, char* __restrict__ packed) {
    cudaTriggerProgrammaticLaunchCompletion();  // the kernel that multiplies may begin, and waits by itself
    const int block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (block >= blocks) return;
    const DdsPlan plan(header, key);
    if (!plan.is_own) __trap();
    const int64_t slot = __ldg(plan.slots + block);
    Weight::template pack<kTransposed>(values + slot * (Weight::kBlock * Weight::kBlock),
                                       packed + int64_t{block} * Weight::kBlockBytes, lane);
}

}  // namespace ts::sm90
