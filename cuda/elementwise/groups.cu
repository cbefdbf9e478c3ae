#include "elementwise/groups.h"

#include "common/launch.cuh"

namespace ts::groups {
namespace {

// One thread for each group, one block.
__global__ void __launch_bounds__(kMaxGroups) list_groups(Groups groups, int span_tokens) {
    __shared__ int sums[kMaxGroups / 32], sizes[kMaxGroups];
    const int group = threadIdx.x, lane = group % 32, warp = group / 32;
    const int size = group < groups.count ? groups.size(group) : 0;
    int sum = (size + span_tokens - 1) / span_tokens;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    sizes[group] = size;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += sums[w];
    if (group == 0) groups.spans_before[0] = *groups.taken = 0;
    if (group >= groups.count) return;
    groups.spans_before[group + 1] = sum;
    int place = 0;
    for (int i = 0; i < groups.count; ++i) place += sizes[i] > size || (sizes[i] == size && i < group);
    groups.by_size[place] = group;
}

}  // namespace

size_t bytes_of(int count) { return (2 * static_cast<size_t>(count) + 2) * sizeof(int32_t); }

int32_t list(Groups& groups, const Problem& problem, int span_tokens, void* memory, void* stream) {
    const int count = problem.pattern.groups;
    auto* const words = static_cast<int32_t*>(memory);
    groups = {problem.offsets,      count, static_cast<int>(problem.tokens), words, words + count + 1,
              words + 2 * count + 1};
    return launch_kernel(list_groups, 1, (count + 31) / 32 * 32, stream, groups, span_tokens);
}

}  // namespace ts::groups
