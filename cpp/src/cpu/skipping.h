// Products of a small batch that read the weights of neurons that are on alone.
#pragma once

#include <cstddef>

#include "common/problem.h"

namespace ts::cpu {

size_t skip_workspace_size(const Problem& problem);
void skip(const Problem& problem, const Device& device, void* workspace);

}  // namespace ts::cpu
