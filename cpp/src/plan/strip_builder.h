// Plans of sdd by strips. See common/strip_plan.h for their layout.
#pragma once

#include <cstdint>
#include <vector>

#include "common/strip_plan.h"

namespace ts {

struct StripPlan {
    PlanHeader header;  // but for its offsets
    std::vector<int32_t> tiles, units, slots, starts;
};

// Blocks are rounded up to a strip by a unit. Halves of a tile are chosen to have many units in common,
// since loading the operands takes longer than multiplying. Blocks of 128 x 128 are paired, two of a row or
// two of a column to a tile.
StripPlan build_strip_plan(const Pattern& pattern);
StripPlan build_strip_plan_of_one(const Pattern& weight);  // see Pattern::groups

}  // namespace ts
