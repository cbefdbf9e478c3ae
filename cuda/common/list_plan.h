// The layout of plans of sdd by lists, for kernels of PlanKind::lists: of blocks of 16 x 16. See
// common/plan.h for the others.
//
// y and x are cut into units of 64 features. A tile is some blocks, and the units of y and of x in which they
// lie, at most kListUnits together. Units of y are those of a group of list_group() neighbours; the blocks of
// a group are taken in order of their unit of x, and in it by row, as many to a tile as fit. The blocks of a
// tile are then dealt to kListWarps warps, in order of their rows, kListBlocks to each at most and as many to
// one as to the other, but for the last ones:
//     - tiles [tiles][4]: units of y, of x, blocks, and blocks that each warp has
//     - rows: nothing
//     - masks [tiles][kListWarps][kListBlocks]: where a block's features begin in the tile's units, counted
//       in 16 features: bits 0 to 15 for x, 16 to 30 for y, and bit 31 if it is a warp's first block or its
//       features of y are not those of the block before; 0 where there is none
//     - k [tiles][kListUnits]: first feature of each unit, those of y and then those of x, -1 where there is
//       none
//     - slots [tiles][kListWarps][kListBlocks]: block in values, -1 where there is none
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/plan.h"
#include "common/problem.h"

namespace ts {

constexpr int32_t kListUnit = 64;
constexpr int32_t kListUnits = 18;
constexpr int32_t kListWarps = 16;
constexpr int32_t kListBlocks = 8;  // of a warp
constexpr int32_t kListTileBlocks = kListWarps * kListBlocks;
constexpr int32_t kListTileValues = kListTileBlocks * 16 * 16;
constexpr PlanShape kListPlan = {kListUnit, kListUnits * kListUnit, 1, PlanKind::lists};

// True for blocks that such plans are for.
inline bool are_listed_blocks(const Pattern& pattern) {
    return pattern.block_rows == 16 && pattern.block_cols == 16;
}

// Units of y of a group: as many as make a tile square, so that it has most blocks for its units. Where
// blocks are few, wider tiles were 4 to 7 % faster on an H200.
inline int32_t list_group(const Pattern& pattern) {
    constexpr double kMost = 7;
    const auto units = static_cast<int32_t>((pattern.out_features + kListUnit - 1) / kListUnit);
    const double density = std::max(pattern.density(), 1e-6);
    const double square = std::sqrt(kListTileValues / density) / kListUnit;
    const auto most = static_cast<int32_t>(std::lround(std::clamp(square, 1.0, kMost)));
    const int32_t groups = (units + most - 1) / most;
    return groups == 0 ? 1 : (units + groups - 1) / groups;
}

// About as many tiles as a plan of a random pattern has: a tile has as many blocks as lie in its units of y
// and x, or as warps have room for; the last one of a group has what is left.
inline double list_tiles(const Pattern& pattern) {
    constexpr double kBlocks = kListUnit / 16 * kListUnit / 16;  // of a unit of y and one of x
    constexpr double kDeviation = 0.03;                          // of the blocks of a group, about
    const double group = list_group(pattern), nnz = static_cast<double>(pattern.nnz);
    const double places = group * kBlocks, present = pattern.present(places);
    const double of_unit = places * pattern.density() / std::max(present, 1e-12);  // of x that has blocks
    const double of_tile = std::clamp((kListUnits - group) * of_unit, 1.0, double{kListTileBlocks});
    const double groups =
        std::min(std::ceil(static_cast<double>(pattern.out_features) / kListUnit / group), nnz);
    const double full = nnz / of_tile / std::max(groups, 1.0);  // tiles of a group
    return groups * (std::ceil(full * (1 - kDeviation)) + std::ceil(full * (1 + kDeviation))) / 2;
}

}  // namespace ts
