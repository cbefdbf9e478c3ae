// The host side of the sdd kernel of grouped products.
#pragma once

#include <algorithm>

#include "sm90/sdd_grouped_kernel.cuh"
#include "sm90/sdd_launch.cuh"

namespace ts::sm90 {

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
