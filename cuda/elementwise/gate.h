// Gates on the GPU: factor * activation(gate), and the gradients of both. Everything is enqueued on a stream;
// functions return 0 or the CUDA error of the launch.
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
};

int32_t multiply(const Gate& gate, void* stream);
int32_t differentiate(const Gate& gate, void* stream);

}  // namespace ts::gate
