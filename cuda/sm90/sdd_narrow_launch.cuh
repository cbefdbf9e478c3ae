// The host side of the sdd kernel for blocks of 16 x 16.
#pragma once

#include "sm90/launch.cuh"
#include "sm90/sdd_narrow_kernel.cuh"
#include "tma/launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// One row of the registry.
template <class Math>
struct SddNarrow {
    using Traits = SddNarrowTraits<Math>;
    using WideTraits = SddNarrowTraits<WithResult<Math, float>>;
    static constexpr PlanShape kPlan = kListPlan;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Traits::kSharedBytes, 1)) return reason;
        if (!sdd_fits(problem, device)) return "so many tokens are out of its reach";
        if (Traits::kFloat &&
            (problem.x.layout != Layout::row_major || problem.y.layout != Layout::row_major))
            return "it reads row-major activations";
        return are_listed_blocks(problem.pattern) ? nullptr : "its blocks are 16 x 16";
    }

    static size_t workspace_size(const Problem& problem, const Device& device, const Decision&) {
        if (problem.pattern.nnz == 0 || !may_split(problem)) return 0;
        return split_bytes(device, kTileValues);
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void* workspace,
                          void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        SddNarrowArguments arguments{};
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.plan_key = plan_key(problem.pattern, problem.op, kListPlan);
        arguments.plan_report = problem.plan_report;
        arguments.values = problem.values.data;
        arguments.steps = sdd_steps(problem);
        arguments.ctas = device.multiprocessors;
        arguments.may_split = may_split(problem);
        arguments.accumulate = problem.accumulate;
        if (problem.tokens > 0) {
            const Pattern& pattern = problem.pattern;
            if (const cudaError_t error = map(arguments.y, problem, problem.y, pattern.out_features))
                return error;
            if (const cudaError_t error = map(arguments.x, problem, problem.x, pattern.in_features))
                return error;
        }
        if (arguments.may_split) {
            const bool is_paced = fills(problem, device, kTileValues);
            if (const cudaError_t error = use_split_memory(arguments, workspace, is_paced, stream))
                return error;
        }
        const auto start = problem.result_dtype == Math::kResult ? start_for<Traits> : start_for<WideTraits>;
        return start(arguments, problem, device, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<SddNarrow>(name, "sm90_sdd_narrow");
        row.ops = bits_of(Op::sdd_tn);
        row.input_dtypes = bits_of(Math::kInput);
        row.result_dtypes = bits_of(Math::kResult, DType::float32);
        row.precision = Math::kPrecision;
        row.accumulation = Math::kAccumulation;
        row.tile_features = kListUnit;
        row.tile_values = kListTileBlocks * 16 * 16;
        return row;
    }

  private:
    static constexpr int64_t kTileValues = int64_t{kListTileBlocks} * Traits::kBlock * Traits::kBlock;

    // The number of tiles is on the device.
    static bool may_split(const Problem& problem) { return sdd_steps(problem) >= kMinSplitSteps; }

    // The kernel, and the one that adds partial sums.
    template <class OfResult>
    static cudaError_t start_for(const SddNarrowArguments& arguments, const Problem& problem,
                                 const Device& device, void* stream) {
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        auto start = start_on<OfResult, true, true>;
        if constexpr (!Traits::kFloat) {
            if (row_major_y && !row_major_x) start = start_on<OfResult, true, false>;
            if (!row_major_y)
                start = row_major_x ? start_on<OfResult, false, true> : start_on<OfResult, false, false>;
        }
        if (const cudaError_t error = start(arguments, device, stream)) return error;
        if (!arguments.may_split) return cudaSuccess;
        return launch_early<sdd_narrow_reduce<OfResult>, 0>(arguments, 16 * arguments.ctas, 128, stream);
    }

    template <class OfResult, bool kRowMajorY, bool kRowMajorX>
    static cudaError_t start_on(const SddNarrowArguments& arguments, const Device& device, void* stream) {
        constexpr auto kKernel = sdd_narrow_kernel<OfResult, kRowMajorY, kRowMajorX>;
        return ClusterLauncher<kKernel, SddNarrowArguments>::launch(
            arguments, device, arguments.ctas, 1, Traits::kThreads, Traits::kSharedBytes, stream, false);
    }

    static cudaError_t map(CUtensorMap& map, const Problem& problem, const Matrix& matrix, int64_t features) {
        if (matrix.layout == Layout::row_major)
            return encode(
                map, Math::kMapType, matrix.data,
                {{features, 1, Traits::kBoxFeatures}, {problem.tokens, matrix.ld, Traits::kStageTokens}});
        return encode(map, Math::kMapType, matrix.data,
                      {{problem.tokens, 1, Traits::kStageTokens}, {features, matrix.ld, kListUnit}});
    }
};

}  // namespace ts::sm90
