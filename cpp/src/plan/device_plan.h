// Plans and transposes made on the GPU, from patterns in its memory. See plans/plans.h.
#pragma once

#include <cstddef>

#include "common/problem.h"
#include "tilesparse/tilesparse.h"

namespace ts {

struct DevicePlanBytes {
    size_t plan;
    size_t workspace;
};

// The most bytes of a plan, for a checked pattern and a kernel that computes `op`; 0 if it needs none.
DevicePlanBytes device_plan_bytes(const Pattern& pattern, Op op, const Kernel& kernel);

void build_device_plan(const Pattern& pattern, Op op, const Kernel& kernel, void* plan, size_t plan_bytes,
                       void* workspace, size_t workspace_bytes, void* stream);

size_t device_transpose_bytes(const Pattern& pattern);

void transpose_on_device(const Pattern& pattern, int32_t* col_ptr, int32_t* row_idx, int32_t* col_slot,
                         void* workspace, size_t workspace_bytes, void* stream);

constexpr int32_t kMaxPairs = 1 << 24;  // that are compared at once

void compare_arrays(ts_array_pair* pairs, int32_t count, int64_t mark, void* stream);

}  // namespace ts
