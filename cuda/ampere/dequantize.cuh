// Values of 8 bits as weights of 16: value times scale in float32, rounded once, exactly as
// ts_values_dequantize does it. There is no instruction for that before compute capability 8.9.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/problem.h"

namespace ts::sm80 {

// Like __byte_perm, which does not know 8 + i: copies of the sign of byte i.
__device__ inline uint32_t permute_bytes(uint32_t word, uint32_t selection) {
    uint32_t result;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "r"(selection));
    return result;
}

__device__ inline __half2 as_half2(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }

// The lower two values of float8 of a word, or the upper two, times kScale / 256: in 16 bits exactly.
template <int kScale>
__device__ inline __half2 decode_float8(uint32_t word, int pair) {
    // Exponent and fraction go to their places in a half, whose exponents count from 8 less. The middle
    // byte has copies of the lower value's sign, one of which is shifted into its place.
    const auto apart = static_cast<int32_t>(permute_bytes(word, pair == 0 ? 0x1804 : 0x3a24));
    const __half2 small = as_half2(apart >> 1 & 0xbf80bf80);
    // The code of 480 is NaN. It alone becomes infinite here, and NaN when multiplied by 0.
    const __half2 infinite = __hmul2(small, __float2half2_rn(36000));
    const __half2 scaled = kScale == 1 ? small : __hmul2(small, __float2half2_rn(kScale));
    return __hfma2(infinite, __float2half2_rn(0), scaled);
}

// The lower two values of a word, or the upper two, as they are.
template <DType kDType>
__device__ inline __half2 decode_pair(uint32_t word, int pair) {
    if constexpr (kDType == DType::int8) {
        // Bytes with their sign turned, which are 128 more, in the lowest bits of 1024 in 16 bits.
        const uint32_t biased = permute_bytes(word, pair == 0 ? 0x4140 : 0x4342) ^ 0x64806480;
        return __hsub2(as_half2(biased), __float2half2_rn(1152));
    } else {
        return decode_float8<256>(word, pair);
    }
}

__device__ inline uint32_t round_pair(float2 pair, __half) {
    const __half2 rounded = __float22half2_rn(pair);
    return *reinterpret_cast<const uint32_t*>(&rounded);
}
__device__ inline uint32_t round_pair(float2 pair, __nv_bfloat16) {
    const __nv_bfloat162 rounded = __float22bfloat162_rn(pair);
    return *reinterpret_cast<const uint32_t*>(&rounded);
}

template <DType kDType, class Value>
__device__ inline uint32_t dequantize(uint32_t word, int pair, float scale) {
    const float2 values = __half22float2(decode_pair<kDType>(word, pair));
    return round_pair({values.x * scale, values.y * scale}, Value());
}

}  // namespace ts::sm80
