// Microseconds that kernels take, as far as the estimates of several families share them: kernels of all
// architectures that compute one product compare by these. Host code. What is fitted was measured on an H200;
// benchmarks/check_estimates.py says how well it fits.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/problem.h"

namespace ts {

constexpr double kStart = 10;  // of a launch, its first loads and its last stores

// The share of the columns of a random pattern in which at least one of some block rows has a block.
inline double present(double density, double rows) { return 1 - std::pow(1 - density, std::max(1.0, rows)); }

inline double divide_up(double a, double b) { return std::ceil(a / b); }

// Of pieces of work that each of the workers takes one after another. A last round in which workers are idle
// takes less, but for its share `whole`: the others have more of memory and of power.
inline double rounds(double pieces, double workers, double whole) {
    const double all = pieces / workers;
    return whole * std::ceil(all) + (1 - whole) * all;
}

inline double multiprocessors(const Device& device) { return std::max(device.multiprocessors, 1); }

// Products of one token and one feature with another, of a dense weight.
inline double problem_size(const Problem& problem) {
    const Pattern& pattern = problem.pattern;
    return static_cast<double>(problem.tokens) * static_cast<double>(pattern.out_features) *
           static_cast<double>(pattern.in_features);
}

inline double activation_bytes(const Problem& problem) {
    const Pattern& pattern = problem.pattern;
    const double bytes_of_token =
        static_cast<double>(pattern.out_features) * element_size(problem.y_dtype()) +
        static_cast<double>(pattern.in_features) * element_size(problem.x_dtype());
    return static_cast<double>(problem.tokens) * bytes_of_token;
}

inline double value_bytes(const Problem& problem) {
    return static_cast<double>(problem.pattern.value_count()) * element_size(problem.values.dtype);
}

// With what belongs to them.
inline double stored_bytes(const Problem& problem) {
    const Values& values = problem.values;
    const Pattern& pattern = problem.pattern;
    return static_cast<double>(values.bytes(pattern) + values.metadata_bytes(pattern) +
                               values.scale_bytes(pattern));
}

// --- dds: tiles ---

// Waves of the tiles over the device's multiprocessors, each tile counted as its results and, weighted, the
// operands that it brings in. So many multiprocessors compute a tile together.
inline double dds_work(const Kernel& kernel, const Problem& problem, const Device& device, int cluster) {
    constexpr double kOperandWeight = 64;
    const auto features = static_cast<double>(problem.features());
    const double columns = divide_up(features, kernel.tile_features);
    const double tiles = divide_up(static_cast<double>(problem.tokens), kernel.tile_tokens) * columns;
    // Evenly dealt, but a tile of aligned steps takes as long where features do not fill it.
    const bool aligned = kernel.plan.kind == PlanKind::aligned;
    const double tile_features = aligned ? kernel.tile_features : divide_up(features, std::max(columns, 1.0));
    const double tile_work =
        kernel.tile_tokens * tile_features + kOperandWeight * (kernel.tile_tokens + tile_features);
    const double work = divide_up(tiles * cluster, multiprocessors(device)) * tile_work / cluster;
    const int64_t parts =
        kernel.splits ? part_count(problem, static_cast<int64_t>(tiles), device.multiprocessors / cluster)
                      : 1;
    return parts == 1 ? work : work * std::min(1.0, split_time(dds_steps(problem, kernel.plan.step), parts));
}

// A grouped product as a product of one weight, which each token meets once: of as many tokens as spans have
// room for if groups are about equally large, so that each group's last span is filled by half.
inline Problem of_one_weight(Problem problem, int span_tokens) {
    const double groups = problem.pattern.groups, mean = static_cast<double>(problem.tokens) / groups;
    const double spans = groups * std::max(std::min(mean, 1.0), mean / span_tokens + 0.5);
    problem.tokens = static_cast<int64_t>(spans * span_tokens);
    problem.pattern.out_features /= problem.pattern.groups;
    problem.pattern.nnz /= problem.pattern.groups;
    problem.pattern.groups = 1;
    problem.offsets = nullptr;
    return problem;
}

inline bool has_small_blocks(const Problem& problem) {
    return problem.pattern.block_rows == problem.pattern.block_cols && problem.pattern.block_rows <= 32;
}

// Whether there are kernels made for the blocks: of 16 x 16 and 32 x 32, or longer along k.
inline bool has_narrow_blocks(const Problem& problem) {
    return problem.row_block() <= 32 && problem.row_block() <= problem.k_block();
}

inline bool has_long_blocks(const Problem& problem) {
    return has_narrow_blocks(problem) && !has_small_blocks(problem);
}

// Picoseconds that dds_work is multiplied by for these kernels. They take long blocks as several square ones.
inline double small_block_cost(const Problem& problem) {
    const double density = problem.pattern.density();
    const auto k = static_cast<double>(problem.k_size());
    const double step = has_long_blocks(problem) ? 0.045 : 0.060;
    if (problem.row_block() == 16) return k * (0.148 * density + 0.056 * present(density, 4) + step) + 28;
    return k * (0.198 * density + 0.032 * present(density, 2) + 0.045) + 23;
}

// How much less that is than in the kernels that walk columns. Those for small blocks multiply where one of
// the block rows of 64 features has a block, the others walk the columns in which one of 128 features has
// one.
inline double small_block_share(const Problem& problem) {
    if (problem.row_block() == 16) return 0.4;
    const double density = problem.pattern.density(), k = 1e-3 * static_cast<double>(problem.k_size());
    const double by_products = 0.92 * ((0.5 + 2.1 * present(density, 2)) * k + 0.3);
    const double by_columns = 2.8 * present(density, 4) * k + 0.3;
    return 0.75 * by_products / by_columns;
}

// Likewise, of long blocks for the kernels that walk columns. Values in lines of 16 take twice as many copies
// as those of 32 do.
inline double long_block_cost(const Problem& problem) {
    constexpr double kThinLine = 1.9;
    const double density = problem.pattern.density();
    const auto k = static_cast<double>(problem.k_size());
    if (problem.row_block() == 32) return 0.15 * present(density, 4) * k + 10;
    const double line = problem.forward() ? 1 : kThinLine;
    const double length = problem.k_block() == 32 ? 1.7 : problem.k_block() == 64 ? 1 : 0.85;
    return line * length * (k * (0.18 * density + 0.095 * present(density, 8) + 0.004) + 5);
}

constexpr double kColumnShare = 0.75;  // of dds_cost, that these kernels take

// Picoseconds that dds_work is multiplied by for a kernel with a share of 1: one of mma.sync. Slabs of 16 k
// take twice as many copies as those of 32 do.
inline double dds_cost(const Problem& problem) {
    constexpr double kThinSlab = 1.9;
    if (has_long_blocks(problem)) return long_block_cost(problem) / kColumnShare;
    const double density = problem.pattern.density();
    const auto k = static_cast<double>(problem.k_size());
    const bool thin = problem.k_block() <= 16 && problem.input().layout == Layout::row_major;
    const double slab = thin ? kThinSlab : 1;
    switch (problem.row_block()) {
        case 16:
            return small_block_cost(problem) / small_block_share(problem);
        case 32:
            return slab * small_block_cost(problem) / small_block_share(problem);
        case 64:
            return slab * (k * (0.230 * density + 0.169 * present(density, 2) + 0.007) + 42);
        default:
            return slab * (k * (0.427 * density + 0.010) + 49);
    }
}

// The least share of the kernels for the newest architecture.
inline double least_share(const Problem& problem) {
    if (has_small_blocks(problem)) return small_block_share(problem);
    if (has_long_blocks(problem))
        return std::min(kColumnShare, small_block_cost(problem) / dds_cost(problem));
    const bool large = problem.row_block() == 128 || (problem.row_block() == 64 && problem.k_block() >= 64);
    return large ? 0.46 : kColumnShare;
}

// --- dds for decode and small batches ---

// Decode kernels read the values once for every chunk of tokens, and the activations anew for
// each block row.
constexpr int64_t kChunk = 64;

// Up to so many tokens, what a kernel takes follows less from its tile than from where it has to be.
inline bool is_small_batch(const Problem& problem) {
    return problem.tokens <= 1024 && problem.input_dtype != DType::float32;
}

// Up to so many, but more than decode kernels take at a time: where all depends on rounds of tiles,
// on steps and on what comes before and after them. Fitted to 920 cases of 128 to 6144 tokens with plain
// values.
inline bool is_medium_batch(const Problem& problem, const Device& device) {
    constexpr int64_t kMost = 6144;
    return device.compute_capability == 90 && problem.input_dtype != DType::float32 &&
           problem.tokens > kChunk && problem.tokens <= kMost && !problem.values.is_compressed() &&
           !has_long_blocks(problem);
}

// Of reading all operands, and of writing results, at so many bytes a microsecond.
inline double memory_time(const Problem& problem, double rate) {
    return (stored_bytes(problem) + activation_bytes(problem)) / rate;
}

// Of decode kernels, beside what all have to do. What makes weights of 8 bits takes as long
// as products do.
inline double streaming_time(const Problem& problem, const Device& device) {
    const int32_t rows = problem.row_block();
    const auto values = static_cast<double>(problem.pattern.value_count());
    if (problem.tokens <= kChunk) {
        constexpr double kByte = 0.25e-6;
        const double picoseconds = rows < 32 ? 3.1 : rows < 64 ? 0.8 : 0.5;  // of a multiprocessor's product
        const double weights = is_quantized(problem.values.dtype) ? 2 : 1;
        const double products = weights * static_cast<double>(problem.tokens) * values;
        return kByte * stored_bytes(problem) + 1e-6 * picoseconds * products / multiprocessors(device);
    }
    const double picoseconds = rows < 32 ? 4.0 : rows < 64 ? 1.74 : 1.45;
    const double tokens = divide_up(static_cast<double>(problem.tokens), kChunk) * kChunk;
    const double share = problem.values.is_compressed() ? 0.8 : 1;
    return 1e-6 * picoseconds * share * tokens * values / multiprocessors(device);
}

// Of the others, likewise: they walk what several rows have in common; where tiles are few they take as long
// as one tile does, less where there are so few that sums are cut into parts.
inline double walking_time(const Problem& problem) {
    const double columns = present(problem.pattern.density(), std::max(2, 128 / problem.row_block()));
    const double tiles = divide_up(static_cast<double>(problem.tokens), 128) *
                         divide_up(static_cast<double>(problem.features()), 512);
    const double factor = tiles > 16 ? 1.0 : tiles > 8 ? 0.85 : 0.62;
    return factor * 7e-3 * static_cast<double>(problem.k_size()) * columns;
}

// What all of them have to do, were every multiprocessor busy all the time: 1.6 for the operands.
inline double shared_time(const Problem& problem, const Device& device) {
    const double results = static_cast<double>(problem.tokens) * static_cast<double>(problem.features());
    return 1e-6 * dds_cost(problem) * least_share(problem) * 1.6 * results / multiprocessors(device);
}

// --- dds ---

// Of long blocks, how many times as long as the faster kind of kernels the other takes.
inline double slower_than_least(const Kernel& kernel, const Problem& problem, double share) {
    if (!has_long_blocks(problem)) return 1;
    return (kernel.plan.kind == PlanKind::aligned ? share : kColumnShare) / least_share(problem);
}

// By its tiles, of a kernel that takes a share of dds_cost.
inline double dds_time_of_tiles(const Kernel& kernel, const Problem& problem, const Device& device,
                                double share, int cluster) {
    return kStart + 1e-6 * share * dds_cost(problem) * dds_work(kernel, problem, device, cluster);
}

inline double dds_time(const Kernel& kernel, const Problem& problem, const Device& device, double share,
                       int cluster) {
    const double of_tiles = dds_time_of_tiles(kernel, problem, device, share, cluster);
    if (!is_small_batch(problem)) return of_tiles;
    constexpr double kPreference = 1e-6;  // only says which of them is best
    // Values are also loaded; with more tokens that is little.
    const double streaming = problem.tokens > kChunk ? 0 : streaming_time(problem, device);
    const double slower = slower_than_least(kernel, problem, share);
    const double time = walking_time(problem) * slower + streaming;
    const double shared = shared_time(problem, device) * slower;
    return kStart + std::hypot(time, shared) + kPreference * of_tiles;
}

}  // namespace ts
