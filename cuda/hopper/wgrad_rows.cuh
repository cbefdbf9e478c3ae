// The host side of wgrad.cuh, and its rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "hopper/launch.cuh"
#include "hopper/select.h"
#include "hopper/wgrad.cuh"
#include "tma/launch.cuh"
#include "tma/sdd_launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// The host side of the sdd kernel.

// Lines of 128 bytes that the plan has at least.
template <class Traits>
int plan_lines(const Pattern& pattern) {
    const int64_t tiles = (pattern.value_count() + Traits::kTileValues - 1) / Traits::kTileValues;
    const int units = 2 * Traits::kWindow / strip_unit(pattern);
    const int64_t words = tiles * (4 + 2 * units);  // of tiles, units and slots
    return static_cast<int>(std::min<int64_t>((sizeof(PlanHeader) + 4 * words) / 128, 4096));
}

// Row-major: tokens are rows of `width` features. Column-major: features are rows of 64 tokens.
template <class Traits>
Operand describe_operand(const Matrix& matrix, int width) {
    const bool row_major = matrix.layout == Layout::row_major;
    Operand result =
        row_major ? operand(2 * width, width * Traits::kFeatureBytes) : operand(2 * Traits::kStep, 0);
    for (int i = 0; i < 4; ++i)
        result.step[i] = static_cast<uint32_t>(16 * i * (row_major ? 2 * width : 2) / 16);
    return result;
}

// Arguments of grouped products, too.
template <class Traits>
void describe_plan(SddArguments& arguments, const Problem& problem, const PlanShape& shape) {
    const Pattern& pattern = problem.pattern;
    const int unit = strip_unit(pattern);
    arguments.plan = static_cast<const PlanHeader*>(problem.plan);
    arguments.plan_key = plan_key(pattern, problem.op, shape);
    arguments.plan_report = problem.plan_report;
    arguments.values = problem.values.data;
    arguments.y_operand = describe_operand<Traits>(problem.y, Traits::kStrip);
    arguments.x_operand = describe_operand<Traits>(problem.x, unit);
    arguments.plan_lines = plan_lines<Traits>(pattern);
    arguments.unit_shift = log2_of_block(unit);
    arguments.row_shift = log2_of_block(pattern.block_rows);
    arguments.col_shift = log2_of_block(pattern.block_cols);
    arguments.accumulate = problem.accumulate;
}

inline cudaError_t map_blocks(SddArguments& arguments, const Problem& problem, int unit) {
    const int64_t lines = problem.pattern.nnz * kWideBlock;
    return encode(arguments.blocks, problem.result_dtype, problem.values.data,
                  {{kWideBlock, 1, unit}, {lines, kWideBlock, unit}});
}

