// The layout of plans: arrays of int32 that the host builds once per pattern and kernels walk.
//
// dds (both directions; "features" are those of the output, k those that are summed over):
//   Block rows are grouped into macro-tiles of `tile` features: `groups` block rows each. A tile is
//   walked in steps of `step` elements of k, cut into `pieces` of one block each (one piece where
//   blocks are wider). Only columns in which some row of the group has a block are walked.
//     - tiles [tiles][2]: first step, number of steps; longest first
//     - rows [tiles][groups]: block rows, -1 where there is none
//     - masks [steps]: bit 4 i + j says that features 16 i to 16 i + 15 have a block at quarter j
//     - k [steps][pieces]: first element of k, -1 where there is none
//     - slots [steps][pieces][groups]: block in values, -1 where there is none
//
// sdd: block rows are grouped likewise, into `groups` of `tile` features of y; the columns of a group in
// which some row has a block are gathered into macro-tiles of `pieces` blocks (`step` features of x).
//     - tiles [tiles]: number of pieces used
//     - rows [tiles][groups]: block rows, -1 where there is none
//     - masks [tiles][tile / 16]: bit j says that these 16 features of y have a block at features 16 j of x
//     - k [tiles][pieces]: first feature of x, -1 where there is none
//     - slots [tiles][pieces][groups]: block in values, -1 where there is none
//
// sdd by strips, for kernels that walk several ranks together (PlanShape): y is cut into strips of 64
// features and x into units of strip_unit() features, whatever the blocks. A tile has two halves, one for
// each rank: a strip by a window of 256 features. The tile's strips (one or two) and its gathered units
// are loaded once; the windows are runs of these units and may overlap. Together, strips and units have
// at most 576 features. Here `groups` counts the blocks in a strip by a unit, at least 1, and `pieces` the
// units two windows hold.
//     - tiles [tiles][4]: first feature of y of the first strip, and of the second or -1 if both halves use
//       the first; number of units; the unit at which the second half's window begins; largest tiles first
//     - rows, masks: nothing
//     - k [tiles][pieces]: first feature of x of each unit, -1 where there is none
//     - slots [tiles][pieces][groups]: block in values, row by row, for the units of the first half's
//       window and then of the second's, -1 where there is none
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace ts {

constexpr int32_t kStripFeatures = 64;
constexpr int32_t kStripWindow = 256;
constexpr int32_t kStripTileFeatures = 576;

// Features of x in a unit.
inline int32_t strip_unit(const Pattern& pattern) { return pattern.block_cols == 32 ? 32 : 64; }

struct PlanHeader {
    int32_t tiles;
    int32_t steps;
    int32_t groups;
    int32_t pieces;
    // Offsets from the header in int32.
    int32_t tiles_at;
    int32_t rows_at;
    int32_t masks_at;
    int32_t k_at;
    int32_t slots_at;
    int32_t words;  // of the whole plan
    int32_t reserved[6];
};
static_assert(sizeof(PlanHeader) == 64);

}  // namespace ts
