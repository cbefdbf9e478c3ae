// The table of all kernels in the library.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/problem.h"

namespace ts {

// CPU kernels, best instruction set first, then those of each GPU architecture in tiles.def's order.
const std::vector<const Kernel*>& registry();

// Microseconds of expanding the values and computing the product with the dense W, of each architecture; no
// value where nothing was measured on the device.
using DenseEstimate = std::optional<double> (*)(const Problem&, const Device&);
const std::vector<DenseEstimate>& dense_estimates();

// "cpu,sm_80": what the library holds code for.
const std::string& architectures();

// That of a number in ts_kernel_get, which is checked.
const Kernel& kernel_at(int32_t index);

}  // namespace ts
