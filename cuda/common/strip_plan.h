// The layout of plans of sdd by strips, for kernels of PlanKind::strips. See common/plan.h for
// the others.
//
// y is cut into strips of 64 features and x into units of strip_unit() features, whatever the blocks. A half
// of a tile is a strip by a window of 256 gathered features of x. A tile is two halves, whose one or two
// strips and whose units are loaded together: the windows are runs of the tile's units and may overlap.
// Strips and units have at most 576 features. `unit_blocks` counts the blocks in a strip by a unit, at least
// 1, and `units` the units of two windows:
//     - tiles [tiles][4]: first feature of y of the first strip, and of the second or -1 if both halves use
//       the first; number of units; the unit at which the second half's window begins, or -1: then y and x
//       have changed places, strips are cut from x and units, which have 64 features here, from y, and both
//       windows begin at the first unit. Largest first.
//     - rows, masks: nothing
//     - k [tiles][units]: first feature of x (or y) of each unit, -1 where there is none
//     - slots [tiles][2][units / 2][unit_blocks]: block in values, row by row, for the units of the first
//       half's window and of the second's, -1 where there is none
// Tiles of several weights go by weight, and only then by size; features of y are numbered over all of them,
// those of x in each:
//     - starts [groups + 1]: the first tile of each weight
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/plan.h"
#include "common/problem.h"

namespace ts {

constexpr int32_t kStripFeatures = 64;
constexpr int32_t kStripWindow = 256;
constexpr int32_t kStripTileFeatures = 576;
constexpr int32_t kWideBlock = 128;

// Tiles of these are two blocks each, or one. Tiles 2 i and 2 i + 1, which are computed side by side, have
// the same strips where possible.
inline bool are_wide_blocks(const Pattern& pattern) {
    return pattern.block_rows == kWideBlock && pattern.block_cols == kWideBlock;
}

// Features of x in a unit.
inline int32_t strip_unit(const Pattern& pattern) { return pattern.block_cols == 32 ? 32 : 64; }

// About as many tiles as a plan of a random pattern has. Half of the last window of a strip is empty, unless
// all units have blocks.
inline double strip_tiles(const Pattern& pattern) {
    const double rows = std::max(1, kStripFeatures / pattern.block_rows);
    const double columns = std::max(1, strip_unit(pattern) / pattern.block_cols);
    const double units = pattern.present(rows * columns);  // share of those with a block
    const double all = static_cast<double>(pattern.in_features) / kStripWindow;
    const double windows = std::clamp(units * all + 0.5, 1.0, std::max(std::ceil(all), 1.0));
    return std::ceil(static_cast<double>(pattern.out_features) / kStripFeatures) * windows / 2;
}

}  // namespace ts
