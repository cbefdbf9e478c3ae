// Which kernel computes a problem.
#pragma once

#include <cstdint>
#include <string>

#include "common/problem.h"

namespace ts {

// What may be chosen: see TS_POLICY_SPARSE and those after it.
enum class Policy : int32_t { sparse = 0, automatic = 1, dense = 2 };

struct Choice {
    int32_t index;         // in the registry, or TS_EXPAND_AND_RUN_DENSE
    const Kernel* kernel;  // the best one, also where dense is chosen; nullptr if none computes the problem
    const char* reason;
    bool expands = false;  // the kernel is given the expansion of the values
};

// The problem as such a kernel is given it, with plain values, wherever they lie.
Problem expanded(const Problem& problem, void* plain);

// A function of the problem (shapes, layouts, flags), the device and TILESPARSE_KERNEL, which is read before
// the first choice. `forced` is ts_matmul_desc.kernel and comes before the policy. Throws TS_UNSUPPORTED,
// saying what was refused and why, where dense is not allowed and no kernel computes the problem, and
// TS_INVALID_ARGUMENT where TILESPARSE_KERNEL names no kernel.
Choice choose(const Problem& problem, const Device& device, int32_t forced, Policy policy = Policy::sparse);

// The reason and, where there are any, the estimates.
std::string explain(const Problem& problem, const Device& device, const Choice& choice);

// With TILESPARSE_LOG=1, one line on standard error per shape: what was chosen and why.
void log_choice(const Problem& problem, const Device& device, const Choice& choice);

}  // namespace ts
