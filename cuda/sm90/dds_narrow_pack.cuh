// Packs the weight for the dds kernel for narrow blocks: its blocks one after another in the order in which
// they are multiplied, features by k.
#pragma once

#include "sm90/dds_narrow_traits.cuh"

namespace ts::sm90 {

// One warp for each block. A lane moves pieces of 16 bytes, which it reads side by side with the other lanes.
template <class Element, int kBlock, bool kTransposed>
__global__ void __launch_bounds__(256)
    pack_narrow_kernel(const PlanHeader* header, int blocks, const Element* __restrict__ values,
                       char* __restrict__ packed) {
    constexpr int kPiece = 8, kPieces = kBlock / kPiece, kAll = kBlock * kPieces / 32;
    cudaTriggerProgrammaticLaunchCompletion();  // the kernel that multiplies may begin, and waits by itself
    const int block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (block >= blocks) return;
    const Element* const from = values + int64_t{__ldg(DdsPlan(header).slots + block)} * (kBlock * kBlock);
    alignas(16) Element elements[kAll][kPiece];
    int places[kAll];
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
        const int index = i * 32 + lane;
        const int feature = kTransposed ? index % kBlock : index / kPieces;
        const int piece = kTransposed ? index / kBlock : index % kPieces;
        if (kTransposed) {
#pragma unroll
            for (int k = 0; k < kPiece; ++k) elements[i][k] = from[(piece * kPiece + k) * kBlock + feature];
        } else {
            reinterpret_cast<uint4&>(elements[i]) =
                reinterpret_cast<const uint4*>(from + feature * kBlock)[piece];
        }
        places[i] = packed_place<kBlock>(feature, piece);
    }
    char* const target = packed + int64_t{block} * (kBlock * kBlock * sizeof(Element));
#pragma unroll
    for (int i = 0; i < kAll; ++i)
        *reinterpret_cast<uint4*>(target + places[i]) = reinterpret_cast<const uint4&>(elements[i]);
}

}  // namespace ts::sm90
