// The sums over the tokens of each group of a matrix, the gradient of the biases of experts; see
// ts_group_sums.
#pragma once

#include "common/problem.h"

namespace ts::group_sums {

struct GroupSums {
    DeviceType device;
    DType dtype;         // of y
    DType result_dtype;  // that of y, or float32 for 16 bits
    int64_t tokens;
    int64_t features;
    int64_t groups;
    Matrix y;                // row-major [tokens, features]
    const int32_t* offsets;  // [groups + 1]
    void* sums;              // [groups, features]
};

// Enqueues it on a stream; returns 0 or the CUDA error of the launch.
int32_t run(const GroupSums& of, void* stream);

}  // namespace ts::group_sums
