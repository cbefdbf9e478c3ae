#include "sm80/select.h"

#include <algorithm>
#include <cmath>

#include "common/estimate.h"
#include "common/token_groups.h"

namespace ts::sm80 {
namespace {

constexpr double kRate = 2.67e6;  // bytes of memory in a microsecond

// float32 takes so many times as long as 16 bits, measured in blocks of 32 and 64.
double precision_factor(const Problem& problem) {
    if (problem.input_dtype != DType::float32) return 1;
    const bool tf32 = problem.precision == Precision::tf32;
    return problem.op == Op::sdd_tn ? (tf32 ? 2.6 : 4.3) : (tf32 ? 3.2 : 5.4);
}

// Picoseconds of a multiprocessor for a product of one token and one feature with another, by block rows.
struct SddTime {
    double products;  // of those that are present
    double columns;   // of those in columns in which one of 128 features has a block
    double all;       // present or not
};

SddTime sdd_time(int32_t block_rows) {
    switch (block_rows) {
        case 16:
            return {0.11, 0.85, 0.08};
        case 32:
            return {0.85, 0.50, 0};
        case 64:
            return {0.99, 0, 0};
        default:
            return {0.66, 0, 0};
    }
}

// Of decode kernels, for several chunks of them.
double chunks_time(const Problem& problem, const Device& device) {
    constexpr double kBegin = 7, kWhole = 0.43;
    const int32_t rows = std::min(problem.row_block(), 64);            // that a CTA computes
    const double of_product = rows < 32 ? 3.7 : rows < 64 ? 1.38 : 1;  // picoseconds of a multiprocessor
    const double of_result = rows < 64 ? 295 : 248;
    const double chunks = divide_up(static_cast<double>(problem.tokens), kChunk);
    const double ctas = chunks * static_cast<double>(problem.features()) / rows;
    const double products = problem.pattern.density() * static_cast<double>(problem.k_size());
    const double of_cta = 1e-6 * kChunk * rows * (of_product * products + of_result);
    const double work = rounds(ctas, multiprocessors(device), kWhole) * of_cta;
    return kBegin + std::hypot(work, memory_time(problem, kRate));
}

// What a product in 8 bits is like in 16. int8 moves the bytes and takes the instructions of half of k;
// copies of 16 bytes each do not care how many of them a block has in a line. float8 is multiplied as halves.
Problem in_16_bits(const Problem& problem) {
    Problem result = problem;
    result.input_dtype = result.values.dtype = DType::float16;
    if (problem.input_dtype != DType::int8) return result;
    result.pattern.in_features /= 2;
    result.pattern.nnz /= 2;
    return result;
}

// What decode kernels have to do for a grouped product: they read the values of groups with tokens, for as
// many tokens as one of these has.
Problem of_busy_groups(Problem problem) {
    Pattern& pattern = problem.pattern;
    const int64_t groups = pattern.groups, busy = busy_groups(problem);
    pattern.out_features = pattern.out_features / groups * (problem.forward() ? busy : 1);
    pattern.in_features *= problem.forward() ? 1 : busy;
    pattern.nnz = pattern.nnz * busy / groups;
    pattern.groups = 1;
    problem.tokens = tokens_of_group(problem);
    problem.offsets = nullptr;
    return problem;
}

}  // namespace

// Blocks narrower than the 64 features of a large tile's warp break its products into short runs, whose
// latency the more numerous warps of a small tile hide better.
double estimate_dds(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr double kConversion = 1.3;  // of float8 to halves, by the instructions it takes
    if (problem.grouped()) {
        const Problem one = of_one_weight(problem, kernel.tile_tokens);
        return std::hypot(estimate_dds(kernel, one, device), stored_bytes(problem) / kRate);
    }
    if (is_quantized(problem.input_dtype)) {
        const double factor = problem.input_dtype == DType::float8_e4m3fn ? kConversion : 1;
        return factor * estimate_dds(kernel, in_16_bits(problem), device);
    }
    constexpr double kShortRuns = 1.33, kCompressed = 0.67;  // of 2:4
    const double runs = problem.row_block() < 64 && kernel.tile_tokens > 128 ? kShortRuns : 1;
    const double storage = problem.values.is_compressed() ? kCompressed : 1;
    const double share = runs * storage * precision_factor(problem);
    return is_medium_batch(problem, device) ? dds_time_of_tiles(kernel, problem, device, share, 1)
                                            : dds_time(kernel, problem, device, share, 1);
}

// Tiles hold several block rows: wide ones share loads between the many rows of the smallest blocks and fit
// the largest; between, half of a wide tile idles.
double estimate_sdd(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (problem.grouped()) {
        constexpr int kStepTokens = 64;
        constexpr double kTiles = 1.6;  // those of a group begin and end by themselves
        const Problem one = of_one_weight(problem, kStepTokens);
        return kTiles * std::hypot(estimate_sdd(kernel, one, device), stored_bytes(problem) / kRate);
    }
    constexpr double kOtherTile = 1.15, kByte = 0.4, kLaterStart = 1;  // later than those with TMA
    const Pattern& pattern = problem.pattern;
    const int32_t block_rows = pattern.block_rows;
    const double density = pattern.density();
    const SddTime time = sdd_time(block_rows);
    const double product =
        time.products * density + time.columns * present(density, 128 / block_rows) + time.all;
    const double work =
        problem_size(problem) * product / multiprocessors(device) + kByte * activation_bytes(problem);
    const int32_t best_features = block_rows == 32 || block_rows == 64 ? 64 : 128;
    const double tile = kernel.tile_features == best_features ? 1 : kOtherTile;
    return kStart + tile * (kLaterStart + 1e-6 * precision_factor(problem) * work);
}

double estimate_decode(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (problem.grouped()) return estimate_decode(kernel, of_busy_groups(problem), device);
    if (is_medium_batch(problem, device)) return chunks_time(problem, device);
    return kStart + std::hypot(streaming_time(problem, device), shared_time(problem, device));
}

// Nothing was measured where these are the best kernels for 16 bits.
std::optional<double> estimate_dense(const Problem&, const Device&) { return std::nullopt; }

}  // namespace ts::sm80
