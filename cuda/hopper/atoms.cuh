// Element types, wgmma instructions, and small things that all kernels of this folder share.
#pragma once

#include <cuda.h>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/elements.h"
#include "tma/ring.cuh"

namespace ts::sm90 {

// The shared memory of a CTA of compute capability 9.0, which bounds the stages of its rings.

constexpr int kSharedCapacity = 227 << 10;                     // that a CTA can have
constexpr int kControlBytes = 3 << 10;                         // for barriers and the schedule
constexpr int kStagedBytes = kSharedCapacity - kControlBytes;  // for operands and results

// Transposes of words over the lanes of a warp, by which each lane gets neighbours to store.

// Transposes 2 x 2 words over lanes whose numbers differ in one bit.
__device__ inline void exchange(uint32_t& low, uint32_t& high, int bit) {
    const bool upper = threadIdx.x & bit;
    const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, bit);
    (upper ? low : high) = other;
}

// Transposes 4 x 4 words of four lanes. Of 32 neighbours that they hold, each two of every eight, every lane
// gets eight.
__device__ inline void exchange(uint32_t (&words)[4]) {
    exchange(words[0], words[1], 1);
    exchange(words[2], words[3], 1);
    exchange(words[0], words[2], 2);
    exchange(words[1], words[3], 2);
}

// Element types by the names that rows of tiles.def use, and how they are multiplied.

using namespace tma;  // the parts that kernels of every TMA architecture are made of

//     kMapType: the type that TMA loads them as
//     Atom, RegisterAtom: wgmma of 64 x kColumns sums, the first operand in shared memory or in registers
//     kParts: what is multiplied of an activation; see gemm.cuh for two
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
    using ByteAtom = std::conditional_t<
        kColumns == 256, cute::SM90::GMMA::MMA_64x256x32_S32S8S8_SS_TN,
        std::conditional_t<kColumns == 192, cute::SM90::GMMA::MMA_64x192x32_S32S8S8_SS_TN,
                           std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x32_S32S8S8_SS_TN,
                                              cute::SM90::GMMA::MMA_64x64x32_S32S8S8_SS_TN>>>;
};
struct Float8Products {
    template <int kColumns>
    using ByteAtom = std::conditional_t<
        kColumns == 256, cute::SM90::GMMA::MMA_64x256x32_F32E4M3E4M3_SS_TN<>,
        std::conditional_t<
            kColumns == 192, cute::SM90::GMMA::MMA_64x192x32_F32E4M3E4M3_SS_TN<>,
            std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>,
                               cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>>>>;
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
// Sums of float8 that stay with the tensor cores.
template <class Result, Precision kPrecision = Precision::fast>
using FastFloat8 = Bytes<Elements<__nv_fp8_e4m3, __nv_fp8_e4m3, float, Result>, Float8Products, kPrecision>;
using int8_bf16 = Int8<__nv_bfloat16>;
using int8_f16 = Int8<__half>;
using int8_f32 = Int8<float>;
using float8_bf16 = Float8<__nv_bfloat16>;
using float8_fast_bf16 = FastFloat8<__nv_bfloat16>;
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

// Products of a warpgroup by wgmma: 64 x 256, 64 x 128 or 64 x 64 sums.

constexpr int kSums = 128;  // of a thread, of 64 x 256

// The matrix descriptor of an operand but for its address, which is added to `low`. All addresses and
// distances are counted in 16 bytes.
struct Operand {
    uint32_t low;
    uint32_t high;
    uint32_t step[4];  // from the operand's beginning to each 32 bytes of k

    __device__ uint64_t at(uint32_t address, int index) const {
        return uint64_t{high} << 32 | (low + address + step[index]);
    }
};

// An address in shared memory as operands take it: the bits above name the CTA of a cluster.
__device__ inline uint32_t operand_address(uint32_t address) { return address / 16 & 0x3fff; }
__device__ inline uint32_t operand_address(const char* address) {
    return operand_address(cute::cast_smem_ptr_to_uint(address));
}

// Lines of `width` bytes (128, 64, 32, or 16 of 8-bit elements), swizzled over that width, but for 16.
// `outer` is the distance in bytes from one line-wide column to the next.
inline Operand operand(int width, int outer) {
    const uint32_t layout = width == 128 ? 1 : width == 64 ? 2 : width == 32 ? 3 : 0;
    const uint32_t eight_lines = 8 * width / 16;
    return {static_cast<uint32_t>(outer / 16) << 16, eight_lines | layout << 30, {}};
}

// Likewise with k along the lines. Only of lines of 16 bytes an instruction reads two columns.
inline Operand line_operand(int width, int outer) { return operand(width, width == 16 ? outer : 0); }

// A thread's registers of an operand for one instruction: four words.
using WeightFragment = uint32_t[4];

template <class Atom, class Sum, class A, int kCount, size_t... kIndex, class... Metadata>
__device__ inline void start_wgmma(Sum (&sums)[kCount], const A& a, uint64_t b, bool add,
                                   std::index_sequence<kIndex...>, Metadata... metadata) {
    const auto scale = add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    if constexpr (std::is_same_v<A, WeightFragment>)
        Atom::fma(a[0], a[1], a[2], a[3], b, as_register(sums[kIndex])..., scale);
    else
        Atom::fma(a, b, as_register(sums[kIndex])..., metadata..., scale);
}

// Starts sums (+)= a b, one instruction. `a`: the descriptor of an operand in shared memory, with the
// thread's metadata if it is 2:4, or what the thread holds of the operand in registers.
template <class Atom, class Sum, class A, int kCount, class... Metadata>
__device__ inline void wgmma(Sum (&sums)[kCount], const A& a, uint64_t b, bool add, Metadata... metadata) {
    start_wgmma<Atom>(sums, a, b, add, std::make_index_sequence<kCount>(), metadata...);
}

// sums (+)= a b for 128 bytes of k: the instructions, and all that it takes to start them.
template <class Atom, class Sum, int kCount>
__device__ inline void wgmma_of_step(Sum (&sums)[kCount], const Operand& a, uint32_t a_address,
                                     const Operand& b, uint32_t b_address, bool add) {
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma<Atom>(sums, a.at(a_address, i), b.at(b_address, i), add || i > 0);
}
template <class Atom, class Sum, int kCount>
__device__ inline void multiply_step(Sum (&sums)[kCount], const Operand& a, uint32_t a_address,
                                     const Operand& b, uint32_t b_address, bool add) {
    cute::warpgroup_arrive();
    wgmma_of_step<Atom>(sums, a, a_address, b, b_address, add);
    cute::warpgroup_commit_batch();
}

}  // namespace ts::sm90
