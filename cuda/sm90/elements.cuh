// Element types by the names that rows of tiles.def use, and how they are multiplied.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include <cute/arch/mma_sm90_gmma.hpp>

#include "common/elements.h"
#include "tma/ring.cuh"

namespace ts::sm90 {

using namespace tma;  // the parts that kernels of every TMA architecture are made of

//     kMapType: the type that TMA loads them as
//     Atom, RegisterAtom: wgmma of 64 x kColumns sums, the first operand in shared memory or in registers
//     kParts: what is multiplied of an activation; see dds_split.cuh for two
struct bf16 : Uniform<__nv_bfloat16> {
    static constexpr Precision kPrecision = Precision::highest;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    static constexpr int kParts = 1;
    template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB, int kColumns = 256>
    using Atom = std::conditional_t<
        kColumns == 256, cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kA, kB>,
        std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<kA, kB>,
                           cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<kA, kB>>>;
    template <cute::SM90::GMMA::Major kB, int kColumns>
    using RegisterAtom =
        std::conditional_t<kColumns == 256,
                           cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, kB>,
                           cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, kB>>;
};
struct f16 : Uniform<__half> {
    static constexpr Precision kPrecision = Precision::highest;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    static constexpr int kParts = 1;
    template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB, int kColumns = 256>
    using Atom = std::conditional_t<
        kColumns == 256, cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<kA, kB>,
        std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<kA, kB>,
                           cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<kA, kB>>>;
    template <cute::SM90::GMMA::Major kB, int kColumns>
    using RegisterAtom =
        std::conditional_t<kColumns == 256,
                           cute::SM90::GMMA::MMA_64x256x16_F32F16F16_RS<cute::SM90::GMMA::Major::K, kB>,
                           cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<cute::SM90::GMMA::Major::K, kB>>;
};

// Operands of TF32, which wgmma reads along k alone.
struct Tf32Products {
    template <cute::SM90::GMMA::Major kB, int kColumns>
    using RegisterAtom =
        std::conditional_t<kColumns == 256, cute::SM90::GMMA::MMA_64x256x8_F32TF32TF32_RS_TN<>,
                           cute::SM90::GMMA::MMA_64x128x8_F32TF32TF32_RS_TN<>>;
};
// float32 as TF32, to which TMA rounds what it loads.
struct tf32 : Uniform<float>, Tf32Products {
    static constexpr Precision kPrecision = Precision::tf32;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
    static constexpr int kParts = 1;
};
// float32 with its own error, in three products of TF32.
struct tf32x3 : Uniform<float, Accumulation::promoted>, Tf32Products {
    static constexpr Precision kPrecision = Precision::highest;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    static constexpr int kParts = 2;
};

// Activations and values in 8 bits, which wgmma reads along k alone.
struct Int8Products {
    template <int kColumns>
    using ByteAtom =
        std::conditional_t<kColumns == 256, cute::SM90::GMMA::MMA_64x256x32_S32S8S8_SS_TN,
                           std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x32_S32S8S8_SS_TN,
                                              cute::SM90::GMMA::MMA_64x64x32_S32S8S8_SS_TN>>;
};
struct Float8Products {
    template <int kColumns>
    using ByteAtom = std::conditional_t<
        kColumns == 256, cute::SM90::GMMA::MMA_64x256x32_F32E4M3E4M3_SS_TN<>,
        std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>,
                           cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>>>;
};
template <class Elements, class Products, Precision kPrecision_>
struct Bytes : Elements, Products {
    static constexpr Precision kPrecision = kPrecision_;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    static constexpr int kParts = 1;
};
template <class Result>
using Int8 = Bytes<Elements<int8_t, int8_t, int32_t, Result>, Int8Products, Precision::highest>;
// Tensor cores keep about 13 bits of what they add to a sum of float8: see CarriedSums.
template <class Result>
using Float8 = Bytes<Elements<__nv_fp8_e4m3, __nv_fp8_e4m3, float, Result, Accumulation::carried>,
                     Float8Products, Precision::highest>;
// Sums of 128 of k are multiplied by the scales of their tokens and of their block first.
template <class Result>
using ScaledFloat8 = Bytes<Elements<__nv_fp8_e4m3, __nv_fp8_e4m3, float, Result, Accumulation::scaled>,
                           Float8Products, Precision::highest>;
using int8_bf16 = Int8<__nv_bfloat16>;
using int8_f16 = Int8<__half>;
using int8_f32 = Int8<float>;
using float8_bf16 = Float8<__nv_bfloat16>;
using float8_f16 = Float8<__half>;
using float8_f32 = Float8<float>;
using float8_scaled_bf16 = ScaledFloat8<__nv_bfloat16>;
using float8_scaled_f16 = ScaledFloat8<__half>;
using float8_scaled_f32 = ScaledFloat8<float>;

// Two sums as results that lie side by side.
template <class Result>
__device__ inline uint32_t rounded(float first, float second) {
    if constexpr (std::is_same_v<Result, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        return reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __half2 pair = __floats2half2_rn(first, second);
        return reinterpret_cast<const uint32_t&>(pair);
    }
}

}  // namespace ts::sm90
