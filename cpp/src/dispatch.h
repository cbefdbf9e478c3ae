// Which kernel computes a problem.
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace ts {

struct Choice {
    int32_t index;  // in the registry
    const Kernel* kernel;
    const char* reason;
};

// A pure function of the problem (shapes, layouts, flags), the device and the name in
// TILESPARSE_KERNEL. `forced` is ts_matmul_desc.kernel. Throws TS_UNSUPPORTED, saying what was
// refused and why, where no kernel computes the problem.
Choice choose(const Problem& problem, const Device& device, int32_t forced);

// With TILESPARSE_LOG=1, one line on standard error per shape: which kernel ran and why.
void log_choice(const Problem& problem, const Choice& choice);

}  // namespace ts
