// Packs the weight for the dds kernel for narrow blocks: its units one after another in the order in which
// they are multiplied, each as wgmma reads it from shared memory.
#pragma once

#include "sm90/dds_narrow_traits.cuh"

namespace ts::sm90 {

// One warp for each unit; lines of k are swizzled over their width. A lane moves pieces of 16 bytes, which it
// reads side by side with the other lanes.
template <class Element, int kBlock, bool kTransposed>
__global__ void __launch_bounds__(256)
    pack_narrow_kernel(const PlanHeader* header, const Element* __restrict__ values,
                       char* __restrict__ packed) {
    constexpr int kParts = 32 / kBlock, kLine = 2 * kBlock, kPiece = 8, kPieces = kBlock / kPiece;
    const NarrowPlan plan(header);
    const int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (unit >= plan.unit_count) return;
    alignas(16) Element elements[kPieces][kPiece];
    int places[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const int feature = kTransposed ? lane : (i * 32 + lane) / kPieces;
        const int piece = kTransposed ? i : lane % kPieces;
        const int slot = __ldg(plan.slots + unit * kParts + feature / kBlock), within = feature % kBlock;
        const Element* const block = values + int64_t{slot} * (kBlock * kBlock);
        if (slot < 0) {
            reinterpret_cast<uint4&>(elements[i]) = make_uint4(0, 0, 0, 0);
        } else if (kTransposed) {
#pragma unroll
            for (int k = 0; k < kPiece; ++k) elements[i][k] = block[(piece * kPiece + k) * kBlock + within];
        } else {
            reinterpret_cast<uint4&>(elements[i]) =
                reinterpret_cast<const uint4*>(block + within * kBlock)[piece];
        }
        places[i] = feature * kLine + (piece ^ (feature * kLine / 128 & kPieces - 1)) * 16;
    }
    char* const target = packed + int64_t{unit} * (32 * kLine);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
        *reinterpret_cast<uint4*>(target + places[i]) = reinterpret_cast<const uint4&>(elements[i]);
}

}  // namespace ts::sm90
