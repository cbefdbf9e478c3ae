// The choice among the kernels of this folder: estimates of their times, in microseconds, and what is decided
// for the one that is chosen. Host code.
#pragma once

#include "common/problem.h"

namespace ts::sm90 {

double estimate_dds(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_grouped_dds(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_dds_2_4(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_dds_8bit(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_dds_float(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_narrow(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_sdd(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_grouped_sdd(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_sdd_narrow(const Kernel& kernel, const Problem& problem, const Device& device);

// See Kernel::decide.
Decision decide_dds(const Kernel& kernel, const Problem& problem, const Device& device);
Decision decide_narrow(const Kernel& kernel, const Problem& problem, const Device& device);
Decision decide_sdd(const Kernel& kernel, const Problem& problem, const Device& device);

}  // namespace ts::sm90
