// The layout of plans: arrays of int32 that the host or the GPU makes once per pattern and kernels walk.
//
// dds (both directions; "features" are those of the output, k those that are summed over):
//   Block rows are grouped into macro-tiles of `tile` features: groups of `group_rows` each. A tile is
//   walked in steps of `step` elements of k, cut into `pieces` of one block each (one piece where
//   blocks are wider). Only columns in which some row of the group has a block are walked. With two
//   `ranks`, two such groups form a tile and walk as many steps, first the columns that both have, at
//   the same time; then each its own, where the steps of one may end early.
//     - tiles [tiles][2]: first step, number of steps; longest first
//     - rows [tiles][ranks][group_rows]: block rows, -1 where there is none
//     - masks [steps][ranks]: bit 4 i + j says that features 16 i to 16 i + 15 have a block in quarter j,
//       which of steps of 128 has room for two blocks of 16
//     - k [steps][ranks][pieces]: first element of k, -1 where there is none
//     - slots [steps][ranks][pieces][group_rows]: block in values, -1 where there is none
//
// dds by aligned steps, for blocks with a side of 16 or 32: macro-tiles likewise, but steps
// are whole ones of k, from a multiple of the header's `step`, and one rank, or two with half of the features
// each, walk together those in which some row of the tile has a block. They are as wide as the shape says, or
// half of it where blocks crowd (see StepFill). Blocks are cut into squares, along their longer side.
//     - tiles [tiles][2]: first step, number of steps; longest first, of equals that with most blocks
//     - rows [tiles][group_rows]: block rows, -1 where there is none
//     - masks [steps][tile / 64][2]: bit 4 j + i says that of 64 features those from 16 i to 16 i + 15 have a
//       block at k from 16 j to 16 j + 15 of the step; byte i is the number of the first of these squares
//       among those of the rank and step
//     - k [steps]: first element of k
//     - starts [steps][ranks]: entry in slots of the first square of a rank and step; and the end of the last
//     - slots [squares]: block in values times the squares of one, plus the number of the square in it; by
//       step, rank, row of squares and k
//
// sdd: block rows are grouped likewise, `group_rows` in `tile` features of y; the columns of a group in which
// some row has a block are gathered into macro-tiles of `pieces` blocks (`step` features of x).
//     - tiles [tiles]: number of pieces used
//     - rows [tiles][group_rows]: block rows, -1 where there is none
//     - masks [tiles][tile / 16]: bit j says that these 16 features of y have a block at features 16 j of x
//     - k [tiles][pieces]: first feature of x, -1 where there is none
//     - slots [tiles][pieces][group_rows]: block in values, -1 where there is none
//
// No tile has block rows of two weights (Pattern::groups). Tiles go by weight, and in each as above; of dds
// all weights have equally many. Block rows are numbered over all weights, k and x within each.
//
// The plans of sdd by strips are described in common/strip_plan.h, those by lists in common/list_plan.h.
// Sections may have more room than they use.
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace ts {

struct PlanHeader {
    int32_t tiles;
    int32_t steps;
    union {
        int32_t group_rows;   // block rows of a group
        int32_t unit_blocks;  // of plans by strips: blocks in a strip by a unit
    };
    union {
        int32_t pieces;
        int32_t units;  // of plans by strips: of two windows
        int32_t step;   // of plans by aligned steps: k of one
    };
    // Offsets from the header in int32.
    int32_t tiles_at;
    int32_t rows_at;
    int32_t masks_at;
    int32_t k_at;
    int32_t slots_at;
    int32_t words;  // of the whole plan
    int32_t starts_at;
    int32_t key;   // see plan_key
    int32_t fill;  // of plans by aligned steps: StepFill::percent of steps as wide as the shape says
    int32_t reserved[3];
};
static_assert(sizeof(PlanHeader) == 64);

// How full aligned steps are: sums over all of each rank.
struct StepFill {
    int64_t all = 0;
    int64_t steps = 0;  // that have squares
    int64_t squares = 0;
    int64_t neighbours = 0;  // of each square those that its rank has in its step, itself too

    constexpr void add(int64_t in_step) {
        ++all;
        steps += in_step > 0;
        squares += in_step;
        neighbours += in_step * in_step;
    }
    // How many of a rank's `places` in a step are taken, in percent, in the mean over squares.
    constexpr int32_t percent(int places) const {
        return squares == 0 ? 0 : static_cast<int32_t>(neighbours * 100 / (squares * places));
    }
    // True if steps half as wide are better, of which shared memory has room for more, whatever is in them:
    // most are full; or full ones are among empty ones and much emptier ones, of which narrow ones leave out
    // more. Measured on an H200. Two ranks, which walk the steps of both, leave out less.
    constexpr bool crowds(int places, int ranks) const {
        constexpr int32_t kFull = 36, kSome = 90, kUneven = 160;  // percent
        if (squares == 0) return false;
        const int64_t of_square = neighbours * 100 / squares, of_step = squares * 100 / steps;
        const bool uneven = of_square * 100 > of_step * kUneven;
        return percent(places) > kFull || (ranks == 1 && uneven && steps * 100 < all * kSome);
    }
};

// A number, never 0, that plans share only if a kernel that can walk the one can walk the other. It is worked
// out in every launch.
inline int32_t plan_key(const Pattern& pattern, Op op, const PlanShape& shape) {
    const int64_t words[] = {static_cast<int64_t>(op),
                             shape.tile,
                             shape.step,
                             shape.ranks,
                             static_cast<int64_t>(shape.kind),
                             pattern.block_rows,
                             pattern.block_cols,
                             pattern.out_features,
                             pattern.in_features,
                             pattern.nnz,
                             pattern.groups};
    uint64_t hash = 0;
    for (const int64_t word : words) {
        hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    const auto key = static_cast<int32_t>(hash);
    return key == 0 ? 1 : key;
}

}  // namespace ts
