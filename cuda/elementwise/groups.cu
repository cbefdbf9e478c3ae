#include "elementwise/groups.h"

#include <algorithm>

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

// The first group that ends behind a span, of groups whose spans end at ends[group].
__device__ int group_of_span(const int* ends, int groups, int span) {
    int low = 0;
    for (int high = groups - 1; low < high;) {
        const int middle = (low + high) / 2;
        if (ends[middle] <= span)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// One thread for each group, and more to list spans; one block.
__global__ void __launch_bounds__(kMaxGroups) list_groups(Groups groups, int span_tokens, PlanStarts starts) {
    __shared__ int sizes[kMaxGroups], by_size[kMaxGroups];
    const int own = threadIdx.x;
    const bool exists = own < groups.count;
    const int size = exists ? groups.size(own) : 0;
    if (own == 0) groups.spans_before[0] = *groups.taken = 0;
    const int spans = sum_up_to((size + span_tokens - 1) / span_tokens);
    if (exists) groups.spans_before[own + 1] = spans;
    if (groups.most_spans > 0) {
        sizes[own] = spans;
        __syncthreads();
        const int all = min(sizes[groups.count - 1], groups.most_spans);
        for (int span = own; span < all; span += blockDim.x) {
            const int group = group_of_span(sizes, groups.count, span);
            const int before = group == 0 ? 0 : sizes[group - 1];
            groups.spans[span] = make_int4(group, before, groups.begin(group), groups.begin(group + 1));
        }
        return;
    }
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

constexpr int kListingThreads = 256;

// Spans come first, aligned as the memory is.
size_t bytes_of(int count, int64_t most_spans) {
    return static_cast<size_t>(most_spans) * sizeof(int4) +
           (3 * static_cast<size_t>(count) + 3) * sizeof(int32_t);
}

int32_t list(Groups& groups, const Problem& problem, int span_tokens, PlanStarts starts, int64_t most_spans,
             void* memory, void* stream) {
    const int count = problem.pattern.groups;
    groups.spans = static_cast<int4*>(memory);
    groups.most_spans = static_cast<int>(most_spans);
    auto* const words = reinterpret_cast<int32_t*>(groups.spans + most_spans);
    groups.offsets = problem.offsets;
    groups.count = count;
    groups.tokens = static_cast<int>(problem.tokens);
    groups.spans_before = words;
    groups.tiles_before = words + count + 1;
    groups.by_size = groups.tiles_before + count + 1;
    groups.taken = groups.by_size + count;
    const int threads = std::max((count + 31) / 32 * 32, most_spans > 0 ? kListingThreads : 0);
    return launch_kernel(list_groups, 1, threads, stream, groups, span_tokens, starts);
}

}  // namespace ts::groups
