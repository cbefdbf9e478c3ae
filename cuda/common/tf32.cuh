// float32 as tensor cores multiply it.
#pragma once

#include <cstdint>

namespace ts {

__device__ inline uint32_t round_to_tf32(float value) {
    uint32_t result;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
    return result;
}

}  // namespace ts
