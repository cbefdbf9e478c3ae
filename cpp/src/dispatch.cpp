#include "dispatch.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "error.h"
#include "problem.h"
#include "registry.h"

namespace ts {
namespace {

const char* why_not(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (kernel.device != device.type) return "it is for another kind of device";
    if (!kernel.covers(problem.op)) return "it computes another product";
    if (!kernel.covers(problem.dtype)) return "it computes another dtype";
    if (device.type == DeviceType::cuda) {
        if (problem.dtype == DType::float32 && kernel.precision != problem.precision)
            return "it has another float32 precision";
        if (device.compute_capability < kernel.min_compute_capability)
            return "the device's compute capability is lower";
    }
    if (kernel.max_tokens > 0 && problem.tokens > kernel.max_tokens) return "it is for fewer tokens";
    return kernel.refuses(problem, device);
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kSharedActivationsPercent = 75;  // of kernels that share the activations, for blocks < 64

// The kernels for narrow blocks multiply where one of the block rows of 64 features has a block, the others
// walk the columns in which one of four block rows has one. Times in us of 10^6 results, fitted to blocks
// of 32 and to tiles of 512 x 128. Of two kernels the one with short steps has more room for the weight.
int64_t narrow_percent(const Kernel& kernel, const Problem& problem) {
    constexpr double kDense = 0.35;
    constexpr int64_t kOtherStepsPercent = 125;
    const Pattern& pattern = problem.pattern;
    const double density = pattern.density();
    const double k = 1e-3 * static_cast<double>(problem.k_size());
    const double by_products = 0.92 * ((0.5 + 2.1 * (1 - std::pow(1 - density, 2))) * k + 0.3);
    const double by_columns = 2.8 * (1 - std::pow(1 - density, 4)) * k + 0.3;
    const auto percent = static_cast<int64_t>(
        pattern.block_rows == 16 ? 40 : kSharedActivationsPercent * by_products / by_columns);
    return (density > kDense) == (kernel.plan.step == 64) ? percent : percent * kOtherStepsPercent / 100;
}

// What a tile costs in percent of its multiply-adds and operands, measured on an H200.
int64_t tile_percent(const Kernel& kernel, const Problem& problem) {
    const int32_t row_block = problem.row_block(), k_block = problem.k_block();
    if (kernel.plan.kind == PlanKind::aligned) return narrow_percent(kernel, problem);
    if (kernel.min_compute_capability == 90) {
        // wgmma is twice as fast as mma.sync, but blocks of 16 x 16 come in too many copies. Of large blocks
        // it is best to share the weight between CTAs; small ones have columns in common with many others.
        const bool large = row_block == 128 || (row_block == 64 && k_block >= 64);
        const bool tiny = row_block + k_block <= 32;
        const bool shares_weight = kernel.plan.ranks == 1;
        int64_t percent = shares_weight ? 110 : kSharedActivationsPercent;
        if (large) percent = shares_weight ? 46 : 54;
        if (tiny) percent = shares_weight ? 350 : 160;
        // Half as many tokens to a CTA: more of the weight for each product, but more CTAs.
        const bool halved = kernel.tile_tokens < (shares_weight ? 512 : 256);
        return halved ? percent * (shares_weight ? 130 : 108) / 100 : percent;
    }
    // Blocks narrower than the 64 features of a large tile's warp break its products into short runs,
    // whose latency the more numerous warps of a small tile hide better.
    return row_block < 64 && kernel.tile_tokens > 128 ? 133 : 100;
}

// Time of a dds product in arbitrary units: waves of tiles over the multiprocessors, each tile costing
// its multiply-adds and the operands it brings in. The weight of the operands was fitted on an H200.
int64_t dds_cost(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr int64_t kOperandWeight = 64;
    const int64_t features = problem.features();
    const int64_t columns = divide_up(features, kernel.tile_features);
    const int64_t tiles = divide_up(problem.tokens, kernel.tile_tokens) * columns;
    const int64_t tile_features = divide_up(features, std::max<int64_t>(columns, 1));  // evenly dealt
    // A cluster of two multiprocessors computes a tile of compute capability 9.0 in half the time of one.
    const int64_t multiprocessors = kernel.min_compute_capability == 90 ? 2 : 1;
    const int64_t tile_cost =
        kernel.tile_tokens * tile_features + kOperandWeight * (kernel.tile_tokens + tile_features);
    const int64_t waves = divide_up(tiles * multiprocessors, device.multiprocessors);
    const int64_t cost = waves * tile_cost * tile_percent(kernel, problem) / (100 * multiprocessors);
    const int64_t parts =
        kernel.splits ? split_count(problem, tiles, device.multiprocessors / multiprocessors) : 1;
    if (parts == 1) return cost;
    const double steps = dds_steps(problem, kernel.plan.step);
    return static_cast<int64_t>(static_cast<double>(cost) * std::min(1.0, split_time(steps, parts)));
}

// For sdd, whose tiles hold several block rows: wide tiles share loads between the many rows of the
// smallest blocks and fit the largest; between, half of a wide tile idles (measured on an H200).
int64_t sdd_cost(const Kernel& kernel, const Problem& problem) {
    const int32_t block_rows = problem.pattern.block_rows;
    const int32_t best_features = block_rows == 32 || block_rows == 64 ? 64 : 128;
    return kernel.tile_features == best_features ? 0 : 1;
}

int64_t cost(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (kernel.tile_features == 0) return 0;  // the only one of its kind
    return problem.op == Op::sdd_tn ? sdd_cost(kernel, problem) : dds_cost(kernel, problem, device);
}

// Whether kernels made for few tokens are faster than the others. They read the activations anew for each
// block row and 64 tokens. The others walk what several rows have in common; where tiles are few they take as
// long as one tile does, less where there are so few that sums are cut into parts. In us, beside what both
// take, fitted to an H200.
bool has_few_tokens(const Problem& problem, const Device& device) {
    constexpr int64_t kChunk = 64;
    const int64_t chunks = divide_up(problem.tokens, kChunk);
    if (chunks <= 1) return true;
    const Pattern& pattern = problem.pattern;
    const int32_t rows = problem.row_block();
    const double products = static_cast<double>(chunks * kChunk) * static_cast<double>(pattern.value_count());
    const double picoseconds = rows < 32 ? 4.0 : rows < 64 ? 1.74 : 1.45;  // of a multiprocessor's product
    const double streaming = 1e-6 * picoseconds * products / device.multiprocessors;
    const double present = 1 - std::pow(1 - pattern.density(), std::max(2, 128 / rows));
    const double walking = 7e-3 * static_cast<double>(problem.k_size()) * present;
    const int64_t tiles = divide_up(problem.tokens, 128) * divide_up(problem.features(), 512);
    const double part = tiles > 16 ? 1.0 : tiles > 8 ? 0.85 : 0.62;
    return streaming < part * walking;
}

// Kernels made for few tokens come first where there are few, then the cheapest. Costs of sdd compare within
// an architecture, of which the newest that the device can run is best.
bool better(const Kernel& a, const Kernel& b, const Problem& problem, const Device& device) {
    if ((a.max_tokens > 0) != (b.max_tokens > 0))
        return (a.max_tokens > 0) == has_few_tokens(problem, device);
    if (problem.op == Op::sdd_tn && a.min_compute_capability != b.min_compute_capability)
        return a.min_compute_capability > b.min_compute_capability;
    return cost(a, problem, device) < cost(b, problem, device);
}

// The best kernel that computes the problem and whose name begins with `prefix`; index -1 if none.
Choice best(const Problem& problem, const Device& device, std::string_view prefix) {
    Choice choice{-1, nullptr, nullptr};
    const auto& kernels = registry();
    for (size_t i = 0; i < kernels.size(); ++i) {
        const Kernel& kernel = *kernels[i];
        if (!std::string_view(kernel.name).starts_with(prefix)) continue;
        if (why_not(kernel, problem, device) != nullptr) continue;
        if (choice.kernel == nullptr || better(kernel, *choice.kernel, problem, device))
            choice = {static_cast<int32_t>(i), &kernel, nullptr};
    }
    return choice;
}

const char* reason_for(const Kernel& kernel) {
    if (kernel.device == DeviceType::cpu) return "the best instruction set of this processor for the dtype";
    if (kernel.max_tokens > 0) return "made for so few tokens";
    return "the least estimated time on this device";
}

Choice force(const Problem& problem, const Device& device, int32_t forced) {
    const auto& kernels = registry();
    require(forced <= static_cast<int32_t>(kernels.size()) && forced > 0, "kernel is ", forced,
            "; allowed are 0 to ", kernels.size());
    const Kernel& kernel = *kernels[forced - 1];
    if (const char* reason = why_not(kernel, problem, device))
        fail(TS_UNSUPPORTED, "kernel ", kernel.name, " cannot compute this: ", reason);
    return {forced - 1, &kernel, "the caller names it"};
}

[[noreturn]] void fail_unsupported(const Problem& problem, const Device& device) {
    std::string refusals;
    for (const Kernel* kernel : registry())
        if (kernel->device == device.type && kernel->covers(problem.op) && kernel->covers(problem.dtype))
            refusals += std::string("; ") + kernel->name + ": " + why_not(*kernel, problem, device);
    if (refusals.empty()) refusals = "; the library has none for this product and dtype on this device";
    fail(TS_UNSUPPORTED, "no kernel computes ", to_string(problem.op), " in ", to_string(problem.dtype),
         " on ", device.type == DeviceType::cpu ? "the CPU" : "this CUDA device", refusals);
}

}  // namespace

Choice choose(const Problem& problem, const Device& device, int32_t forced) {
    if (forced != 0) return force(problem, device, forced);
    const char* name = std::getenv("TILESPARSE_KERNEL");
    if (name != nullptr && *name != '\0') {
        Choice choice = best(problem, device, name);
        if (choice.kernel != nullptr) {
            choice.reason = "TILESPARSE_KERNEL names it";
            return choice;
        }
    }
    Choice choice = best(problem, device, "");
    if (choice.kernel == nullptr) fail_unsupported(problem, device);
    choice.reason = reason_for(*choice.kernel);
    return choice;
}

void log_choice(const Problem& problem, const Choice& choice) {
    static const char* const setting = std::getenv("TILESPARSE_LOG");
    static const bool enabled = setting != nullptr && std::string_view(setting) == "1";
    if (!enabled) return;
    const Pattern& pattern = problem.pattern;
    char line[256];
    std::snprintf(line, sizeof line, "tilesparse: %s %s tokens=%lld out=%lld in=%lld block=%dx%d: %s (%s)\n",
                  to_string(problem.op), to_string(problem.dtype), static_cast<long long>(problem.tokens),
                  static_cast<long long>(pattern.out_features), static_cast<long long>(pattern.in_features),
                  pattern.block_rows, pattern.block_cols, choice.kernel->name, choice.reason);
    static std::mutex mutex;
    static std::set<std::string> seen;
    const std::lock_guard lock(mutex);
    if (seen.insert(line).second) std::fputs(line, stderr);
}

}  // namespace ts
