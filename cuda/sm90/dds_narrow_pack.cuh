// Packs the weight for the dds kernel for narrow blocks: its squares one after another in the order in which
// they are multiplied, as the weight's format has them. A block is some of them in a row or one below the
// other: `beside` lie side by side in memory.
#pragma once

#include "sm90/dds_arguments.cuh"

namespace ts::sm90 {

// One warp for each square.
template <class Weight, bool kTransposed>
__global__ void __launch_bounds__(256)
    pack_narrow_kernel(const PlanHeader* header, int key, PlanReport report, int count, int beside,
                       const typename Weight::Value* __restrict__ values, char* __restrict__ packed) {
    cudaTriggerProgrammaticLaunchCompletion();  // the kernel that multiplies may begin, and waits by itself
    constexpr int kBlock = Weight::kBlock;
    const int place = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (place >= count) return;
    const DdsPlan plan(header, key);
    if (!plan.is_own) return report_stale(report);
    const int square = __ldg(plan.slots + place), in_block = square % beside;
    const int64_t first = int64_t{square - in_block} * (kBlock * kBlock) + in_block * kBlock;
    Weight::template pack<kTransposed>(values + first, beside * kBlock,
                                       packed + int64_t{place} * Weight::kBlockBytes, lane);
}

}  // namespace ts::sm90
