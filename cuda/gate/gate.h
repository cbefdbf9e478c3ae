// Gates on the GPU: factor * activation(gate), and the gradients of both with their sums over tokens.
// Everything is enqueued on a stream; functions that do so return 0 or the CUDA error of the launch.
#pragma once

#include "common/problem.h"

namespace ts::gate {

// All matrices are row-major [tokens, features].
struct Gate {
    DType dtype;  // float32 or 16 bits
    Activation activation;
    int64_t tokens;
    int64_t features;
    Matrix gate;
    Matrix factor;
    Matrix result;   // or its gradient, where that is given
    Matrix of_gate;  // the gradients
    Matrix of_factor;
    void* gate_sums;  // over tokens of the gradients, [features] each, or null
    void* factor_sums;
};

int32_t multiply(const Gate& gate, const Device& device, void* stream);

// What sums take; without any nothing is needed.
size_t workspace_size(const Gate& gate, const Device& device);
int32_t differentiate(const Gate& gate, const Device& device, void* workspace, void* stream);

}  // namespace ts::gate
