// The gradient of a bias on the GPU: the sums over tokens of y, or of what becomes y's gradient here.
// Everything is enqueued on a stream; functions that do so return 0 or the CUDA error of the launch.
#pragma once

#include "common/problem.h"

namespace ts::sums {

// How some warps share the work: items of a piece of the features and a part of the tokens each.
struct Sums {
    const void* y;
    void* partial;  // [parts][features], float, or double for float64
    int64_t ld;
    int64_t tokens;
    int64_t features;
    int64_t span;  // tokens of a part
    int pieces;
    int parts;
    bool row_major;
};

// For so many warps. `partial`: memory of partial_bytes.
Sums share(const Problem& problem, int64_t warps, void* partial);
size_t partial_bytes(const Problem& problem, int64_t warps);

// Adds the partial sums, always in the same order, and writes or adds them to the gradient of the bias.
int32_t add_partial(const Problem& problem, const Sums& sums, void* stream);

// All of it, for products whose kernel does not sum y.
size_t workspace_size(const Problem& problem, const Device& device);
int32_t sum(const Problem& problem, const Device& device, void* workspace, void* stream);

// The gradient of z, where y = activation(z) and y has the given gradient, and its sums over tokens. All
// matrices are row-major [tokens, features] without gaps.
struct ActivationGradient {
    DType dtype;  // float32 or 16 bits
    Activation activation;
    int64_t tokens;
    int64_t features;
    const void* z;
    const void* gradient;
    void* result;
    void* bias_gradient;  // [features]
};

size_t workspace_size(const ActivationGradient& gradient, const Device& device);
int32_t activate_backward(const ActivationGradient& gradient, const Device& device, void* workspace,
                          void* stream);

}  // namespace ts::sums
