// Decisions for a kernel of this folder that is chosen. Host code.
#pragma once

#include "common/problem.h"

namespace ts::sm90 {

// See Kernel::decide.
Decision decide_dds(const Kernel& kernel, const Problem& problem, const Device& device);
Decision decide_narrow(const Kernel& kernel, const Problem& problem, const Device& device);
Decision decide_sdd(const Kernel& kernel, const Problem& problem, const Device& device);

}  // namespace ts::sm90
