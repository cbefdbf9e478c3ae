// Products of a small batch that read the weights of neurons that are on, and no others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/problem.h"

namespace ts::skip {

constexpr int kMostTokens = 8;

size_t workspace_size(const Problem& problem, const Device& device);

// 0, or the CUDA error of a launch. Operands were checked, see cpp/src/neurons.cpp.
int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream);

}  // namespace ts::skip
