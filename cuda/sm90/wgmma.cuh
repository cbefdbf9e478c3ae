// Products of a warpgroup: 64 x 256, 64 x 128 or 64 x 64 sums from operands in shared memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>

#include "common/problem.h"

namespace ts::sm90 {

// The element types by the names that rows use.
//     kMapType: as what TMA loads them
//     kParts: what is multiplied of an activation; see dds_split.cuh for two
struct bf16 {
    using Element = __nv_bfloat16;
    using Pair = __nv_bfloat162;
    static constexpr DType kDType = DType::bfloat16;
    static constexpr Precision kPrecision = Precision::highest;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    static constexpr int kParts = 1;
    template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB, int kColumns = 256>
    using Atom = std::conditional_t<
        kColumns == 256, cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kA, kB>,
        std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<kA, kB>,
                           cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<kA, kB>>>;
    __device__ static Pair round(float first, float second) { return __floats2bfloat162_rn(first, second); }
};
struct f16 {
    using Element = __half;
    using Pair = __half2;
    static constexpr DType kDType = DType::float16;
    static constexpr Precision kPrecision = Precision::highest;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    static constexpr int kParts = 1;
    template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB, int kColumns = 256>
    using Atom = std::conditional_t<
        kColumns == 256, cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<kA, kB>,
        std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<kA, kB>,
                           cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<kA, kB>>>;
    __device__ static Pair round(float first, float second) { return __floats2half2_rn(first, second); }
};

// float32 as TF32, to which TMA rounds what it loads.
struct tf32 {
    using Element = float;
    static constexpr DType kDType = DType::float32;
    static constexpr Precision kPrecision = Precision::tf32;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
    static constexpr int kParts = 1;
};
// float32 with its own error, in three products of TF32.
struct tf32x3 {
    using Element = float;
    static constexpr DType kDType = DType::float32;
    static constexpr Precision kPrecision = Precision::highest;
    static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    static constexpr int kParts = 2;
};

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

// Lines of `width` bytes (128, 64 or 32), swizzled over that width. With k along the lines, `outer` is
// unused; with k across the lines it is the distance in bytes from one line-wide column to the next.
inline Operand operand(int width, int outer) {
    const uint32_t layout = width == 128 ? 1 : width == 64 ? 2 : 3;
    const uint32_t eight_lines = 8 * width / 16;
    return {static_cast<uint32_t>(outer / 16) << 16, eight_lines | layout << 30, {}};
}

template <class Atom, int kCount, size_t... kIndex>
__device__ inline void multiply(float (&sums)[kCount], uint64_t a, uint64_t b, bool add,
                                std::index_sequence<kIndex...>) {
    Atom::fma(a, b, sums[kIndex]...,
              add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// sums (+)= a b for 64 elements of k.
template <class Atom, int kCount>
__device__ inline void multiply_step(float (&sums)[kCount], const Operand& a, uint32_t a_address,
                                     const Operand& b, uint32_t b_address, bool add) {
    cute::warpgroup_arrive();
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16)
        multiply<Atom>(sums, a.at(a_address, k16), b.at(b_address, k16), add || k16 > 0,
                       std::make_index_sequence<kCount>());
    cute::warpgroup_commit_batch();
}

// Two sums as results that lie side by side.
template <class Math>
__device__ inline uint32_t rounded(float first, float second) {
    const auto pair = Math::round(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
}

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

}  // namespace ts::sm90
