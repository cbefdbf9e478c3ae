// Forward of activations and values in 8 bits for blocks of 32 features by as many k or more:
// dds_narrow.cuh with wgmma for these types.
//   Y[M,N] = scale[M] * (X[M,K] * W[N,K]^T) * scale[N]
// Operands: as in dds_narrow.cuh, but X row-major alone, in lines of 64 bytes, and the scales of
// dds_8bit.cuh. A product has 32 of k, those of one block. What is carried of sums of float8 lies in shared
// memory. CTA, cluster, warps, steps and splits: as in
// dds_narrow.cuh, with half of the bytes.
// Chosen where its estimate is least, for such blocks.
#pragma once

#include "sm90/dds_narrow_launch.cuh"

namespace ts::sm90 {

// 8 bits with the first operand in registers.
template <class Math>
struct FromRegisters : Math {
    template <cute::SM90::GMMA::Major, int kColumns>
    using RegisterAtom =
        std::conditional_t<Math::kInput == DType::int8, cute::SM90::GMMA::MMA_64x128x32_S32S8S8_RS_TN,
                           cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>>;
};

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks) \
    TS_SM90_ROW(name, DdsNarrow<FromRegisters<math>, token_ranks, row_ranks>)
