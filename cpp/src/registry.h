// The table of all kernels in the library.
#pragma once

#include <string>
#include <vector>

#include "common/problem.h"

namespace ts {

// CPU kernels, best instruction set first, then those of each GPU architecture in tiles.def's order.
const std::vector<const Kernel*>& registry();

// The architectures that the library holds code for, e.g. "cpu,sm_80".
const std::string& architectures();

// A kernel by its number, as ts_kernel_get counts: from 1. Throws for other numbers.
const Kernel& kernel_at(int32_t number);

}  // namespace ts
