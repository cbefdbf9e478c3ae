// What the kernels of this folder take, which is what kernels are chosen by: microseconds, host code.
#pragma once

#include <optional>

#include "common/problem.h"

namespace ts::sm90 {

double estimate_dds(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_dds_2_4(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_dds_float(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_narrow(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_sdd(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate_sdd_narrow(const Kernel& kernel, const Problem& problem, const Device& device);

// Writing W out dense and leaving the product to cuBLAS, where it was measured on such a device.
std::optional<double> estimate_dense(const Problem& problem, const Device& device);

// Of the kernels for narrow blocks, by their plans: into how many parts sums over k are cut, in a cluster of
// two CTAs each; and whether blocks are read where they are, for which no call packs the weight.
int64_t narrow_parts(const Problem& problem, const Device& device, const PlanShape& plan);
bool narrow_reads_blocks(const Problem& problem, const Device& device, const PlanShape& plan);

}  // namespace ts::sm90
