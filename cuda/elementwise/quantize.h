// Activations in 8 bits with a scale for each token, or for each kScaleGroup features of it; see ts_quantize.
#pragma once

#include "common/problem.h"

namespace ts::quantize {

// Both matrices are row-major [tokens, features].
struct Quantization {
    DeviceType device;
    DType dtype;            // of x: float32 or 16 bits
    DType quantized_dtype;  // int8 or float8_e4m3fn
    int64_t tokens;
    int64_t features;
    Matrix x;
    Matrix quantized;
    float* scales;      // [tokens], or [features / kScaleGroup][scales_ld]
    int64_t scales_ld;  // 0: of each token

    bool in_groups() const { return scales_ld > 0; }
};

// The least scale. Below it x may be subnormal, which some processors take for zero: all of those become
// zero.
constexpr float kLeastScale = 0x1p-116f;

constexpr float largest_of(DType quantized) { return quantized == DType::int8 ? 127.0f : 448.0f; }

// Enqueues it on a stream; returns 0 or the CUDA error of the launch.
int32_t run(const Quantization& quantization, void* stream);

}  // namespace ts::quantize
