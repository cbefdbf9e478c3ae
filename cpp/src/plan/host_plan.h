// Plans made on the host. See common/plan.h for their layout.
//
// Python makes every plan on the GPU (cuda/plans). The builders of the host stay in the library, not in the
// tests, because ts_plan_size and ts_plan_build are part of ABI 1: a C or C++ program with a fixed pattern
// makes its plan once from host arrays, without a stream, a workspace or a GPU, and in its exact size instead
// of the worst case (examples/cpp/layer.c, tilesparse::Plan). They also are the reference for the GPU's
// builders in tests/python/test_plan.py.
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

// The number in ts_kernel_info::plan: equal for equal shapes, 0 where no plan is needed.
inline int32_t plan_number(PlanShape shape) {
    return shape.tile == 0
               ? 0
               : static_cast<int32_t>(shape.kind) << 28 | shape.ranks << 24 | shape.tile << 12 | shape.step;
}

}  // namespace ts
