#include "hopper/select.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/estimate.h"

namespace ts::sm90 {
namespace {

// True if reading blocks of 16 x 16 and 32 x 32 one by one takes less time than prepacking them, in
// microseconds of an H200.
bool reads_blocks(const Kernel& kernel, const Problem& problem, const Device& device, int64_t parts) {
    constexpr double kBlock = 0.032, kCtaFeatures = 256;
    constexpr double kPacking = 1.3, kRate = 3.3e6;
    const Pattern& pattern = problem.pattern;
    const bool small = pattern.block_rows == pattern.block_cols && pattern.block_rows <= 32;
    if (problem.prepacked != nullptr || !problem.forward() || !small ||
        pattern.nnz * pattern.block_rows > std::numeric_limits<int32_t>::max())
        return false;
    const double pieces = tiles_of(kernel, problem) * static_cast<double>(parts);
    const double rounds = std::ceil(pieces / (device.multiprocessors / kernel.cluster));
    const double blocks = static_cast<double>(problem.k_size()) / pattern.block_cols * kCtaFeatures /
                          pattern.block_rows * pattern.density();
    const double bytes = static_cast<double>(pattern.value_count()) * element_size(problem.values.dtype);
    return kBlock * blocks * rounds / static_cast<double>(parts) < std::max(kPacking, 2 * bytes / kRate);
}

}  // namespace

Decision decide_dds(const Kernel& kernel, const Problem& problem, const Device& device) {
    return {parts_of(kernel, problem, device)};
}

Decision decide_narrow(const Kernel& kernel, const Problem& problem, const Device& device) {
    const int64_t parts = parts_of(kernel, problem, device);
    return {parts, reads_blocks(kernel, problem, device, parts)};
}

// Beside products, which take most of what L2 gives, the warps that load nothing read so many bytes of y in a
// microsecond (H200). Where the products take less time than that, a kernel of its own is faster.
Decision decide_sdd(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr double kBytes = 0.75e6;
    if (problem.bias_gradient.data == nullptr || problem.pattern.nnz == 0) return {};
    const double bytes = 2.0 * problem.tokens * problem.pattern.out_features;
    Decision decision;
    decision.sums_y = bytes < kBytes * estimate(kernel, problem, device);
    return decision;
}

}  // namespace ts::sm90
