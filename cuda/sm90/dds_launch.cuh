// The host side of dds kernels.
#pragma once

#include <algorithm>

#include "common/token_groups.h"
#include "sm90/dds_kernel.cuh"
#include "sm90/dds_reduce.cuh"
#include "sm90/launch.cuh"
#include "sm90/select.h"
#include "tma/chunks.cuh"
#include "tma/launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// One row of the registry.
template <Op kOp, class Math, int kTokenRanks, int kRowRanks, int kTileTokens,
          class Weight = DenseWeight<kOp, Math>, bool kGrouped = false>
struct Dds {
    using Traits = DdsTraits<Math, Weight, kTokenRanks, kRowRanks, kTileTokens, kGrouped>;
    static constexpr PlanShape kPlan = {Traits::kTileFeatures, Traits::kStep, kRowRanks};
    static constexpr int kSpanTokens = kTokenRanks * Traits::kTileTokens;
    static constexpr int kClusterFeatures = kRowRanks * Traits::kTileFeatures;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Traits::kSharedBytes, Traits::kRanks)) return reason;
        if (const char* reason = Weight::refuses(problem)) return reason;
        if (Weight::value_rows(problem.pattern) > INT32_MAX - 128)
            return "values of 2^31 rows or more are out of its reach";
        if (most_spans(problem, device) <= 0) return "so large a weight is out of its reach";
        if (kGrouped) return refuses_groups(problem, device);
        return refuses_results(problem.output(), problem.tokens);
    }

    // The partial sums, or what tells of groups.
    static size_t workspace_size(const Problem& problem, const Device&, const Decision& decision) {
        if (kGrouped) return groups::bytes_of(problem.pattern.groups, most_group_spans(problem));
        return partial_bytes<Traits>(tile_count(problem) * span_count(problem), decision.parts);
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision& decision,
                          void* workspace, void* stream) {
        if constexpr (kGrouped) return launch_groups(problem, device, workspace, stream);
        return in_chunks(problem, kSpanTokens, most_spans(problem, device), [&](const Problem& chunk) {
            return launch_chunk(chunk, device, decision.parts, workspace, stream);
        });
    }

    static constexpr Kernel row(const char* name) {
        constexpr bool kIsDense = Weight::kStorages == bits_of(Storage::dense);
        Kernel row = make_row<Dds>(name, kGrouped   ? "sm90_grouped_dds"
                                         : kIsDense ? "sm90_dds"
                                                    : "sm90_dds_2_4");
        row.ops = bits_of(kOp);
        row.input_dtypes = bits_of(Math::kInput);
        if (Math::kResult != Math::kInput) row.result_dtypes = bits_of(Math::kResult);
        if (Traits::kScaled) row.scales_inside = bits_of(1);
        row.precision = Math::kPrecision;
        row.tile_tokens = kSpanTokens;
        row.tile_features = kClusterFeatures;
        row.splits = Traits::kSplits;
        row.storages = Weight::kStorages;
        row.values_dtypes = Weight::kDTypes;
        row.accumulation = Math::kAccumulation;
        row.cluster = kTokenRanks * kRowRanks;
        row.united_features = Traits::kTileFeatures;
        if (kGrouped) {
            row.grouped = bits_of(1);
            row.splits = false;
            return row;
        }
        row.decide = decide_dds;
        row.clusters = count_clusters<dds_kernel<Traits, true>, DdsArguments, Traits>;
        return row;
    }

  private:
    static const char* refuses_groups(const Problem& problem, const Device& device) {
        if (problem.pattern.groups > groups::kMaxGroups) return "it knows 1024 groups at most";
        if (problem.input().layout != Layout::row_major || problem.output().layout != Layout::row_major)
            return "it reads and writes row-major activations of groups only";
        // Spans of all groups, whatever their offsets are.
        const int64_t spans = problem.pattern.groups * (span_count(problem) + 1);
        return spans <= most_spans(problem, device) ? nullptr : "so many tokens are out of its reach";
    }

    static int32_t launch_groups(const Problem& problem, const Device& device, void* workspace,
                                 void* stream) {
        const int64_t tiles = tile_count(problem), spans = most_group_spans(problem);
        if (tiles * spans == 0) return cudaSuccess;
        DdsArguments arguments{};
        if (const cudaError_t error = describe(arguments, problem, device, tiles, spans, 1)) return error;
        GroupArguments& groups = arguments.groups;
        groups.by_tiles = cutlass::FastDivmod(static_cast<int>(tiles));
        groups.span_shift = static_cast<int>(cutlass::find_log2(kSpanTokens));
        // At least so many that all clusters have work in one, and no more than there are.
        const int least = (Traits::Schedule::kMaxClusters / 2 - 1) / static_cast<int>(tiles) + 1;
        groups.band_spans =
            static_cast<int>(std::min<int64_t>(std::max(band_spans(arguments.k_size, device), least), spans));
        groups.by_band = cutlass::FastDivmod(static_cast<int>(tiles) * groups.band_spans);
        if (const int32_t error =
                groups::list(groups.groups, problem, kSpanTokens, {}, spans, workspace, stream))
            return error;
        return multiply(arguments, problem, device, tiles * spans, stream);
    }

    static cudaError_t launch_chunk(const Problem& problem, const Device& device, int64_t parts,
                                    void* workspace, void* stream) {
        const int64_t tiles = tile_count(problem), spans = span_count(problem);
        if (tiles * spans == 0) return cudaSuccess;
        DdsArguments arguments{};
        if (const cudaError_t error = describe(arguments, problem, device, tiles, spans, parts)) return error;
        if constexpr (Traits::kSplits)
            if (parts > 1) {
                arguments.partial = static_cast<float4*>(workspace);
                return multiply_parts(arguments, problem, device, tiles * spans, stream);
            }
        return multiply(arguments, problem, device, tiles * spans, stream);
    }

    static cudaError_t multiply(const DdsArguments& arguments, const Problem& problem, const Device& device,
                                int64_t items, void* stream) {
        auto start = ClusterLauncher<dds_kernel<Traits, true>, DdsArguments>::launch;
        if constexpr (!Weight::kAlongK && !kGrouped)
            if (problem.input().layout != Layout::row_major)
                start = ClusterLauncher<dds_kernel<Traits, false>, DdsArguments>::launch;
        const int64_t clusters = std::min<int64_t>(items, Traits::Schedule::kMaxClusters);
        return start(arguments, device, clusters, Traits::kRanks, Traits::kThreads, Traits::kSharedBytes,
                     stream, false);
    }

    static cudaError_t multiply_parts(DdsArguments& arguments, const Problem& problem, const Device& device,
                                      int64_t items, void* stream) {
        const int64_t all_parts = items * arguments.schedule.by_parts.divisor;
        if (const cudaError_t error =
                multiply(without_epilogue(arguments), problem, device, all_parts, stream))
            return error;
        return reduce_parts<Traits>(arguments, items, stream);
    }

    static int64_t tile_count(const Problem& problem) {
        const int64_t tile_rows = kClusterFeatures / problem.row_block();
        return (problem.features() / problem.row_block() + tile_rows - 1) / tile_rows;
    }
    static int64_t most_group_spans(const Problem& problem) {
        return most_token_tiles(problem.tokens, problem.pattern.groups, kSpanTokens);
    }
    static int64_t span_count(const Problem& problem) {
        return (problem.tokens + kSpanTokens - 1) / kSpanTokens;
    }

    static int64_t most_spans(const Problem& problem, const Device& device) {
        return Traits::Schedule::most_spans(tile_count(problem), problem.k_size() / Traits::kStep + 1,
                                            device.multiprocessors);
    }

    static cudaError_t describe(DdsArguments& arguments, const Problem& problem, const Device& device,
                                int64_t tiles, int64_t spans, int64_t parts) {
        const Pattern& pattern = problem.pattern;
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.plan_key = plan_key(pattern, problem.op, kPlan);
        arguments.plan_report = problem.plan_report;
        arguments.tokens = static_cast<int>(problem.tokens);
        arguments.k_size = static_cast<int>(problem.k_size());
        arguments.k_block = problem.k_block();
        arguments.value_rows = Weight::value_rows(pattern);
        arguments.carried_products = carried_products(problem);
        arguments.x_scales = problem.x_scales;
        arguments.scales = problem.values.scales;
        arguments.spans = static_cast<int>(spans);
        arguments.schedule =
            schedule_arguments(static_cast<int>(tiles), arguments.spans, static_cast<int>(parts),
                               band_spans(arguments.k_size, device));
        if (const cudaError_t error = describe_results<Traits>(arguments, problem)) return error;
        if (arguments.value_rows == 0) return cudaSuccess;  // nothing is loaded, there may be nothing to map
        if constexpr (!Weight::kInRegisters) arguments.weight = Weight::operand(arguments);
        arguments.tokens_by_k = describe_input<Traits>(arguments, problem.input().layout);
        if constexpr (Traits::kScaled)
            if (const cudaError_t error = map_scales(arguments, problem)) return error;
        if (const cudaError_t error = map_input(arguments, problem)) return error;
        return Weight::map(arguments, problem);
    }

    // So many tokens that their activations take a third of L2, but two spans at least: within a band tiles
    // are in order, and the longer the order the better they are balanced.
    static int band_spans(int k_size, const Device& device) {
        const int64_t bytes = int64_t{kSpanTokens} * std::max(k_size, 1) * Traits::kInputElementBytes;
        return static_cast<int>(std::max<int64_t>(2, share_of_l2(device, 16 << 20) / bytes));
    }

    static cudaError_t map_scales(DdsArguments& arguments, const Problem& problem) {
        return encode(arguments.scales_map, DType::float32, problem.x_scales,
                      {{problem.tokens, 1, Traits::kTileTokens},
                       {problem.k_size() / kScaleGroup, problem.x_scales_ld, 1}});
    }

    static cudaError_t map_input(DdsArguments& arguments, const Problem& problem) {
        const Matrix& matrix = problem.input();
        const int width = k_width<Traits>(arguments);
        const int64_t k_size = arguments.k_size, tokens = problem.tokens;
        if (matrix.layout == Layout::row_major)
            return encode(arguments.input, Math::kMapType, matrix.data,
                          {{k_size, 1, width}, {tokens, matrix.ld, Traits::kBoxTokens}});
        constexpr int kAtom = 64;
        const int64_t atoms = std::max<int64_t>(1, tokens / kAtom);
        if (const cudaError_t error = encode(
                arguments.input, problem.input_dtype, matrix.data,
                {{kAtom, 1, kAtom}, {k_size, matrix.ld, width}, {atoms, kAtom, Traits::kTileTokens / kAtom}}))
            return error;
        return encode(arguments.input_tail, problem.input_dtype, matrix.data,
                      {{tokens, 1, kAtom}, {k_size, matrix.ld, width}});
    }
};

}  // namespace ts::sm90
