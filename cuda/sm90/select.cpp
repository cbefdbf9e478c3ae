#include "sm90/select.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/estimate.h"

namespace ts::sm90 {
namespace {

constexpr int kCluster = 2;  // multiprocessors that compute a tile

bool shares_weight(const Kernel& kernel) { return kernel.plan.ranks == 1; }

// Half as many tokens to a CTA: more of the weight for each product, but more CTAs.
bool is_halved(const Kernel& kernel) { return kernel.tile_tokens < (shares_weight(kernel) ? 512 : 256); }

// What a kernel takes of dds_cost. wgmma is twice as fast as mma.sync, but blocks of 16 x 16 come in too many
// copies. Of large blocks it is best to share the weight between CTAs; small ones have columns in common with
// many others.
double dds_share(const Kernel& kernel, const Problem& problem) {
    const int32_t row_block = problem.row_block(), k_block = problem.k_block();
    const bool large = row_block == 128 || (row_block == 64 && k_block >= 64);
    const bool tiny = row_block + k_block <= 32;
    double share = shares_weight(kernel) ? 1.1 : 0.75;
    if (large) share = shares_weight(kernel) ? 0.46 : 0.54;
    if (tiny) share = shares_weight(kernel) ? 3.5 : 1.6;
    if (!is_halved(kernel)) return share;
    if (kernel.tile_tokens == 64) return share * 1.7;
    return share * (shares_weight(kernel) ? 1.3 : 1.08);
}

// Likewise, where values are 2:4: products take half as long, activations take as long to load as before.
double compressed_share(const Kernel& kernel, const Problem& problem) {
    const int32_t row_block = problem.row_block();
    if (row_block < 64 || problem.k_block() < 64)
        return dds_share(kernel, problem) * (problem.k_block() < 64 ? 0.97 : 0.85);
    double share = shares_weight(kernel) ? 0.35 : 0.39;
    if (row_block == 64) share = shares_weight(kernel) ? 0.44 : 0.43;
    return is_halved(kernel) ? share * 1.33 : share;
}

// Likewise of float32, whatever the blocks: a step is as wide as the narrowest of them.
double float_share(const Kernel& kernel) {
    if (kernel.precision == Precision::highest) return 2.3;
    return is_halved(kernel) ? 1.2 : 0.95;
}

// --- medium batches, see is_medium_batch ---

double pairs(const Device& device) { return std::floor(multiprocessors(device) / kCluster); }

int64_t dds_parts(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (!kernel.splits) return 1;
    const double tiles = divide_up(static_cast<double>(problem.tokens), kernel.tile_tokens) *
                         divide_up(static_cast<double>(problem.features()), kernel.tile_features);
    return part_count(problem, static_cast<int64_t>(tiles), device.multiprocessors / kCluster);
}

// A step of 64 k of a CTA's tile of so many tokens and 128 features, by the narrowest side of a block.
double dds_step_time(int tokens, int block, bool shares_weight) {
    const int place = block < 64 ? 0 : block == 64 ? 1 : 2;
    constexpr double kSharedInput[3][3] = {{0.44, 0.215, 0.265}, {0.55, 0.315, 0.435}, {0.75, 0.515, 0.645}};
    constexpr double kSharedWeight[2][3] = {{0.755, 0.325, 0.46}, {0.945, 0.515, 0.64}};
    const double time = shares_weight ? kSharedWeight[tokens > 128][place]
                                      : kSharedInput[tokens > 128 ? 2 : tokens > 64][place];
    return block <= 16 ? 3 * time : time;  // more copies
}

// Steps that a tile has in the mean, and how many more the longest one, of random patterns: as many as its
// block columns with a block, which are distributed about normally.
struct Steps {
    double mean, more;
};

Steps dds_steps_of(const Kernel& kernel, const Problem& problem) {
    constexpr double kTileFeatures = 128;  // that one CTA walks
    const double of_block = static_cast<double>(problem.k_block()) / kernel.plan.step;
    const double columns = static_cast<double>(problem.k_size()) / problem.k_block();
    const double share = present(problem.pattern.density(), kTileFeatures / problem.row_block());
    const double deviation = std::sqrt(columns * share * (1 - share));
    const double tiles = divide_up(static_cast<double>(problem.features()), kTileFeatures);
    return {of_block * columns * share, of_block * deviation * std::sqrt(2 * std::log(std::max(tiles, 1.0)))};
}

double dds_time_of_medium_batch(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr double kBegin = 7.4, kRound = 0.75, kReduction = 4.8, kRate = 3.75e6;
    constexpr double kWhole = 0.35, kLongest = 1.25;
    const double tiles = divide_up(static_cast<double>(problem.tokens), kernel.tile_tokens) *
                         divide_up(static_cast<double>(problem.features()), kernel.tile_features);
    const auto parts = static_cast<double>(dds_parts(kernel, problem, device));
    const Steps steps = dds_steps_of(kernel, problem);
    const int tokens = shares_weight(kernel) ? kernel.tile_tokens / kCluster : kernel.tile_tokens;
    const double step =
        dds_step_time(tokens, std::min(problem.row_block(), problem.k_block()), shares_weight(kernel));
    const double pieces = tiles * parts, all = std::max(divide_up(pieces, pairs(device)), 1.0);
    // In several rounds whoever had a long tile has a short one next.
    const double walked = rounds(pieces, pairs(device), kWhole) * steps.mean + kLongest * steps.more / all;
    const double work = step * walked / parts + kRound * all;
    return kBegin + std::hypot(work, memory_time(problem, kRate)) + (parts > 1 ? kReduction : 0);
}

// --- 8 bits ---

// A product of 8 bits moves the bytes of one of 16 bits with half of k, in blocks of half of k, and tensor
// cores take as long for a byte.
Problem of_16_bits(Problem problem) {
    problem.input_dtype = problem.values.dtype = DType::bfloat16;
    problem.values.scales = nullptr;
    problem.pattern.in_features /= 2;
    problem.pattern.block_cols /= 2;
    return problem;
}
Kernel of_16_bits(Kernel kernel) {
    kernel.plan.step /= 2;
    return kernel;
}

// What is promoted is added beside the products of the other warpgroup. Scales inside of the sums are read
// from shared memory, which products keep busy (measured on an H100).
double promoted_factor(const Kernel& kernel, const Problem& problem) {
    constexpr double kPromoted = 1.15, kScaled = 1.45;
    if (kernel.precision != Precision::highest || problem.input_dtype != DType::float8_e4m3fn) return 1;
    return problem.scales_inside() ? kScaled : kPromoted;
}

// --- narrow blocks ---

constexpr double kNarrowResults = 512 * 128;  // features x tokens of a tile of any kernel for them
constexpr double kNarrowFeatures = 256;       // of a CTA's tile

double narrow_tiles(const Problem& problem, const PlanShape& plan) {
    return divide_up(static_cast<double>(problem.features()), plan.tile) *
           divide_up(static_cast<double>(problem.tokens), kNarrowResults / plan.tile);
}

// Clusters of many CTAs leave some of the device's multiprocessors idle.
int64_t narrow_parts(const Problem& problem, const Device& device, const PlanShape& plan) {
    constexpr int64_t kMost = 4;  // eight CTAs
    constexpr double kFilled = 0.92;
    const auto tiles = static_cast<int64_t>(narrow_tiles(problem, plan));
    int64_t parts = std::min(part_count(problem, tiles, device.multiprocessors / kCluster), kMost);
    while (parts > 1 && static_cast<double>(tiles * parts) > kFilled * pairs(device)) --parts;
    return parts;
}

double packing_time(const Problem& problem) {
    constexpr double kLeast = 1.3, kRate = 3.3e6;
    return std::max(kLeast, 2 * value_bytes(problem) / kRate);
}

// What it takes longer to read blocks one by one than to read them packed.
double block_time(const Problem& problem, const Device& device, const PlanShape& plan) {
    constexpr double kBlock = 0.032;
    const Pattern& pattern = problem.pattern;
    const double blocks = static_cast<double>(problem.k_size()) / pattern.block_cols * kNarrowFeatures /
                          pattern.block_rows * pattern.density();
    const auto parts = static_cast<double>(narrow_parts(problem, device, plan));
    return kBlock * blocks * divide_up(narrow_tiles(problem, plan) * parts, pairs(device)) / parts;
}

bool narrow_reads_blocks(const Problem& problem, const Device& device, const PlanShape& plan) {
    const Pattern& pattern = problem.pattern;
    return problem.packed == nullptr && problem.forward() && has_small_blocks(problem) &&
           pattern.nnz * pattern.block_rows <= std::numeric_limits<int32_t>::max() &&
           block_time(problem, device, plan) < packing_time(problem);
}

double narrow_time_of_medium_batch(const Problem& problem, const Device& device, const PlanShape& plan) {
    constexpr double kBegin = 8.75, kRound = 1.6, kReduction = 5.5, kRate = 3.56e6, kWhole = 0.8;
    const bool wide = problem.row_block() == 32;
    const double density = problem.pattern.density(), k = static_cast<double>(problem.k_size());
    const double shared = plan.ranks == 1 ? 1 + 41 / k : 1;  // the weight, of which there is more
    const double step = shared * (wide ? 0.284 + 1.436 * density : 0.415 + 1.653 * density);  // of 128 k
    const auto parts = static_cast<double>(narrow_parts(problem, device, plan));
    const double pieces = narrow_tiles(problem, plan) * parts;
    const double work = step * k / 128 * rounds(pieces, pairs(device), kWhole) / parts +
                        kRound * divide_up(pieces, pairs(device));
    const double weight = problem.packed != nullptr                    ? 0
                          : narrow_reads_blocks(problem, device, plan) ? block_time(problem, device, plan)
                                                                       : packing_time(problem);
    return kBegin + std::hypot(work, memory_time(problem, kRate)) + (parts > 1 ? kReduction : 0) + weight;
}

// --- sdd and dense ---

// Picoseconds of a multiprocessor for a product of one token and one feature with another, and of a byte of x
// or y.
struct SddTime {
    double columns;  // for those in columns in which one of so many features has a block
    int32_t features;
    double all;  // present or not
    double byte;
};

SddTime sdd_time(int32_t block_rows) {
    switch (block_rows) {
        case 16:
            return {0.286, 256, 0.041, 0.22};
        case 32:
            return {0.39, 64, 0, 0.32};
        case 64:
            return {0.355, 64, 0, 0.29};
        default:
            return {0.317, 64, 0, 0.147};
    }
}

// 10^6 multiplications and additions that cuBLAS does in a microsecond of a large product.
double dense_rate(const Problem& problem) {
    if (problem.input_dtype != DType::float32) return 812;
    if (problem.precision == Precision::highest) return 52;
    return problem.op == Op::sdd_tn ? 266 : 415;
}

}  // namespace

double estimate_dds(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (is_medium_batch(problem, device)) return dds_time_of_medium_batch(kernel, problem, device);
    return dds_time(kernel, problem, device, dds_share(kernel, problem), kCluster);
}

double estimate_grouped_dds(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr double kListingGroups = 2, kRate = 3.75e6;
    // Of wide blocks, where large groups fill the tiles; measured on an H100.
    constexpr double kSharedWeight = 0.9;
    const bool wide = std::min(problem.row_block(), problem.k_block()) > 64;
    const double share = wide && shares_weight(kernel) ? kSharedWeight : 1;
    const Problem one = of_one_weight(problem, kernel.tile_tokens);
    return kListingGroups +
           std::hypot(share * dds_time_of_medium_batch(kernel, one, device), stored_bytes(problem) / kRate);
}

double estimate_dds_2_4(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (is_quantized(problem.input_dtype))
        return promoted_factor(kernel, problem) *
               estimate_dds_2_4(of_16_bits(kernel), of_16_bits(problem), device);
    return dds_time(kernel, problem, device, compressed_share(kernel, problem), kCluster);
}

double estimate_dds_8bit(const Kernel& kernel, const Problem& problem, const Device& device) {
    return promoted_factor(kernel, problem) * estimate_dds(of_16_bits(kernel), of_16_bits(problem), device);
}

double estimate_dds_float(const Kernel& kernel, const Problem& problem, const Device& device) {
    return dds_time(kernel, problem, device, float_share(kernel), kCluster);
}

Decision decide_dds(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (is_quantized(problem.input_dtype))
        return {dds_parts(of_16_bits(kernel), of_16_bits(problem), device)};
    return {dds_parts(kernel, problem, device)};
}

// Tiles of 256 x 256, which share the weight, read less than dds_work counts where there is little k, and are
// the faster ones for rows of unequal length. Packing is a part of what was fitted, but for small batches and
// long blocks.
double estimate_narrow(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (is_quantized(problem.input_dtype)) {
        constexpr double kHalfOfBytes = 0.6;  // and of products
        Problem other = problem;
        other.input_dtype = other.values.dtype = DType::bfloat16;
        other.values.scales = nullptr;
        return kHalfOfBytes * estimate_narrow(kernel, other, device);
    }
    if (is_medium_batch(problem, device)) return narrow_time_of_medium_batch(problem, device, kernel.plan);
    const double k = static_cast<double>(problem.k_size());
    const double factor = shares_weight(kernel) ? 1.06 * (1 + 50 / k) : 1;
    const double share = small_block_cost(problem) / dds_cost(problem) * factor;
    const double time = dds_time(kernel, problem, device, share, kCluster);
    const bool packs = is_small_batch(problem) && has_long_blocks(problem);
    return packs ? time + packing_time(problem) : time;
}

Decision decide_narrow(const Kernel& kernel, const Problem& problem, const Device& device) {
    return {narrow_parts(problem, device, kernel.plan), narrow_reads_blocks(problem, device, kernel.plan)};
}

double estimate_sdd(const Kernel&, const Problem& problem, const Device& device) {
    const int32_t block_rows = problem.pattern.block_rows;
    const SddTime time = sdd_time(block_rows);
    const double rows = time.features / block_rows;
    const double product = time.columns * present(problem.pattern.density(), rows) + time.all;
    const double products = problem_size(problem) * product / multiprocessors(device);
    return kStart + 1e-6 * (products + time.byte * activation_bytes(problem));
}

// Beside products, which take most of what L2 gives, the warps that load nothing read so many bytes of y in a
// microsecond (H200). Where the products take less time than that, a kernel of its own is faster.
Decision decide_sdd(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr double kBytes = 0.75e6;
    if (problem.bias_gradient.data == nullptr || problem.pattern.nnz == 0) return {};
    const double bytes = 2.0 * problem.tokens * problem.pattern.out_features;
    Decision decision;
    decision.sums_y = bytes < kBytes * estimate_sdd(kernel, problem, device);
    return decision;
}

// Shared memory brings blocks one by one, and tiles have more units for a block the fewer there are.
double estimate_grouped_sdd(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr double kListingGroups = 2, kRate = 2.3e6;  // at which values are written
    const Problem one = of_one_weight(problem, 1);
    return kListingGroups + std::hypot(estimate_sdd(kernel, one, device), stored_bytes(problem) / kRate);
}

double estimate_sdd_narrow(const Kernel&, const Problem& problem, const Device& device) {
    const double density = problem.pattern.density();
    const double product = 0.66 * density + 0.118 * std::sqrt(density);
    const double products = problem_size(problem) * product / multiprocessors(device);
    return kStart + 1e-6 * (products + 0.3 * activation_bytes(problem));
}

// cuBLAS is bound by products, by memory, or by both in turn; beside it, W is filled with zeros and the
// blocks are put into it, line by line (of sdd: the whole W is computed and its blocks are copied).
std::optional<double> estimate_dense(const Problem& problem, const Device& device) {
    if (device.compute_capability != 90 || problem.input_dtype == DType::float64) return std::nullopt;
    constexpr double kPutStart = 3, kPutByte = 2.8e-6, kCopyStart = 5, kByte = 1 / 3.8e6;
    const Pattern& pattern = problem.pattern;
    const double weight_bytes = static_cast<double>(pattern.out_features) *
                                static_cast<double>(pattern.in_features) * element_size(problem.input_dtype);
    const double products = 2e-6 * problem_size(problem) / dense_rate(problem);
    const double memory = kByte * (weight_bytes + activation_bytes(problem));
    const double copies =
        kByte * weight_bytes + (problem.op == Op::sdd_tn ? kCopyStart + 2 * kByte * value_bytes(problem)
                                                         : kPutStart + kPutByte * value_bytes(problem));
    return kStart + std::hypot(products, memory) + copies;
}

}  // namespace ts::sm90
