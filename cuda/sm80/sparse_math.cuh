// How compressed weights are multiplied: mma.sp on fragments of 32 of k, of which A keeps two of four.
#pragma once

#include "sm80/math.cuh"

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
