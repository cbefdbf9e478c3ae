// Activations of vectors of sums.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cpu/vectors.h"

namespace ts::cpu {

template <class V>
TS_INLINE V exp_vector(const V& x) {
    if constexpr (std::is_same_v<element_t<V>, double>) {
        V result;
        for (int i = 0; i < lanes_of<V>; ++i) result[i] = std::exp(x[i]);
        return result;
    } else {
        // x = n log 2 + r, |r| <= log(2) / 2; the Taylor series of exp(r) is good to 1e-8.
        using I = Vector<int32_t, sizeof(V)>;
        const V low = V{} - 87.0f, high = V{} + 88.0f;
        const V clamped = x < low ? low : x > high ? high : x;
        const V magic = V{} + 0x1.8p23f;
        const V n = (clamped * 1.44269504f + magic) - magic;
        const V r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
        V series = r * (1.0f / 5040) + 1.0f / 720;
        series = series * r + 1.0f / 120;
        series = series * r + 1.0f / 24;
        series = series * r + 1.0f / 6;
        series = series * r + 0.5f;
        series = series * r + 1.0f;
        series = series * r + 1.0f;
        const I exponent = (__builtin_convertvector(n == n ? n : V{}, I) + 127) << 23;
        const V result = series * bit_cast_vector<V>(exponent);
        const V limited = x < low ? V{} : x > high ? V{} + __builtin_inff() : result;
        return limited;
    }
}

// exp(x) of x <= 0, in half the operations. NaN or less than -60 counts as -60: processors are slow where
// products are subnormal.
template <class V>
TS_INLINE V exp_of_negative(const V& x) {
    using U = Vector<uint32_t, sizeof(V)>;
    const V low = V{} - 60.0f;
    const V clamped = x > low ? x : low;
    // The low bits of the sum are n.
    const V magic = V{} + 0x1.8p23f, shifted = clamped * 1.44269504f + magic, n = shifted - magic;
    const V r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
    // Fitted to a relative error of 3e-9.
    V series = r * 0.00138145484f + 0.00836874551f;
    series = series * r + 0.0416683907f;
    series = series * r + 0.166665204f;
    series = series * r + 0.499999934f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    return bit_cast_vector<V>(bit_cast_vector<U>(series) + (bit_cast_vector<U>(shifted) << 23));
}

// The distribution function of the normal distribution.
template <class V>
TS_INLINE V normal_cdf(const V& x) {
    if constexpr (std::is_same_v<element_t<V>, double>) {
        V result;
        for (int i = 0; i < lanes_of<V>; ++i) result[i] = 0.5 * std::erfc(-x[i] * 0.70710678118654752440);
        return result;
    } else {
        // erfc(z) exp(z^2) / 2 of z = |x| / sqrt(2) as a polynomial in t = 1 / (1 + z / 2), fitted to a
        // relative error of 4.3e-8 on 0 <= z <= 10 (the form is Abramowitz and Stegun, 7.1.26).
        constexpr float kFit[] = {0.28457843164f, -0.48720682272f, 0.27807475171f, -0.026630641922f,
                                  0.20268885567f, 0.24310329358f,  0.28237536815f, 0.28208641476f};
        const V t = 1.0f / (1.0f + 0.353553391f * (x < 0 ? -x : x));
        V fit = V{} - 0.0295348468695f;
        TS_UNROLL
        for (const float coefficient : kFit) fit = fit * t + 0.5f * coefficient;
        const V tail = fit * t * exp_of_negative<V>(-0.5f * x * x);
        const V result = x < 0 ? tail : 1.0f - tail;
        return result;
    }
}

// gelu of numbers that are quantized next: the distribution function within 8e-5, as a polynomial up to 4.
constexpr Activation kNearGelu = static_cast<Activation>(4);
template <class V>
TS_INLINE V near_gelu(const V& x) {
    const V most = V{} + 4.0f;
    const V limited = x > most ? most : x < -most ? -most : x;  // keeps NaN
    const V square = limited * limited;
    V series = square * -1.3012976e-9f + 1.04196239e-7f;
    constexpr float kFit[] = {-3.657138e-6f,  7.4855115e-5f,  -0.0010064909f,
                              0.00950540043f, -0.0658878461f, 0.398673385f};
    TS_UNROLL
    for (const float coefficient : kFit) series = series * square + coefficient;
    return x * (series * limited + 0.5f);
}

template <Activation activation, class V>
TS_INLINE V activate(const V& x) {
    if constexpr (activation == Activation::relu) {
        const V result = x < 0 ? V{} : x;  // keeps NaN
        return result;
    }
    if constexpr (activation == Activation::gelu) return x * normal_cdf(x);
    if constexpr (activation == kNearGelu) return near_gelu(x);
    if constexpr (activation == Activation::silu) return x / (1 + exp_vector(-x));
    return x;
}

}  // namespace ts::cpu
