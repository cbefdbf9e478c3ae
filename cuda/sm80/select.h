// What the kernels of this folder take, which is what kernels are chosen by: microseconds, host code.
#pragma once

#include "common/problem.h"

namespace ts::sm80 {

double estimate_dds(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_sdd(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_decode(const Kernel& kernel, const Problem& problem, const Device& device);

}  // namespace ts::sm80
