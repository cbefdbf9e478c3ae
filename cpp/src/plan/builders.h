// The builders of the plans whose layout common/plan.h describes.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan.h"
#include "plan/block_rows.h"

namespace ts {

std::vector<int32_t> build_dds_plan(const View& view, PlanShape shape);
std::vector<int32_t> build_aligned_plan(const View& view, PlanShape shape);
std::vector<int32_t> build_sdd_plan(const View& view, PlanShape shape);

}  // namespace ts
