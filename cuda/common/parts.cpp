#include <algorithm>
#include <cmath>

#include "common/estimate.h"

namespace ts {
namespace {

// Steps of 64 k, of those k in which 64 features of the result of dds have a block if it is a random pattern.
double dds_steps(const Problem& problem) {
    constexpr int kStep = 64;
    return static_cast<double>(problem.k_size()) / kStep * problem.pattern.present(64 / problem.row_block());
}

// Share of the time of a dds product of few tiles that is left where the sums are cut into parts over k and
// added by a second kernel, which takes as long as some steps.
double split_time(double steps, int64_t parts) {
    constexpr int kReductionSteps = 8;
    return 1.0 / static_cast<double>(parts) + kReductionSteps / steps;
}

// The number of parts for some tiles, so that all `workers`, which take one at a time, have work. The partial
// sums need no more memory than one tile of each worker.
int64_t part_count(const Problem& problem, int64_t tiles, int64_t workers) {
    constexpr int64_t kMost = 8, kLeastSteps = 4;
    if (tiles == 0 || workers / tiles < 2) return 1;
    const double steps = dds_steps(problem);
    const int64_t parts = std::min({workers / tiles, static_cast<int64_t>(steps) / kLeastSteps, kMost});
    return parts > 1 && split_time(steps, parts) < 1 ? parts : 1;
}

}  // namespace

double tiles_of(const Kernel& kernel, const Problem& problem) {
    return std::ceil(static_cast<double>(problem.tokens) / kernel.tile_tokens) *
           std::ceil(static_cast<double>(problem.features()) / kernel.tile_features);
}

int64_t parts_of(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (!kernel.splits) return 1;
    Problem counted = problem;
    if (is_quantized(problem.input_dtype) && !is_narrow(kernel)) {  // steps have twice as much k
        counted.pattern.in_features /= 2;
        counted.pattern.block_cols /= 2;
    }
    const double tiles = tiles_of(kernel, problem);
    const int64_t workers = device.multiprocessors / kernel.cluster;
    int64_t parts = part_count(counted, static_cast<int64_t>(tiles), workers);
    if (!is_narrow(kernel)) return parts;
    constexpr int64_t kMost = 4;      // eight thread blocks
    constexpr double kFilled = 0.92;  // such clusters leave some multiprocessors idle
    parts = std::min(parts, kMost);
    while (parts > 1 && tiles * static_cast<double>(parts) > kFilled * static_cast<double>(workers)) --parts;
    return parts;
}

}  // namespace ts