// One row of the registry.
template <class Math>
struct Sdd {
    using Traits = SddTraits<Math>;
    using WideTraits = SddTraits<WithResult<Math, float>>;
    static constexpr PlanShape kPlan = {Traits::kStrip, Traits::kWindow, Traits::kHalves, PlanKind::strips};

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Traits::kSharedBytes, 1)) return reason;
        return sdd_fits(problem, device) ? nullptr : "so many tokens are out of its reach";
    }

    // Counters of the pace and partial sums, and behind them the sums of y.
    static size_t workspace_size(const Problem& problem, const Device& device, const Decision& decision) {
        if (problem.pattern.nnz == 0) return 0;
        return sdd_bytes(is_paced(problem, device), most_split(problem, device) > 0, device, kTileValues) +
               (decision.sums_y ? sums::partial_bytes(problem, sum_warps(device)) : 0);
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision& decision,
                          void* workspace, void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        SddArguments arguments{};
        if (const cudaError_t error = describe(arguments, problem, device)) return error;
        if (const cudaError_t error = use_memory(arguments, workspace, is_paced(problem, device), stream))
            return error;
        const auto start = problem.result_dtype == Math::kResult ? start_for<Traits> : start_for<WideTraits>;
        if (!decision.sums_y) return start(arguments, problem, device, stream);
        const size_t before =
            sdd_bytes(arguments.pace != nullptr, arguments.most_split > 0, device, kTileValues);
        void* const partial = static_cast<char*>(workspace) + before;
        arguments.sums = sums::share(problem, sum_warps(device), partial);
        if (const cudaError_t error = start(arguments, problem, device, stream)) return error;
        return sums::add_partial(problem, arguments.sums, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<Sdd>(name, "sm90_sdd");
        row.ops = bits_of(Op::sdd_tn);
        row.input_dtypes = bits_of(Math::kInput);
        row.result_dtypes = bits_of(Math::kResult, DType::float32);
        row.tile_features = Traits::kHalves * Traits::kStrip;
        row.united_features = Traits::kStrip;
        row.tile_values = Traits::kTileValues;
        row.step_time = Traits::kStepTime;
        row.decide = decide_sdd;
        return row;
    }

  private:
    static constexpr int64_t kTileValues = Traits::kTileValues;

    static int64_t sum_warps(const Device& device) {
        return int64_t{Traits::kSumWarps} * device.multiprocessors;
    }

    static int team_size(const Problem& problem, const Device& device) {
        const bool pairs = device.multiprocessors > 1 && device.max_cluster != 1;
        return are_wide_blocks(problem.pattern) && pairs ? 2 : 1;
    }

    // The number of tiles of wide blocks is nearly known: most are in pairs.
    static int most_split(const Problem& problem, const Device& device) {
        constexpr int kSpareTiles = 4;
        const Pattern& pattern = problem.pattern;
        const bool pairs = are_wide_blocks(pattern);
        const double fewest = static_cast<double>(pattern.value_count()) / static_cast<double>(kTileValues);
        const double most = pairs ? fewest + kSpareTiles : kMostTiles * strip_tiles(pattern);
        const int team = team_size(problem, device);
        return tma::most_split(fewest, most, sdd_steps(problem), device.multiprocessors / team, team,
                               Traits::kStepTime);
    }

    // True where tiles come one after another quickly: storing the results of one would keep the next
    // waiting. Where they take longer, or come alone, a fourth stage is worth more.
    static bool stages_results(const Problem& problem, const Device& device) {
        constexpr int kMostSteps = 12;
        return stages_last(problem) && sdd_steps(problem) <= kMostSteps &&
               fills(problem, device, kTileValues);
    }
    static bool stages_last(const Problem& problem) {
        return are_wide_blocks(problem.pattern) && !problem.accumulate &&
               problem.result_dtype == Math::kResult;
    }

    // Only where there is a round of tiles that are not split. Wide blocks have no use for it.
    static bool is_paced(const Problem& problem, const Device& device) {
        const Pattern& pattern = problem.pattern;
        return sdd_steps(problem) >= kMinPacedSteps && !are_wide_blocks(pattern) &&
               strip_tiles(pattern) >= device.multiprocessors;
    }

    // The kernel, and the one that adds partial sums, for one dtype of results.
    template <class OfResult>
    static cudaError_t start_for(const SddArguments& arguments, const Problem& problem, const Device& device,
                                 void* stream) {
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        const auto start =
            row_major_y ? (row_major_x ? start_on<OfResult, true, true> : start_on<OfResult, true, false>)
                        : (row_major_x ? start_on<OfResult, false, true> : start_on<OfResult, false, false>);
        if (const cudaError_t error = start(arguments, device, stream)) return error;
        if (arguments.most_split == 0) return cudaSuccess;
        const int ctas = 16 * arguments.most_split;
        return launch_early<sdd_reduce<OfResult>, 0>(arguments, ctas, 128, stream);
    }

    template <class OfResult, bool kRowMajorY, bool kRowMajorX>
    static cudaError_t start_on(const SddArguments& arguments, const Device& device, void* stream) {
        return ClusterLauncher<sdd_kernel<OfResult, kRowMajorY, kRowMajorX>, SddArguments>::launch(
            arguments, device, arguments.teams, arguments.team_size, Traits::kThreads, Traits::kSharedBytes,
            stream, false);
    }

    static cudaError_t describe(SddArguments& arguments, const Problem& problem, const Device& device) {
        const Pattern& pattern = problem.pattern;
        const int unit = strip_unit(pattern);
        describe_plan<Traits>(arguments, problem, kPlan);
        arguments.steps = sdd_steps(problem);
        arguments.team_size = team_size(problem, device);
        arguments.teams = device.multiprocessors / arguments.team_size;
        arguments.most_split = most_split(problem, device);
        arguments.stages_results = stages_results(problem, device);
        arguments.stages_last = stages_last(problem);
        if (arguments.stages_last)
            if (const cudaError_t error = map_blocks(arguments, problem, unit)) return error;
        if (problem.tokens == 0) return cudaSuccess;  // nothing is loaded
        if (const cudaError_t error =
                map(arguments.y, problem, problem.y, pattern.out_features, Traits::kStrip))
            return error;
        return map(arguments.x, problem, problem.x, pattern.in_features, unit);
    }

    static cudaError_t map(CUtensorMap& map, const Problem& problem, const Matrix& matrix, int64_t features,
                           int width) {
        const bool row_major = matrix.layout == Layout::row_major;
        // Lines beside a line may not be needed before they leave L2 again.
        const auto promotion =
            row_major && width == 32 ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
        if (row_major)
            return encode(map, problem.input_dtype, matrix.data,
                          {{features, 1, width}, {problem.tokens, matrix.ld, Traits::kStep}}, promotion);
        return encode(map, problem.input_dtype, matrix.data,
                      {{problem.tokens, 1, Traits::kStep}, {features, matrix.ld, width}}, promotion);
    }
};

