// The rows of an expert's results that belong to a token, added up; see ts_combine.
#pragma once

#include "common/problem.h"

namespace ts::combine {

struct Combination {
    DeviceType device;
    DType dtype;
    int64_t tokens;
    int64_t choices;  // rows of each token
    int64_t features;
    Matrix y;             // row-major [tokens * choices, features]
    const int64_t* rows;  // [tokens, choices]: rows of y
    const void* weights;  // [tokens, choices], or null for ones
    Matrix result;        // row-major [tokens, features], or its gradient
    bool wants_y;         // for gradients: whether that of y is wanted
    Matrix of_y;          // the gradient of y
    void* of_weights;     // that of the weights, or null where it is not wanted

    constexpr int64_t count() const { return tokens * choices; }
};

// Both enqueue on a stream and return 0 or the CUDA error of the launch.
int32_t add_up(const Combination& of, void* stream);
int32_t differentiate(const Combination& of, void* stream);

}  // namespace ts::combine
