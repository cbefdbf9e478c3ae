// From the gradient of what was activated to that of what it was computed from.
#pragma once

#include "common/epilogue.cuh"

namespace ts {

// The normal distribution's cumulative function within 6e-5 / max(1, |x|): an odd polynomial fitted up
// to 4.2, beyond which it leaves [0, 1] and is clamped. erff takes three times as long, and what gelu itself
// is computed by is exact only times x.
__device__ inline float normal_cdf(float x) {
    const float square = x * x;
    float slope = 6.755981885e-11f;
    slope = fmaf(slope, square, -6.263441765e-9f);
    slope = fmaf(slope, square, 2.562734665e-7f);
    slope = fmaf(slope, square, -6.172920621e-6f);
    slope = fmaf(slope, square, 9.910787776e-5f);
    slope = fmaf(slope, square, -1.143478323e-3f);
    slope = fmaf(slope, square, 9.936247021e-3f);
    slope = fmaf(slope, square, -6.654810905e-2f);
    slope = fmaf(slope, square, 3.990213573e-1f);
    return __saturatef(fmaf(slope, x, 0.5f));
}

// The gradient of z from that of activation(z). `Element`: what it is rounded to.
template <class Element, Activation kActivation>
__device__ inline float through(float gradient, float z) {
    constexpr float kLog2E = 1.442695041f, kDensityAt0 = 0.3989422804f;
    if constexpr (kActivation == Activation::none) {
        return gradient;
    } else if constexpr (kActivation == Activation::relu) {
        return z <= 0.0f ? 0.0f : gradient;
    } else if constexpr (kActivation == Activation::gelu) {
        const float below = sizeof(Element) == 2 ? normal_cdf(z) : 0.5f * (1.0f + erff(z * 0.70710678f));
        return gradient * fmaf(z, kDensityAt0 * power_of_two(-0.5f * kLog2E * z * z), below);
    } else {
        const float slope = sigmoid(z);
        return gradient * slope * fmaf(z, 1.0f - slope, 1.0f);
    }
}

}  // namespace ts
