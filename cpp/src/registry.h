// The table of all kernels in the library.
#pragma once

#include <string>
#include <vector>

#include "common/problem.h"

namespace ts {

// CPU kernels, best instruction set first, then those of each GPU architecture in tiles.def's order.
const std::vector<const Kernel*>& registry();

// "cpu,sm_80": what the library holds code for.
const std::string& architectures();

}  // namespace ts
