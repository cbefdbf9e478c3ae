#include "elementwise/groups.h"

#include "common/launch.cuh"
#include "common/plan_view.cuh"

namespace ts::groups {
namespace {

// The sum over the threads up to this one. Called by all threads of a block.
__device__ int sum_up_to(int value) {
    __shared__ int sums[kMaxGroups / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, value, distance);
        if (lane >= distance) value += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    for (int w = 0; w < warp; ++w) value += sums[w];
    return value;
}

// One thread for each group, one block.
__global__ void __launch_bounds__(kMaxGroups) list_groups(Groups groups, int span_tokens, PlanStarts starts) {
    __shared__ int sizes[kMaxGroups], by_size[kMaxGroups];
    const int own = threadIdx.x;
    const bool exists = own < groups.count;
    const int size = exists ? groups.size(own) : 0;
    if (own == 0) groups.spans_before[0] = *groups.taken = 0;
    const int spans = sum_up_to((size + span_tokens - 1) / span_tokens);
    if (exists) groups.spans_before[own + 1] = spans;
    if (starts.plan == nullptr) return;

    if (starts.plan->key != starts.key) {
        if (own == 0) groups.tiles_before[groups.count] = 0;
        return report_stale(starts.report);
    }
    sizes[own] = size;
    __syncthreads();
    int place = 0;
    for (int i = 0; i < groups.count; ++i) place += sizes[i] > size || (sizes[i] == size && i < own);
    if (exists) by_size[place] = groups.by_size[place] = own;
    __syncthreads();
    // A plan of one weight has no starts.
    const int32_t* const first = reinterpret_cast<const int32_t*>(starts.plan) + starts.plan->starts_at;
    const int group = exists ? by_size[own] : 0;
    const int of_group = groups.count == 1 ? starts.plan->tiles : first[group + 1] - first[group];
    const int tiles = sum_up_to(exists ? of_group : 0);
    if (exists) groups.tiles_before[own + 1] = tiles;
    if (own == 0) groups.tiles_before[0] = 0;
}

}  // namespace

size_t bytes_of(int count) { return (3 * static_cast<size_t>(count) + 3) * sizeof(int32_t); }

int32_t list(Groups& groups, const Problem& problem, int span_tokens, PlanStarts starts, void* memory,
             void* stream) {
    const int count = problem.pattern.groups;
    auto* const words = static_cast<int32_t*>(memory);
    groups.offsets = problem.offsets;
    groups.count = count;
    groups.tokens = static_cast<int>(problem.tokens);
    groups.spans_before = words;
    groups.tiles_before = words + count + 1;
    groups.by_size = groups.tiles_before + count + 1;
    groups.taken = groups.by_size + count;
    return launch_kernel(list_groups, 1, (count + 31) / 32 * 32, stream, groups, span_tokens, starts);
}

}  // namespace ts::groups
