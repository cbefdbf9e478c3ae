// The host side of sdd kernels: when tiles are split, and their workspace.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/problem.h"
#include "common/sdd_schedule.h"
#include "tma/pace.cuh"

namespace ts::tma {

inline int sdd_steps(const Problem& problem) {
    return static_cast<int>((problem.tokens + kSddStep - 1) / kSddStep);
}

// True if the products of SddSchedule fit into 32 bits: steps of all teams, twice.
inline bool sdd_fits(const Problem& problem, const Device& device) {
    return 2 * (int64_t{sdd_steps(problem)} + 8) * device.multiprocessors <= INT32_MAX;
}

constexpr int kMinPacedSteps = 32;  // fewer take less time than the counters need to be cleared
constexpr double kMostTiles = 1.1;  // times those of a random pattern, of others as a rule

// How many tiles are split at most, 0 if a second kernel is not worth its launch. The number of tiles, which
// is on the device, is taken to be between these two, any as likely as the others.
inline int most_split(double fewest, double most, int steps, int teams, int team_size, int step_time) {
    constexpr int kProbes = 16;
    constexpr int kNothing = 9;  // time to launch a kernel that finds nothing to do, see SddShares
    const int first = std::max(1, static_cast<int>(std::ceil(fewest)));
    const int last = std::max(first, static_cast<int>(std::ceil(most)));
    // After a round of tiles all is as before.
    const int probed = std::min(last - first + 1, teams * team_size);
    int64_t saved = 0;
    for (int tiles = first; tiles < first + probed; tiles += 1 + (probed - 1) / kProbes) {
        const SddShares shares(tiles, steps, teams, team_size, step_time, true);
        saved += shares.is_split() ? shares.saved : -kNothing;
    }
    return saved > 0 ? std::min(last, teams * team_size) : 0;
}

// True if each multiprocessor gets a tile of that many values at most, and some get more.
inline bool fills(const Problem& problem, const Device& device, int64_t tile_values) {
    return problem.pattern.value_count() > device.multiprocessors * tile_values;
}

// The workspace of a kernel: the counters of the pace, and behind them the partial sums of tiles.
constexpr size_t kPaceBytes = Pace::kBytes;

inline size_t sdd_bytes(bool is_paced, bool may_split, const Device& device, int64_t tile_values) {
    const size_t most = may_split ? 2 * static_cast<size_t>(device.multiprocessors) : 0;  // partial sums
    return is_paced || may_split ? kPaceBytes + most * sizeof(float) * tile_values : 0;
}

template <class Arguments>
cudaError_t use_memory(Arguments& arguments, void* workspace, bool is_paced, void* stream) {
    if (arguments.most_split > 0)
        arguments.partial = reinterpret_cast<float4*>(static_cast<char*>(workspace) + kPaceBytes);
    if (!is_paced) return cudaSuccess;
    arguments.pace = static_cast<int*>(workspace);
    return cudaMemsetAsync(workspace, 0, kPaceBytes, static_cast<cudaStream_t>(stream));
}

}  // namespace ts::tma
