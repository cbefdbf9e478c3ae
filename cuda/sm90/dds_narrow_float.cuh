// Forward and dgrad of float32 for blocks with a side of 16: dds_narrow.cuh with wgmma for TF32. Blocks
// that have more features than k are several squares, too.
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Operands: as in dds_narrow.cuh, but row-major activations alone. Steps have 64 k, or 32 where blocks crowd.
// tf32 rounds both operands, the weight as it is packed. tf32x3 takes two parts of each (dds_split.cuh): two
// more warps write the second parts of activations beside the first, and a CTA has 64 tokens. CTA, cluster,
// warps and splits: as in dds_narrow.cuh. Chosen where its estimate is least, for such blocks.
#pragma once

#include "sm90/dds_narrow_launch.cuh"

namespace ts::sm90 {

template <class Math>
struct NarrowFloat : Math {
    template <cute::SM90::GMMA::Major, int kColumns>
    using RegisterAtom =
        std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x8_F32TF32TF32_RS_TN<>,
                           cute::SM90::GMMA::MMA_64x64x8_F32TF32TF32_RS_TN<>>;
};

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks) \
    TS_SM90_ROW(name, DdsNarrow<NarrowFloat<math>, token_ranks, row_ranks>)
