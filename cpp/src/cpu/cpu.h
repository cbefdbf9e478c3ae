// The CPU kernels: one row per instruction set, best first.
#pragma once

#include <span>

#include "common/problem.h"

namespace ts::cpu {

// Rows this machine can run refuse nothing but what their table entry excludes.
std::span<const Kernel> kernels();

}  // namespace ts::cpu
