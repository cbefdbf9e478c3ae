// The host side of the sdd kernel.
#pragma once

#include <algorithm>
#include <cmath>

#include "sm90/launch.cuh"
#include "sm90/sdd_kernel.cuh"
#include "sm90/select.h"
#include "tma/launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

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
        return bytes_of_splits(problem, device) +
               (decision.sums_y ? sums::partial_bytes(problem, sum_warps(device)) : 0);
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision& decision,
                          void* workspace, void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        SddArguments arguments{};
        if (const cudaError_t error = describe(arguments, problem, device)) return error;
        if (arguments.may_split) {
            const bool paced = is_paced(problem, device);
            if (const cudaError_t error = use_split_memory(arguments, workspace, paced, stream)) return error;
        }
        const auto start = problem.result_dtype == Math::kResult ? start_for<Traits> : start_for<WideTraits>;
        if (!decision.sums_y) return start(arguments, problem, device, stream);
        void* const partial = static_cast<char*>(workspace) + bytes_of_splits(problem, device);
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
        row.decide = decide_sdd;
        return row;
    }

  private:
    static constexpr int64_t kTileValues = Traits::kTileValues;

    static size_t bytes_of_splits(const Problem& problem, const Device& device) {
        return may_split(problem, device) ? split_bytes(device, kTileValues) : 0;
    }

    static int64_t sum_warps(const Device& device) {
        return int64_t{Traits::kSumWarps} * device.multiprocessors;
    }

    static int team_size(const Problem& problem, const Device& device) {
        const bool pairs = device.multiprocessors > 1 && device.max_cluster != 1;
        return are_wide_blocks(problem.pattern) && pairs ? 2 : 1;
    }

    // The number of tiles is on the device. That of wide blocks is nearly known, though: most are in pairs.
    // If it would not be split, there is no need to launch a second kernel that finds nothing to do.
    static bool may_split(const Problem& problem, const Device& device) {
        constexpr int kSpareTiles = 4;
        const int steps = sdd_steps(problem), team = team_size(problem, device);
        if (!are_wide_blocks(problem.pattern)) return steps >= kMinSplitSteps;
        const auto pairs = static_cast<int>((problem.pattern.nnz + 1) / 2);
        for (int tiles = pairs; tiles <= pairs + kSpareTiles; ++tiles)
            if (SddSchedule(tiles, steps, device.multiprocessors / team, team, true).is_split()) return true;
        return false;
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

    // Only where there is a round of tiles that are not split. Wide blocks have no use for it. A row of tiles
    // has the columns of all block rows of a strip, about as many as of a random pattern.
    static bool is_paced(const Problem& problem, const Device& device) {
        const Pattern& pattern = problem.pattern;
        const double rows = std::max(1, Traits::kStrip / pattern.block_rows);
        const double columns = (1 - std::pow(1 - pattern.density(), rows)) * pattern.in_features;
        const double tiles = columns * static_cast<double>(pattern.out_features) / kTileValues;
        return !are_wide_blocks(pattern) && tiles >= device.multiprocessors;
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
        if (!arguments.may_split) return cudaSuccess;
        const int ctas = 16 * arguments.teams * arguments.team_size;
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
        arguments.may_split = may_split(problem, device);
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

}  // namespace ts::sm90
