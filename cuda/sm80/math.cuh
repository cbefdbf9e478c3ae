// Element types by the names that rows of tiles.def use, and how they are multiplied: the tensor-core
// instruction of each on fragments of 32 bytes of k. A fragment of A is 16 x k in 4 registers, one of B is
// 8 x k in 2.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm80.hpp>

#include "common/elements.h"
#include "common/ldmatrix.cuh"
#include "common/tf32.cuh"

namespace ts::sm80 {

template <int kRegisters>
struct Fragment {
    uint32_t value[kRegisters];
};

template <bool kTransposed>
__device__ inline Fragment<4> load_matrices(uint32_t address) {
    Fragment<4> to;
    ts::load_matrices<kTransposed>(to.value, address);
    return to;
}

// The mma instructions of CuTe take every register as an argument of its own.
template <class Instruction, class Sum>
__device__ inline void multiply_add(Sum (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    auto &c0 = as_register(c[0]), &c1 = as_register(c[1]), &c2 = as_register(c[2]), &c3 = as_register(c[3]);
    Instruction::fma(c0, c1, c2, c3, a[0], a[1], a[2], a[3], b[0], b[1], c0, c1, c2, c3);
}

template <class Elements_, class Instruction>
struct DirectMath : Elements_ {
    using Sum = typename Elements_::Accumulator;
    static constexpr Precision kPrecision = Precision::highest;

    template <int kRegisters>
    using Operand = Fragment<kRegisters>;

    template <int kRegisters>
    __device__ static Operand<kRegisters> prepare(const Fragment<kRegisters>& raw) {
        return raw;
    }
    __device__ static void mma(Sum (&c)[4], const Operand<4>& a, const Operand<2>& b) {
        multiply_add<Instruction>(c, a.value, b.value);
    }
};

using f16 = DirectMath<Uniform<__half>, cute::SM80_16x8x16_F32F16F16F32_TN>;
using bf16 = DirectMath<Uniform<__nv_bfloat16>, cute::SM80_16x8x16_F32BF16BF16F32_TN>;

struct tf32 : Uniform<float> {
    static constexpr Precision kPrecision = Precision::tf32;

    template <int kRegisters>
    using Operand = Fragment<kRegisters>;

    template <int kRegisters>
    __device__ static Operand<kRegisters> prepare(const Fragment<kRegisters>& raw) {
        Operand<kRegisters> result;
        for (int i = 0; i < kRegisters; ++i) result.value[i] = round_to_tf32(__uint_as_float(raw.value[i]));
        return result;
    }
    __device__ static void mma(float (&c)[4], const Operand<4>& a, const Operand<2>& b) {
        multiply_add<cute::SM80_16x8x8_F32TF32TF32F32_TN>(c, a.value, b.value);
    }
};

// float32-level error from three TF32 products: each operand becomes its TF32 rounding and the
// TF32 rounding of the rest; the product of the two rests is below float32's resolution.
struct tf32x3 : Uniform<float, Accumulation::promoted> {
    static constexpr Precision kPrecision = Precision::highest;

    template <int kRegisters>
    struct Operand {
        uint32_t big[kRegisters];
        uint32_t small[kRegisters];
    };

    template <int kRegisters>
    __device__ static Operand<kRegisters> prepare(const Fragment<kRegisters>& raw) {
        Operand<kRegisters> result;
        for (int i = 0; i < kRegisters; ++i) {
            const float value = __uint_as_float(raw.value[i]);
            result.big[i] = round_to_tf32(value);
            result.small[i] = round_to_tf32(value - __uint_as_float(result.big[i]));
        }
        return result;
    }
    __device__ static void mma(float (&c)[4], const Operand<4>& a, const Operand<2>& b) {
        using Instruction = cute::SM80_16x8x8_F32TF32TF32F32_TN;
        multiply_add<Instruction>(c, a.small, b.big);
        multiply_add<Instruction>(c, a.big, b.small);
        multiply_add<Instruction>(c, a.big, b.big);
    }
};

}  // namespace ts::sm80
