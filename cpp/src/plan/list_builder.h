// Plans of sdd by lists. See common/list_plan.h for their layout.
#pragma once

#include <cstdint>
#include <vector>

#include "common/list_plan.h"

namespace ts {

struct ListPlan {
    PlanHeader header;  // but for its offsets
    std::vector<int32_t> tiles, masks, units, slots;
};

ListPlan build_list_plan(const Pattern& pattern);

}  // namespace ts
