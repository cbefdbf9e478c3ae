// Packs the weight for the dds kernel for narrow blocks: its units one after another in the order in which
// they are multiplied, each as wgmma reads it from shared memory.
#pragma once

#include "sm90/dds_narrow_traits.cuh"

namespace ts::sm90 {

// One warp for each unit, one lane for each of its features. Lines of k are swizzled over their width.
template <class Element, int kBlock, bool kTransposed>
__global__ void __launch_bounds__(256) pack_narrow_kernel(const PlanHeader* header, const Element* values,
                                                          char* packed) {
    constexpr int kParts = 32 / kBlock, kLine = 2 * kBlock, kChunk = 8;
    const NarrowPlan plan(header);
    const int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, feature = threadIdx.x % 32;
    if (unit >= plan.unit_count) return;
    const int slot = __ldg(plan.slots + unit * kParts + feature / kBlock), within = feature % kBlock;
    const Element* const block = values + int64_t{slot} * (kBlock * kBlock);
    char* const line = packed + int64_t{unit} * (32 * kLine) + feature * kLine;
#pragma unroll
    for (int chunk = 0; chunk < kBlock / kChunk; ++chunk) {
        alignas(16) Element elements[kChunk] = {};
        if (slot >= 0) {
            if (kTransposed) {
#pragma unroll
                for (int i = 0; i < kChunk; ++i) elements[i] = block[(chunk * kChunk + i) * kBlock + within];
            } else {
                reinterpret_cast<uint4&>(elements) =
                    reinterpret_cast<const uint4*>(block + within * kBlock)[chunk];
            }
        }
        const int swizzled = chunk ^ (feature * kLine / 128 & kLine / 16 - 1);
        reinterpret_cast<uint4*>(line)[swizzled] = reinterpret_cast<const uint4&>(elements);
    }
}

}  // namespace ts::sm90
