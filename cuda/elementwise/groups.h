// Groups of tokens that lie one after another, each with a weight of its own. Where they begin is known on
// the GPU alone: a kernel of one thread block counts what others need to find their work.
#pragma once

#include <cstddef>

#include "common/plan.h"

namespace ts::groups {

constexpr int kMaxGroups = 1024;

struct Groups {
    const int32_t* offsets;  // [count + 1] first tokens
    int count;
    int tokens;      // of all
    int most_spans;  // of all groups; 0: spans are not listed
    // Written by list(), in memory of bytes_of(count, most_spans):
    int32_t* spans_before;  // [count + 1] spans of the groups before each
    int32_t* by_size;       // [count] groups, those with most tokens first
    int32_t* tiles_before;  // [count + 1] in that order: tiles of the groups before each, see PlanStarts
    int32_t* taken;         // 0: how much of the work has been taken
    int4* spans;  // [most_spans] of each: its group, and of that the spans before, first token and end

#ifdef __CUDACC__
    // First token of a group, inside of x and y whatever the offsets are.
    __device__ int begin(int group) const { return min(max(__ldg(offsets + group), 0), tokens); }
    __device__ int size(int group) const { return max(begin(group + 1) - begin(group), 0); }
#endif
};

// A plan that says where the tiles of each group begin, and the key without which it has none; or no plan.
struct PlanStarts {
    const PlanHeader* plan = nullptr;
    int32_t key = 0;
    PlanReport report{};
};

size_t bytes_of(int count, int64_t most_spans = 0);

// A span is so many tokens, the last one of a group fewer. Broken offsets may have more than `most_spans`, of
// which no more are listed. Returns 0 or the CUDA error of the launch.
int32_t list(Groups& groups, const Problem& problem, int span_tokens, PlanStarts starts, int64_t most_spans,
             void* memory, void* stream);

}  // namespace ts::groups
