// How the sums of a dds kernel in float64 become results.
#pragma once

#include "common/epilogue.cuh"
#include "sm80/dds_arguments.cuh"

namespace ts::sm90 {

// Sums of 16 features by 16 x 8 tokens of a warp: a lane has two neighbouring features, which fill a store of
// 16 bytes, of two tokens of each 8. Activations, residual and gate come later, to results that are read
// again: they would take the registers of the sums, or as much code for each.
using Float64Sums = double[16][4];

// `kRowMajorInput`: decides which tokens a lane has.
template <bool kRowMajorInput>
class Float64Epilogue {
  public:
    __device__ Float64Epilogue(const sm80::DdsArguments& arguments, const int* rows, int first_token)
        : arguments_(arguments), rows_(rows), first_token_(first_token), lane_(threadIdx.x % 32) {}

    __device__ void store(const Float64Sums& sums, int first_feature) const {
        const int64_t feature = output_feature(first_feature + lane_ / 4 * 2);
        if (feature < 0) return;
        const auto* const bias = static_cast<const double*>(arguments_.bias);
        const double first = bias == nullptr ? 0 : bias[feature],
                     second = bias == nullptr ? 0 : bias[feature + 1];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const double* const sum = sums[i / 2] + i % 2;
            write(token_of(i), feature, sum[0] + first, sum[2] + second);
        }
        if (arguments_.activation == Activation::none && arguments_.residual == nullptr) return;
#pragma unroll 1
        for (int i = 0; i < 32; ++i) {
            const int64_t token = token_of(i);
            if (token >= arguments_.tokens) continue;
            finish(token, feature);
            finish(token, feature + 1);
        }
    }

  private:
    // The token of a lane's `i`-th sums, see Float64Input.
    __device__ int token_of(int i) const {
        const int column = lane_ % 4;
        return first_token_ + (kRowMajorInput ? i / 2 * 8 + column + i % 2 * 4
                                              : i / 4 * 16 + column * 4 + i % 2 * 2 + i / 2 % 2);
    }

    // The output feature of one in the tile, or -1 beyond the matrix.
    __device__ int64_t output_feature(int feature) const {
        const int64_t row = __ldg(rows_ + (feature >> arguments_.row_shift));
        return row < 0 ? -1 : (row << arguments_.row_shift) + (feature & ((1 << arguments_.row_shift) - 1));
    }

    __device__ bool is_row_major() const { return arguments_.output_layout == Layout::row_major; }
    __device__ int64_t place(int64_t token, int64_t feature, int64_t ld) const {
        return is_row_major() ? token * ld + feature : feature * ld + token;
    }
    __device__ double* output() const { return static_cast<double*>(arguments_.output); }

    __device__ void write(int64_t token, int64_t feature, double first, double second) const {
        if (token >= arguments_.tokens) return;
        double* const target = output() + place(token, feature, arguments_.output_ld);
        if (is_row_major())
            *reinterpret_cast<double2*>(target) = make_double2(first, second);
        else
            target[0] = first, target[arguments_.output_ld] = second;
    }

    __device__ void finish(int64_t token, int64_t feature) const {
        double& result = output()[place(token, feature, arguments_.output_ld)];
        double value = activate(result, arguments_.activation);
        if (arguments_.residual != nullptr) {
            const double other = static_cast<const double*>(
                arguments_.residual)[place(token, feature, arguments_.residual_ld)];
            value = arguments_.gated ? value * activate(other, arguments_.gate_activation) : value + other;
        }
        result = value;
    }

    const sm80::DdsArguments& arguments_;
    const int* rows_;
    int first_token_;
    int lane_;
};

}  // namespace ts::sm90
