// Plans of the dds kernel for narrow blocks (cuda/sm90/dds_narrow.cuh).
//
// Its rows are 32 features: one block row, or two that are 16 wide and have as many columns as possible in
// common. Its units are 32 features by the k of a block: the blocks of a row in one column, with zeros for
// one that is absent. `ranks` times two warpgroups form a tile, each with `tile` / 64 rows, and walk
// stages of `step` elements of k, all of them. Units are numbered in the order in which they are multiplied:
// by tile, rank, stage, warpgroup, row and k. The header and the sections are those of common/plan.h, with
//     - steps: stages of every tile; groups: block rows of a rank; pieces: block rows of a row
//     - reserved[0]: number of units
//     - tiles [tiles][2]: 0, an estimate of the time; longest first
//     - rows [tiles][ranks][groups]: block rows, of the first warpgroup, then of the second; -1: none
//     - masks [tiles][ranks][2][stages][8]: for each row of a warpgroup the k of its units, four bits each:
//       2 i + 1 for k = 16 i, from the lowest bits on, then zeros; in the seventh word the units of the
//       stage that come before the warpgroup's. Stages are padded to a multiple of four
//     - k [tiles * ranks * stages + 1]: first unit of each stage
//     - slots [units][pieces]: block in values, -1 where there is none
#pragma once

#include <cstdint>
#include <vector>

#include "common/problem.h"

namespace ts {

// `op` is one of dds; blocks are square and 16 or 32 wide.
std::vector<int32_t> build_narrow_plan(const Pattern& pattern, Op op, PlanShape shape);

}  // namespace ts
