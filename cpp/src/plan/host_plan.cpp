#include "plan/host_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

#include "descriptors.h"
#include "error.h"
#include "plan/block_rows.h"
#include "plan/builders.h"
#include "plan/list_builder.h"
#include "plan/strip_builder.h"

namespace ts {
namespace {

// Refuses a weight for which the sets of columns, or the list of all pairs of block rows, would take the
// machine's memory for a pattern that may have hardly a block.
void check_host_size(const View& view, PlanShape shape) {
    constexpr int64_t kMostBytes = int64_t{8} << 30;
    const bool pairs = shape.kind == PlanKind::aligned || shape.ranks > 1;
    const int64_t sets = (view.col_count + 63) / 64 * static_cast<int64_t>(sizeof(uint64_t));
    const int64_t row_bytes =
        sets + (pairs ? view.row_count / 2 * static_cast<int64_t>(sizeof(Candidate)) : 0);
    if (view.row_count > 0 && row_bytes > kMostBytes / view.row_count)
        fail(TS_UNSUPPORTED, "the weight has ", view.row_count, " x ", view.col_count,
             " blocks, kept or not: making its plan on the host would need more than ", kMostBytes, " bytes");
}

std::vector<int32_t> build_words(const Pattern& pattern, Op op, PlanShape shape) {
    const View view = view_of(pattern, op);
    check_host_size(view, shape);
    if (shape.kind == PlanKind::strips) {
        const StripPlan plan = build_strip_plan(pattern);
        return assemble(plan.header, {plan.tiles, {}, {}, plan.units, plan.slots, plan.starts});
    }
    if (shape.kind == PlanKind::lists) {
        const ListPlan plan = build_list_plan(pattern);
        return assemble(plan.header, {plan.tiles, {}, plan.masks, plan.units, plan.slots});
    }
    if (op == Op::sdd_tn) return build_sdd_plan(view, shape);
    if (shape.kind == PlanKind::aligned) return build_aligned_plan(view, shape);
    return build_dds_plan(view, shape);
}

}  // namespace

std::vector<int32_t> assemble(PlanHeader header, const std::vector<std::vector<int32_t>>& sections) {
    int32_t* const offsets[] = {&header.tiles_at, &header.rows_at,  &header.masks_at,
                                &header.k_at,     &header.slots_at, &header.starts_at};
    int64_t at = sizeof(PlanHeader) / sizeof(int32_t);
    for (size_t i = 0; i < sections.size(); ++i) {
        *offsets[i] = static_cast<int32_t>(at);
        at += static_cast<int64_t>((sections[i].size() + 3) / 4 * 4);  // each section 16-byte aligned
        if (at > std::numeric_limits<int32_t>::max())
            fail(TS_UNSUPPORTED, "the plan must have at most ", std::numeric_limits<int32_t>::max(),
                 " words");
    }
    header.words = static_cast<int32_t>(at);
    std::vector<int32_t> plan(at, -1);
    std::memcpy(plan.data(), &header, sizeof header);
    for (size_t i = 0; i < sections.size(); ++i)
        std::copy(sections[i].begin(), sections[i].end(), plan.begin() + *offsets[i]);
    return plan;
}

void check_plan_shape(const Pattern& pattern, Op op, PlanShape shape) {
    check_regular(pattern, "a kernel with a plan");
    const bool knows_groups = shape.kind == PlanKind::tiles || shape.kind == PlanKind::strips;
    if (pattern.groups > 1 && !knows_groups)
        fail(TS_UNSUPPORTED, "pattern.groups must be 0 or 1 for this kernel, got ", pattern.groups);
    if (shape.kind == PlanKind::aligned) {
        require(std::min(pattern.block_rows, pattern.block_cols) <= 32,
                "block_shape must have a side of 16 or 32 for this kernel, got ", pattern.block_rows, " x ",
                pattern.block_cols);
    } else if (shape.kind == PlanKind::lists) {
        require(are_listed_blocks(pattern), "block_shape must be 16 x 16 for this kernel, got ",
                pattern.block_rows, " x ", pattern.block_cols);
    } else if (shape.kind == PlanKind::tiles) {
        const int32_t features = view_of(pattern, op).row_block;
        require(features <= shape.tile, "block_shape must have at most ", shape.tile,
                " output features for this kernel, got ", features);
    }
}

std::vector<int32_t> build_plan(const Pattern& pattern, Op op, PlanShape shape) {
    if (shape.tile == 0) return {};
    check_plan_shape(pattern, op, shape);
    std::vector<int32_t> plan = build_words(pattern, op, shape);
    plan[offsetof(PlanHeader, key) / sizeof(int32_t)] = plan_key(pattern, op, shape);
    return plan;
}

}  // namespace ts
