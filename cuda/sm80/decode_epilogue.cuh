// How the sums of a decode kernel become results.
#pragma once

#include "common/epilogue.cuh"
#include "sm80/decode_traits.cuh"

namespace ts::sm80 {

// Puts a warp's sums into shared memory, token by token from its first row and token on.
template <class Traits>
__device__ inline void stage_sums(const DecodeSums<Traits>& sums, float* to, int lane) {
    float* const first = to + lane % 4 * 2 * Traits::kSumLine + lane / 4;
#pragma unroll
    for (int m = 0; m < Traits::kWarpRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < Traits::kWarpTokenTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                first[(8 * n + i % 2) * Traits::kSumLine + 16 * m + i / 2 * 8] = sums[m][n][i];
}

template <class Result>
__device__ inline float2 activate(float2 values, Activation activation) {
    return {activate<Result>(values.x, activation), activate<Result>(values.y, activation)};
}

// Adds the sums of all teams and halves, always in the same order, and stores the results.
template <class Traits, bool kGated>
__device__ inline void store_sums(const DecodeArguments& arguments, const char* sums, int first_feature,
                                  int first_token) {
    using Result = typename Traits::Result;
    const auto* const bias = static_cast<const Result*>(arguments.bias);
    const int addends = blockDim.x / (32 * Traits::kTeam) * Traits::kHalves;
    constexpr int kPairs = Traits::kRows / 2;
    const int tokens = min(Traits::kTokens, arguments.tokens - first_token);
    for (int i = threadIdx.x; i < kPairs * tokens; i += blockDim.x) {
        const int row = i % kPairs * 2, token_of_cta = i / kPairs;
        const int64_t token = first_token + token_of_cta;
        const int64_t feature = first_feature + row;
        float2 sum = bias == nullptr ? make_float2(0.0f, 0.0f)
                                     : make_float2(to_float(bias[feature]), to_float(bias[feature + 1]));
        const char* addend = sums + (token_of_cta * Traits::kSumLine + row) * sizeof(float);
        for (int a = 0; a < addends; ++a, addend += Traits::kSumBytes) {
            const float2 added = *reinterpret_cast<const float2*>(addend);
            sum.x += added.x;
            sum.y += added.y;
        }
        if (!kGated) sum = activate<Result>(sum, arguments.activation);
        auto* const output = static_cast<Result*>(arguments.output);
        const auto* const residual = static_cast<const Result*>(arguments.residual);
        const bool row_major = arguments.output_layout == Layout::row_major;
        if (kGated || residual != nullptr) {
            const int64_t ld = arguments.residual_ld;
            const int64_t at = row_major ? token * ld + feature : feature * ld + token;
            const float2 other = {to_float(residual[at]), to_float(residual[at + (row_major ? 1 : ld)])};
            if (kGated) {
                const float2 gate = activate<Result>(other, arguments.activation);
                sum.x *= rounded_to<Result>(gate.x);
                sum.y *= rounded_to<Result>(gate.y);
            } else {
                sum.x += other.x;
                sum.y += other.y;
            }
        }
        if (row_major) {
            store_pair(output + token * arguments.output_ld + feature, sum, false);
        } else {
            output[feature * arguments.output_ld + token] = from_float<Result>(sum.x);
            output[(feature + 1) * arguments.output_ld + token] = from_float<Result>(sum.y);
        }
    }
}

// With a gate. Called, not inlined, so that kernels need no more registers for it.
template <class Traits>
__device__ __noinline__ void store_gated_sums(const DecodeArguments& arguments, const char* sums,
                                              int first_feature, int first_token) {
    store_sums<Traits, true>(arguments, sums, first_feature, first_token);
}

}  // namespace ts::sm80
