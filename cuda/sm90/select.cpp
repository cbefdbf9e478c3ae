#include "sm90/select.h"

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
    if (problem.dtype != DType::float32) return 812;
    if (problem.precision == Precision::highest) return 52;
    return problem.op == Op::sdd_tn ? 266 : 415;
}

}  // namespace

double estimate_dds(const Kernel& kernel, const Problem& problem, const Device& device) {
    return dds_time(kernel, problem, device, dds_share(kernel, problem), kCluster);
}

double estimate_dds_2_4(const Kernel& kernel, const Problem& problem, const Device& device) {
    return dds_time(kernel, problem, device, compressed_share(kernel, problem), kCluster);
}

double estimate_dds_float(const Kernel& kernel, const Problem& problem, const Device& device) {
    return dds_time(kernel, problem, device, float_share(kernel), kCluster);
}

// Of two kernels the one with short steps has more room for the weight. Packing is a part of what was fitted,
// but for few tokens and long blocks.
double estimate_narrow(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr double kDense = 0.35, kOtherSteps = 1.25;
    const bool suits = (problem.pattern.density() > kDense) == (kernel.plan.step == 64);
    const double share = small_block_cost(problem) / dds_cost(problem) * (suits ? 1 : kOtherSteps);
    const double time = dds_time(kernel, problem, device, share, kCluster);
    constexpr double kByte = 1 / 4e6;
    const bool packs = has_few_tokens(problem) && has_long_blocks(problem);
    return packs ? time + 2 * kByte * value_bytes(problem) : time;
}

double estimate_sdd(const Kernel&, const Problem& problem, const Device& device) {
    const int32_t block_rows = problem.pattern.block_rows;
    const SddTime time = sdd_time(block_rows);
    const double rows = time.features / block_rows;
    const double product = time.columns * present(problem.pattern.density(), rows) + time.all;
    const double products = problem_size(problem) * product / multiprocessors(device);
    return kStart + 1e-6 * (products + time.byte * activation_bytes(problem));
}

// Shared memory brings blocks one by one, and tiles have more units for a block the fewer there are.
double estimate_sdd_narrow(const Kernel&, const Problem& problem, const Device& device) {
    const double density = problem.pattern.density();
    const double product = 0.66 * density + 0.118 * std::sqrt(density);
    const double products = problem_size(problem) * product / multiprocessors(device);
    return kStart + 1e-6 * (products + 0.3 * activation_bytes(problem));
}

// cuBLAS is bound by products, by memory, or by both in turn; beside it, W is filled with zeros and the
// blocks are copied (of sdd: the whole W is computed and its blocks are copied).
std::optional<double> estimate_dense(const Problem& problem, const Device& device) {
    if (device.compute_capability != 90 || problem.dtype == DType::float64) return std::nullopt;
    constexpr double kCopyStart = 5, kByte = 1 / 3.8e6;
    const Pattern& pattern = problem.pattern;
    const double weight_bytes = static_cast<double>(pattern.out_features) *
                                static_cast<double>(pattern.in_features) * element_size(problem.dtype);
    const double products = 2e-6 * problem_size(problem) / dense_rate(problem);
    const double memory = kByte * (weight_bytes + activation_bytes(problem));
    const double copies = kCopyStart + kByte * (weight_bytes + 2 * value_bytes(problem));
    return kStart + std::hypot(products, memory) + copies;
}

}  // namespace ts::sm90
