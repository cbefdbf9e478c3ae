// The epilogue: operations on a sum before it is stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/problem.h"

namespace ts {

__device__ inline float relu(float x) { return x > 0.0f || x != x ? x : 0.0f; }  // NaN stays

// The hardware's approximation, which is exact to about 2^-22.
__device__ inline float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// x times the normal distribution's cumulative function, within 7e-6 of it: x, if it is positive, minus
// |x| 2^p(|x|), where p is a polynomial fitted to the logarithm of that function of -|x|, so that the error
// of the product is the same everywhere. A polynomial for the function itself needs nine terms for 6e-5, and
// erff takes three times as long.
__device__ inline float approximate_gelu(float x) {
    const float size = fminf(fabsf(x), 8.0f);  // beyond, the result is x or 0
    float exponent = 3.8654136e-3f;
    exponent = fmaf(exponent, size, -4.4075258e-2f);
    exponent = fmaf(exponent, size, -4.6802100e-1f);
    exponent = fmaf(exponent, size, -1.1473687f);
    exponent = fmaf(exponent, size, -1.0004803f);
    return fmaf(-size, power_of_two(exponent), relu(x));
}

constexpr float kLog2E = 1.442695041f;

__device__ inline float inverse_of(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

// 1 / (1 + exp(-x)).
__device__ inline float sigmoid(float x) { return inverse_of(1.0f + power_of_two(-kLog2E * x)); }

__device__ inline float silu(float x) { return x * sigmoid(x); }

// The same of four sums, within 1e-6 |x|. The unit for powers and inverses takes longer than all else, so one
// inverse serves four: the product of their terms is finite, since sums below -21.48 have the factor of that.
__device__ inline void silu_of_four(float* x) {
    float terms[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) terms[i] = 1.0f + power_of_two(-kLog2E * fmaxf(x[i], -21.48f));
    const float low = terms[0] * terms[1], high = terms[2] * terms[3], inverse = inverse_of(low * high);
    const float of_low = inverse * high, of_high = inverse * low;
    x[0] *= of_low * terms[1];
    x[1] *= of_low * terms[0];
    x[2] *= of_high * terms[3];
    x[3] *= of_high * terms[2];
}

// `Element`: what the result is rounded to.
template <class Element>
__device__ inline float activate(float value, Activation activation) {
    constexpr bool kHalf = sizeof(Element) == 2;
    switch (activation) {
        case Activation::relu:
            return relu(value);
        case Activation::gelu:
            return kHalf ? approximate_gelu(value) : 0.5f * value * (1.0f + erff(value * 0.70710678f));
        case Activation::silu:
            return silu(value);
        default:
            return value;
    }
}

// In float64.
__device__ inline double activate(double value, Activation activation) {
    switch (activation) {
        case Activation::relu:
            return value > 0 || value != value ? value : 0;  // NaN stays
        case Activation::gelu:
            return 0.5 * value * erfc(-value * 0.70710678118654752440);
        case Activation::silu:
            return value / (1 + exp(-value));
        default:
            return value;
    }
}

// One loop for each activation: a choice for each sum would take longer than the products.
template <class Element, int kCount>
__device__ inline void activate_all(float (&sums)[kCount], Activation activation) {
    const auto apply = [&](auto constant) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] = activate<Element>(sums[i], constant());
    };
    switch (activation) {
        case Activation::relu:
            return apply([] { return Activation::relu; });
        case Activation::gelu:
            return apply([] { return Activation::gelu; });
        case Activation::silu:
            if constexpr (sizeof(Element) == 2 && kCount % 4 == 0) {
#pragma unroll
                for (int i = 0; i < kCount; i += 4) silu_of_four(sums + i);
                return;
            }
            return apply([] { return Activation::silu; });
        default:
            return;
    }
}

template <class Element>
__device__ inline float to_float(Element value) {
    return static_cast<float>(value);
}

template <class Element>
__device__ inline Element from_float(float value);
template <>
__device__ inline float from_float(float value) {
    return value;
}
template <>
__device__ inline __half from_float(float value) {
    return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float(float value) {
    return __float2bfloat16_rn(value);
}

template <class Element>
__device__ inline float rounded_to(float value) {
    return to_float(from_float<Element>(value));
}

template <class Element>
struct alignas(2 * sizeof(Element)) Pair {
    Element first, second;
};

// Activates the elements of twice 16 bytes, where they lie.
template <class Element>
__device__ inline void activate_elements(Element* first, Element* second, Activation activation) {
    constexpr int kCount = 32 / sizeof(Element);
    uint4 vectors[2] = {*reinterpret_cast<uint4*>(first), *reinterpret_cast<uint4*>(second)};
    auto* const elements = reinterpret_cast<Element*>(vectors);
    float values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = to_float(elements[i]);
    activate_all<Element>(values, activation);
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = from_float<Element>(values[i]);
    *reinterpret_cast<uint4*>(first) = vectors[0];
    *reinterpret_cast<uint4*>(second) = vectors[1];
}

// Stores two neighbouring sums, or adds them to what is there.
template <class Element>
__device__ inline void store_pair(Element* target, float2 sum, bool accumulate) {
    auto* pair = reinterpret_cast<Pair<Element>*>(target);
    if (accumulate) {
        const Pair<Element> before = *pair;
        sum.x += to_float(before.first);
        sum.y += to_float(before.second);
    }
    *pair = {from_float<Element>(sum.x), from_float<Element>(sum.y)};
}

}  // namespace ts
