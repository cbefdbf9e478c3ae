// Products of a small batch that read the weights of neurons that are on alone, see ts_matmul_desc.skip.
#pragma once

#include <cstddef>

#include "common/problem.h"
#include "tilesparse/tilesparse.h"

namespace ts {

// Reads `skip` and `threshold` of a descriptor into a problem that is checked but for them.
void check_skip(const ts_matmul_desc& desc, Problem& problem);

// True if the arrays of the pattern by column are read, not those by row.
bool reads_by_column(const Problem& problem);

size_t skip_workspace_size(const Problem& problem, const Device& device);

void multiply_skipping(const Problem& problem, const Device& device, void* workspace, void* stream);

}  // namespace ts