// The host side of the sdd kernel of grouped products.

// One row of the registry.
template <class Math>
struct GroupedSdd {
    using Traits = SddTraits<Math, true>;
    using WideTraits = SddTraits<WithResult<Math, float>, true>;
    static constexpr PlanShape kPlan = Sdd<Math>::kPlan;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Traits::kSharedBytes, 1)) return reason;
        if (problem.pattern.groups > groups::kMaxGroups) return "it knows 1024 groups at most";
        if (problem.pattern.group_out_features() % Traits::kStrip != 0)
            return "weights of groups must have a multiple of 64 output features";
        if (problem.y.layout != Layout::row_major || problem.x.layout != Layout::row_major)
            return "it reads row-major activations of groups only";
        return problem.tokens < INT32_MAX - Traits::kStep ? nullptr : "so many tokens are out of its reach";
    }

    static size_t workspace_size(const Problem& problem, const Device&, const Decision&) {
        return problem.pattern.nnz == 0 ? 0 : groups::bytes_of(problem.pattern.groups);
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void* workspace,
                          void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        SddArguments arguments{};
        if (const cudaError_t error = describe(arguments, problem)) return error;
        if (const int32_t error = groups::list(arguments.groups, problem, Traits::kStep,
                                               {arguments.plan, arguments.plan_key, arguments.plan_report}, 0,
                                               workspace, stream))
            return error;
        const auto start = problem.result_dtype == Math::kResult
                               ? ClusterLauncher<sdd_grouped_kernel<Traits>, SddArguments>::launch
                               : ClusterLauncher<sdd_grouped_kernel<WideTraits>, SddArguments>::launch;
        return start(arguments, device, device.multiprocessors, 1, Traits::kThreads, Traits::kSharedBytes,
                     stream, false);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<GroupedSdd>(name, "sm90_grouped_sdd");
        row.ops = bits_of(Op::sdd_tn);
        row.input_dtypes = bits_of(Math::kInput);
        row.result_dtypes = bits_of(Math::kResult, DType::float32);
        row.tile_features = Traits::kHalves * Traits::kStrip;
        row.grouped = bits_of(1);
        row.united_features = Traits::kStrip;
        row.tile_values = Traits::kTileValues;
        return row;
    }

  private:
    static cudaError_t describe(SddArguments& arguments, const Problem& problem) {
        const Pattern& pattern = problem.pattern;
        const int unit = strip_unit(pattern);
        describe_plan<Traits>(arguments, problem, kPlan);
        arguments.team_size = 1;
        arguments.group_features = static_cast<int>(pattern.group_out_features());
        arguments.stages_results = stages_results(problem);
        if (arguments.stages_results)
            if (const cudaError_t error = map_blocks(arguments, problem, unit)) return error;
        if (problem.tokens == 0) return cudaSuccess;  // nothing is loaded
        if (const cudaError_t error =
                encode_ranges(arguments.y, problem.input_dtype, problem.y, pattern.group_out_features(),
                              Traits::kStrip, Traits::kStep))
            return error;
        return encode_ranges(arguments.x, problem.input_dtype, problem.x, pattern.in_features, unit,
                             Traits::kStep);
    }

    // True where tiles come one after another quickly, see Sdd::stages_results.
    static bool stages_results(const Problem& problem) {
        constexpr int64_t kMostSteps = 12;
        return are_wide_blocks(problem.pattern) && !problem.accumulate &&
               problem.result_dtype == Math::kResult &&
               problem.tokens <= kMostSteps * Traits::kStep * problem.pattern.groups;
    }
};

}  // namespace ts::sm90

