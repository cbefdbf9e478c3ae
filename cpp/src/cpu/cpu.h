// The CPU kernels: one row per instruction set, best first.
#pragma once

#include <span>

#include "common/problem.h"
#include "cpu/steps.h"

namespace ts::cpu {

// Rows this machine can run refuse nothing but what their table entry excludes.
std::span<const Kernel> kernels();

// The instruction set of a kernel that computes products of int8; nullptr of others.
const InstructionSet* instruction_set_of(const Kernel& kernel);

}  // namespace ts::cpu
