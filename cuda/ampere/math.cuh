// Element types by the names that rows of tiles.def use, and how they are multiplied: the tensor-core
// instruction of each on fragments of 32 bytes of k. A fragment of A is 16 x k in 4 registers, one of B is
// 8 x k in 2. float64 has two registers for an element.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm89.hpp>

#include <cstdint>

#include "ampere/dequantize.cuh"
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
    static constexpr float kSumUnit = 1;
    static constexpr int kQuarters = 1;

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

// Types of their own, not other names: kernels are named after them, hundreds of them.
struct f16 : DirectMath<Uniform<__half>, cute::SM80_16x8x16_F32F16F16F32_TN> {};
struct bf16 : DirectMath<Uniform<__nv_bfloat16>, cute::SM80_16x8x16_F32BF16BF16F32_TN> {};

// Both factors in 8 bits. Results have one of three types, of which this is the widest.
struct i8 : DirectMath<Elements<int8_t, int8_t, int32_t, float>, cute::SM80_16x8x32_S32S8S8S32_TN> {};

// float8 in its own instruction from compute capability 8.9 on, which nvcc makes of halves for 9.0 and 10.x.
// 8.0 has none, so that its values are multiplied as halves, exactly: of four values of a row that a register
// holds, the two products of 16 of k take two each. Halves are 2^-8 times their values, which saves an
// instruction for each pair. The tensor cores of 8.9 and 12.0 keep some 14 bits of sums: of each step, 128 of
// k, they are added to sums in float32.
template <Accumulation kAccumulation>
using Float8Elements = Elements<__nv_fp8_e4m3, __nv_fp8_e4m3, float, float, kAccumulation>;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <Accumulation kAccumulation>
struct Float8 : DirectMath<Float8Elements<kAccumulation>, cute::SM89_16x8x32_F32E4M3E4M3F32_TN> {};
#else
template <Accumulation kAccumulation>
struct Float8 : Float8Elements<kAccumulation> {
    static constexpr Precision kPrecision = Precision::highest;
    static constexpr float kSumUnit = 65536;  // what sums are multiplied by
    static constexpr int kQuarters = 1;

    template <int kRegisters>
    struct Operand {
        uint32_t low[kRegisters];   // of k from 0 to 15
        uint32_t high[kRegisters];  // of k from 16 to 31
    };

    template <int kRegisters>
    __device__ static Operand<kRegisters> prepare(const Fragment<kRegisters>& raw) {
        Operand<kRegisters> result;
        constexpr int kRows = kRegisters / 2;  // registers of 16 of k: those of the lower 16 come first
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                result.low[pair * kRows + i] = as_word(decode_float8<1>(raw.value[i], pair));
                result.high[pair * kRows + i] = as_word(decode_float8<1>(raw.value[kRows + i], pair));
            }
        }
        return result;
    }
    __device__ static void mma(float (&c)[4], const Operand<4>& a, const Operand<2>& b) {
        using Instruction = cute::SM80_16x8x16_F32F16F16F32_TN;
        multiply_add<Instruction>(c, a.low, b.low);
        multiply_add<Instruction>(c, a.high, b.high);
    }

  private:
    __device__ static uint32_t as_word(const __half2& pair) {
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};
#endif

using f8 = Float8<Accumulation::promoted>;
using f8_scaled = Float8<Accumulation::scaled>;

struct tf32 : Uniform<float> {
    static constexpr Precision kPrecision = Precision::tf32;
    static constexpr int kQuarters = 1;

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
    static constexpr int kQuarters = 1;

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

// `Instruction` multiplies 16 x k by k x 8, where k is 4 of each quarter of a step that it takes.
template <class Instruction, int kQuarters_>
struct Float64 : Elements<double, double, double, double> {
    static constexpr Precision kPrecision = Precision::highest;
    static constexpr float kSumUnit = 1;
    static constexpr int kQuarters = kQuarters_;

    template <int kRegisters>
    struct Operand {
        double value[kRegisters / 2];
    };

    template <int kRegisters>
    __device__ static Operand<kRegisters> prepare(const Fragment<kRegisters>& raw) {
        Operand<kRegisters> result;
#pragma unroll
        for (int i = 0; i < kRegisters / 2; ++i)
            result.value[i] = __hiloint2double(raw.value[2 * i + 1], raw.value[2 * i]);
        return result;
    }
    __device__ static void mma(double (&c)[4], const Operand<4 * kQuarters>& a,
                               const Operand<2 * kQuarters>& b) {
        Instruction::fma(c, a.value, b.value);
    }
};

// Compute capability 8.0 has half of it.
struct TwoOf8x8x4 {
    __device__ static void fma(double (&c)[4], const double (&a)[2], const double (&b)[1]) {
        using Half = cute::SM80_8x8x4_F64F64F64F64_TN;
        Half::fma(c[0], c[1], a[0], b[0], c[0], c[1]);
        Half::fma(c[2], c[3], a[1], b[0], c[2], c[3]);
    }
};

using f64 = Float64<TwoOf8x8x4, 1>;

}  // namespace ts::sm80

// The name that fixes that indices in metadata ascend came with CUDA 12.5; later compilers advise against the
// older name, which means the same on these architectures.
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 5)
#define TS_MMA_SP "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32."
#else
#define TS_MMA_SP "mma.sp.sync.aligned.m16n8k32.row.col.f32."
#endif

namespace ts::sm80 {

// A fragment of A is that of mma.m16n8k16, and one of B those of two such products side by side. Two products
// share a register of metadata: where lane / 2 % 2 is `kHalf`, it has the indices of this one.
template <class Math, int kHalf>
__device__ inline void multiply_add_sparse(float (&c)[4], const Fragment<4>& a, const Fragment<4>& b,
                                           uint32_t metadata) {
#define TS_MULTIPLY(types)                                                                                  \
    asm volatile(TS_MMA_SP types                                                                            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                           \
                 : "r"(a.value[0]), "r"(a.value[1]), "r"(a.value[2]), "r"(a.value[3]), "r"(b.value[0]),     \
                   "r"(b.value[1]), "r"(b.value[2]), "r"(b.value[3]), "r"(metadata), "n"(kHalf))
    if constexpr (Math::kInput == DType::bfloat16)
        TS_MULTIPLY("bf16.bf16");
    else
        TS_MULTIPLY("f16.f16");
#undef TS_MULTIPLY
}

}  // namespace ts::sm80

#undef TS_MMA_SP