// Wgrad: the gradient of the block-sparse weight (sm_90, wgmma SS).
//   W[n,k] (+)= sum over tokens t of Y[t,n] * X[t,k], for the kept blocks only, in their slots.
// Operands: Y and X row- or column-major, bf16 or fp16, through TMA; W in their dtype or float32.
//   stage   [strips and then units of a tile], each row-major [64 tokens][width], else [width][64 tokens]
// CTA: a tile of two halves, one for each of two warpgroups: a strip of 64 features of Y, the rows of
// wgmma, by 256 gathered features of X, in units of 32 or 64. The plan chose halves that have many units
// in common, so that few bytes are loaded for what is multiplied (common/strip_plan.h). Blocks smaller
// than a strip by a unit are rounded up to it; sums that belong to no block are not stored. A tile of
// blocks of 128 x 128 is two of them; for two of a column Y and X change places in the tile, whose sums
// are then transposed.
// Cluster: 1 CTA, or 2 for blocks of 128 x 128, which load strips that both need once.
// Warps: 1 loads, 3 sum up Y for the gradient of the bias (Decision::sums_y), 8 multiply and store.
// Loop over tokens: steps of 64, in a ring of 3 stages of large tiles or 4 of small ones.
// Split: tiles of the last round are cut over the tokens where that pays (common/sdd_schedule.h); a second
// kernel adds the sums.
// Chosen where its estimate is least.
//
// A small batch leaves little time to begin and to end: what is read one thing after another is fetched
// ahead, and TMA stores the results of one tile while the next is computed.
#define TS_ROW_sdd(name, math) TS_SM90_ROW(name, Sdd<math>)

// Grouped wgrad (sm_90): sdd for groups of tokens, each of which has a weight of its own.
//   W_g[n,k] (+)= sum over the tokens t of group g of Y[t,n] * X[t,k], for the kept blocks only.
// A tile has blocks of one weight and sums up the tokens of its group: the last step of a group reads zeros
// in place of the tokens of the next, in both operands (encode_ranges). Tiles are not split over the tokens.
// CTAs take one after another, those of the groups with most tokens first (elementwise/groups.h). Y and X are
// row-major.
#define TS_ROW_sdd_grouped(name, math) TS_SM90_ROW(name, GroupedSdd<math>)
