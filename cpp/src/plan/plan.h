// Plans on the host. See common/plan.h for their layout.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan.h"
#include "common/problem.h"

namespace ts {

// Throws where blocks do not fit into the tiles of that shape.
void check_plan_shape(const Pattern& pattern, Op op, PlanShape shape);

// The plan of a valid host pattern (both directions present) for kernels of that shape.
std::vector<int32_t> build_plan(const Pattern& pattern, Op op, PlanShape shape);

// A plan of sections that follow the header in its order.
std::vector<int32_t> assemble(PlanHeader header, const std::vector<std::vector<int32_t>>& sections);

// What ts_kernel_info says of a kernel's plans: equal for equal shapes, and 0 where none is needed.
inline int32_t plan_number(PlanShape shape) {
    return shape.tile == 0
               ? 0
               : static_cast<int32_t>(shape.kind) << 28 | shape.ranks << 24 | shape.tile << 12 | shape.step;
}

}  // namespace ts
