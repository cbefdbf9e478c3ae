// The host side of gemm.cuh, and its rows by format of the weight.
#pragma once

#include <algorithm>

#include "common/token_groups.h"
#include "hopper/gemm.cuh"
#include "hopper/launch.cuh"
#include "hopper/select.h"
#include "hopper/weights.cuh"
#include "tma/chunks.cuh"
#include "tma/launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// The host side of dds kernels. What does not depend on the row comes first.

[[gnu::noinline]] inline void describe_product(DdsArguments& arguments, const Problem& problem, int64_t tiles,
                                               int64_t spans, int64_t parts, int band_spans) {
    arguments.plan = static_cast<const PlanHeader*>(problem.plan);
    arguments.plan_report = problem.plan_report;
    arguments.tokens = static_cast<int>(problem.tokens);
    arguments.k_size = static_cast<int>(problem.k_size());
    arguments.k_block = problem.k_block();
    arguments.carried_products = carried_products(problem);
    arguments.x_scales = problem.x_scales;
    arguments.scales = problem.values.scales;
    arguments.spans = static_cast<int>(spans);
    arguments.schedule =
        schedule_arguments(static_cast<int>(tiles), arguments.spans, static_cast<int>(parts), band_spans);
}

// So many tokens that their activations take a third of L2, but two spans at least: within a band tiles
// are in order, and the longer the order the better they are balanced. `bytes`: of a span for each k.
inline int spans_of_band(const Problem& problem, const Device& device, int bytes) {
    const int64_t of_span = bytes * std::max<int64_t>(problem.k_size(), 1);
    return static_cast<int>(std::max<int64_t>(2, share_of_l2(device, 16 << 20) / of_span));
}

// Three, where work is dealt out in turn: what clusters read at a time is about as much of the weight as of
// activations. More of few spans, because tiles are balanced within a band.
inline int spans_of_turns(int64_t spans) { return spans > 16 ? 3 : 8; }

inline cudaError_t map_scales(DdsArguments& arguments, const Problem& problem, int tile_tokens) {
    return encode(
        arguments.scales_map, DType::float32, problem.x_scales,
        {{problem.tokens, 1, tile_tokens}, {problem.k_size() / kScaleGroup, problem.x_scales_ld, 1}});
}

[[gnu::noinline]] inline cudaError_t map_input(DdsArguments& arguments, const Problem& problem,
                                               CUtensorMapDataType type, int width, int box_tokens,
                                               int tile_tokens) {
    const Matrix& matrix = problem.input();
    const int64_t k_size = arguments.k_size, tokens = problem.tokens;
    if (matrix.layout == Layout::row_major)
        return encode(arguments.input, type, matrix.data,
                      {{k_size, 1, width}, {tokens, matrix.ld, box_tokens}});
    constexpr int kAtom = 64;
    const int64_t atoms = std::max<int64_t>(1, tokens / kAtom);
    if (const cudaError_t error =
            encode(arguments.input, problem.input_dtype, matrix.data,
                   {{kAtom, 1, kAtom}, {k_size, matrix.ld, width}, {atoms, kAtom, tile_tokens / kAtom}}))
        return error;
    return encode(arguments.input_tail, problem.input_dtype, matrix.data,
                  {{tokens, 1, kAtom}, {k_size, matrix.ld, width}});
}

using StartClusters = cudaError_t (*)(const DdsArguments& arguments, const Device& device, int64_t clusters,
                                      int cluster_size, int threads, int shared_bytes, void* stream,
                                      bool early);

// Data of a row, by which one host side serves all of them.
struct DdsHost {
    PlanShape plan;
    InputShape input;
    ResultShape results;
    CUtensorMapDataType map_type;
    int span_tokens, cluster_features;  // of a cluster
    int tile_tokens, box_tokens;        // of a CTA, and those loaded at a time
    int ranks, threads, shared_bytes, most_clusters;
    bool deals_in_turn;  // work of one weight
    int64_t part_bytes;  // of partial sums
    size_t pace_bytes;   // of groups whose clusters keep at one pace, or 0
    bool scaled;         // inside of the sums
    int64_t (*most_spans)(int64_t tiles, int64_t steps, int multiprocessors);
    // The weight's format has these.
    const char* (*refuses)(const Problem& problem);
    cudaError_t (*map)(DdsArguments& arguments, const Problem& problem);
    Operand (*operand)(const DdsArguments& arguments);  // nullptr: products do not read it from shared memory
    // The kernels: for row-major and other activations, and the one that adds parts.
    StartClusters start, start_columns;
    cudaError_t (*reduce)(const DdsArguments& arguments, int64_t items, void* stream);

    int64_t tile_count(const Problem& problem) const {
        const int64_t tile_rows = cluster_features / problem.row_block();
        return (problem.features() / problem.row_block() + tile_rows - 1) / tile_rows;
    }
    int64_t span_count(const Problem& problem) const {
        return (problem.tokens + span_tokens - 1) / span_tokens;
    }
    int64_t most_group_spans(const Problem& problem) const {
        return most_token_tiles(problem.tokens, problem.pattern.groups, span_tokens);
    }
    int64_t most_spans_of(const Problem& problem, const Device& device) const {
        return most_spans(tile_count(problem), problem.k_size() / input.step + 1, device.multiprocessors);
    }
    int band_spans(const Problem& problem, const Device& device) const {
        return deals_in_turn ? spans_of_turns(span_count(problem))
                             : spans_of_band(problem, device, span_tokens * input.bytes);
    }
};

inline int64_t value_rows(const Pattern& pattern) { return pattern.nnz * pattern.block_rows; }

inline const char* refuses_groups(const DdsHost& host, const Problem& problem, const Device& device) {
    if (problem.pattern.groups > groups::kMaxGroups) return "it knows 1024 groups at most";
    if (problem.input().layout != Layout::row_major || problem.output().layout != Layout::row_major)
        return "it reads and writes row-major activations of groups only";
    // Spans of all groups, whatever their offsets are.
    const int64_t spans = problem.pattern.groups * (host.span_count(problem) + 1);
    return spans <= host.most_spans_of(problem, device) ? nullptr : "so many tokens are out of its reach";
}

[[gnu::noinline]] inline const char* refuses_product(const DdsHost& host, const Problem& problem,
                                                     const Device& device) {
    if (const char* reason = refuses(device, host.shared_bytes, host.ranks)) return reason;
    if (const char* reason = host.refuses(problem)) return reason;
    if (value_rows(problem.pattern) > INT32_MAX - 128)
        return "values of 2^31 rows or more are out of its reach";
    if (host.most_spans_of(problem, device) <= 0) return "so large a weight is out of its reach";
    if (host.results.grouped) return refuses_groups(host, problem, device);
    return refuses_results(problem.output(), problem.tokens);
}

// The partial sums, or what tells of groups.
inline size_t workspace_of(const DdsHost& host, const Problem& problem, const Decision& decision) {
    if (host.results.grouped)
        return host.pace_bytes + groups::bytes_of(problem.pattern.groups, host.most_group_spans(problem));
    if (decision.parts == 1) return 0;
    return decision.parts * host.tile_count(problem) * host.span_count(problem) * host.part_bytes;
}

// True if L2 does not hold the activations that clusters read at a time (see band_spans), so that those
// which are at other k than the rest would read them from memory; and if there are rounds enough for
// differences between clusters to even out.
inline bool is_paced(const DdsHost& host, const Problem& problem, const Device& device) {
    if (host.pace_bytes == 0) return false;
    const int clusters = host.most_clusters / 2;
    const int64_t tiles = host.tile_count(problem), spans = host.most_group_spans(problem);
    const int64_t tokens = clusters * host.span_tokens / std::max<int64_t>(tiles, 1);
    return tokens * problem.k_size() * host.input.bytes > share_of_l2(device, 16 << 20) &&
           tiles * spans >= 16 * clusters;
}

inline cudaError_t describe(DdsArguments& arguments, const DdsHost& host, const Problem& problem,
                            const Device& device, int64_t tiles, int64_t spans, int64_t parts) {
    arguments.plan_key = plan_key(problem.pattern, problem.op, host.plan);
    arguments.value_rows = value_rows(problem.pattern);
    describe_product(arguments, problem, tiles, spans, parts, host.band_spans(problem, device));
    if (const cudaError_t error = describe_results(arguments, host.results, problem)) return error;
    if (arguments.value_rows == 0) return cudaSuccess;  // nothing is loaded, there may be nothing to map
    if (host.operand != nullptr) arguments.weight = host.operand(arguments);
    arguments.tokens_by_k = describe_input(arguments, host.input, problem.input().layout);
    if (host.scaled)
        if (const cudaError_t error = map_scales(arguments, problem, host.tile_tokens)) return error;
    if (const cudaError_t error = map_input(arguments, problem, host.map_type, host.input.width(arguments),
                                            host.box_tokens, host.tile_tokens))
        return error;
    return host.map(arguments, problem);
}

inline cudaError_t multiply(const DdsHost& host, const DdsArguments& arguments, const Problem& problem,
                            const Device& device, int64_t items, void* stream) {
    const auto start = problem.input().layout == Layout::row_major ? host.start : host.start_columns;
    const int64_t clusters = std::min<int64_t>(items, host.most_clusters);
    return start(arguments, device, clusters, host.ranks, host.threads, host.shared_bytes, stream, false);
}

inline int32_t launch_groups(const DdsHost& host, const Problem& problem, const Device& device,
                             void* workspace, void* stream) {
    const int64_t tiles = host.tile_count(problem), spans = host.most_group_spans(problem);
    if (tiles * spans == 0) return cudaSuccess;
    DdsArguments arguments{};
    if (const cudaError_t error = describe(arguments, host, problem, device, tiles, spans, 1)) return error;
    GroupArguments& groups = arguments.groups;
    groups.by_tiles = cutlass::FastDivmod(static_cast<int>(tiles));
    groups.span_shift = static_cast<int>(cutlass::find_log2(host.span_tokens));
    // At least so many that all clusters have work in one, and no more than there are.
    const int least = (host.most_clusters / 2 - 1) / static_cast<int>(tiles) + 1;
    groups.band_spans =
        static_cast<int>(std::min<int64_t>(std::max(host.band_spans(problem, device), least), spans));
    groups.by_band = cutlass::FastDivmod(static_cast<int>(tiles) * groups.band_spans);
    if (is_paced(host, problem, device)) {
        arguments.pace = static_cast<int*>(workspace);
        if (const cudaError_t error =
                cudaMemsetAsync(workspace, 0, host.pace_bytes, static_cast<cudaStream_t>(stream)))
            return error;
    }
    if (const int32_t error = groups::list(groups.groups, problem, host.span_tokens, {}, spans,
                                           static_cast<char*>(workspace) + host.pace_bytes, stream))
        return error;
    return multiply(host, arguments, problem, device, tiles * spans, stream);
}

inline cudaError_t launch_chunk(const DdsHost& host, const Problem& problem, const Device& device,
                                int64_t parts, void* workspace, void* stream) {
    const int64_t tiles = host.tile_count(problem), spans = host.span_count(problem);
    if (tiles * spans == 0) return cudaSuccess;
    DdsArguments arguments{};
    if (const cudaError_t error = describe(arguments, host, problem, device, tiles, spans, parts))
        return error;
    if (host.reduce == nullptr || parts == 1)
        return multiply(host, arguments, problem, device, tiles * spans, stream);
    arguments.partial = static_cast<float4*>(workspace);
    const int64_t all_parts = tiles * spans * arguments.schedule.by_parts.divisor;
    if (const cudaError_t error =
            multiply(host, without_epilogue(arguments), problem, device, all_parts, stream))
        return error;
    return host.reduce(arguments, tiles * spans, stream);
}

[[gnu::noinline]] inline int32_t launch_product(const DdsHost& host, const Problem& problem,
                                                const Device& device, const Decision& decision,
                                                void* workspace, void* stream) {
    if (host.results.grouped) return launch_groups(host, problem, device, workspace, stream);
    return in_chunks(problem, host.span_tokens, host.most_spans_of(problem, device),
                     [&](const Problem& chunk) {
                         return launch_chunk(host, chunk, device, decision.parts, workspace, stream);
                     });
}

template <class Row>
constexpr DdsHost dds_host = Row::host();

// One row of the registry.
template <Op kOp, class Math, int kTokenRanks, int kRowRanks, int kTileTokens,
          class Weight = DenseWeight<kOp, Math>, bool kGrouped = false>
struct Dds {
    using Traits = DdsTraits<Math, Weight, kTokenRanks, kRowRanks, kTileTokens, kGrouped>;
    static constexpr PlanShape kPlan = {Traits::kTileFeatures, Traits::kStep, kRowRanks};

    static const char* refuses(const Problem& problem, const Device& device) {
        return refuses_product(dds_host<Dds>, problem, device);
    }
    static size_t workspace_size(const Problem& problem, const Device&, const Decision& decision) {
        return workspace_of(dds_host<Dds>, problem, decision);
    }
    static int32_t launch(const Problem& problem, const Device& device, const Decision& decision,
                          void* workspace, void* stream) {
        return launch_product(dds_host<Dds>, problem, device, decision, workspace, stream);
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
        row.tile_tokens = dds_host<Dds>.span_tokens;
        row.tile_features = dds_host<Dds>.cluster_features;
        row.splits = Traits::kSplits;
        row.storages = Weight::kStorages;
        row.values_dtypes = Weight::kDTypes;
        row.accumulation = Math::kAccumulation;
        row.cluster = kTokenRanks * kRowRanks;
        row.united_features = Traits::kTileFeatures;
        if (kGrouped) {
            row.grouped = bits_of(1);
            return row;
        }
        row.decide = decide_dds;
        row.clusters = count_clusters<dds_kernel<Traits, true>, DdsArguments, Traits>;
        return row;
    }

    static constexpr DdsHost host() {
        DdsHost host{};
        host.plan = kPlan;
        host.input = input_shape<Traits>;
        host.results = result_shape<Traits>;
        host.map_type = Math::kMapType;
        host.span_tokens = kTokenRanks * Traits::kTileTokens;
        host.cluster_features = kRowRanks * Traits::kTileFeatures;
        host.tile_tokens = Traits::kTileTokens;
        host.box_tokens = Traits::kBoxTokens;
        host.ranks = Traits::kRanks;
        host.threads = Traits::kThreads;
        host.shared_bytes = Traits::kSharedBytes;
        host.most_clusters = Traits::Schedule::kMaxClusters;
        host.deals_in_turn = Traits::kDealsInTurn;
        host.part_bytes = kPartBytes<Traits>;
        host.pace_bytes = Traits::kPaces ? tma::Pace::kBytes : 0;
        host.scaled = Traits::kScaled;
        host.most_spans = Traits::Schedule::most_spans;
        host.refuses = Weight::refuses;
        host.map = Weight::map;
        if constexpr (!Weight::kInRegisters) host.operand = Weight::operand;
        host.start = host.start_columns = ClusterLauncher<dds_kernel<Traits, true>, DdsArguments>::launch;
        if constexpr (!Weight::kAlongK && !kGrouped)
            host.start_columns = ClusterLauncher<dds_kernel<Traits, false>, DdsArguments>::launch;
        if constexpr (Traits::kSplits) host.reduce = reduce_parts<Traits>;
        return host;
    }
};

// The same results of fast sums.
template <class Math>
using FastMath = FastFloat8<typename Math::Result, Math::kPrecision>;

// Launches the kernel of fast sums for these, a row's own for others.
template <class Own, class Fast>
int32_t launch_either(const Problem& problem, const Device& device, const Decision& decision, void* workspace,
                      void* stream) {
    const auto launch = problem.precision == Precision::fast ? Fast::launch : Own::launch;
    return launch(problem, device, decision, workspace, stream);
}

// Forward of 8 bits, the values 2:4. Fast sums of float8 have a kernel of their own in tiles of 256 tokens:
// what is carried over takes registers, which the compiler saves elsewhere.
template <class Math, int kTokenRanks, int kRowRanks, int kTileTokens>
struct CompressedBytes
    : Dds<Op::dds_nt, Math, kTokenRanks, kRowRanks, kTileTokens, CompressedByteWeight<Math>> {
    using Own = Dds<Op::dds_nt, Math, kTokenRanks, kRowRanks, kTileTokens, CompressedByteWeight<Math>>;

    static constexpr Kernel row(const char* name) {
        using Fast = Dds<Op::dds_nt, FastMath<Math>, kTokenRanks, kRowRanks, kTileTokens,
                         CompressedByteWeight<FastMath<Math>>>;
        Kernel row = Own::row(name);
        if constexpr (Own::Traits::kCarries && kTileTokens == 256) row.launch = launch_either<Own, Fast>;
        return row;
    }
};

template <Op kOp, class Math, bool kPairsRows = true>
using GroupedWeight =
    std::conditional_t<is_quantized(Math::kInput), ByteWeight<Math, kPairsRows>, DenseWeight<kOp, Math>>;

}  // namespace ts::sm90

// Forward and dgrad of 16-bit types (sm_90, wgmma SS).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// The result's columns are "features" here and what is summed over is "k", in either direction.
// Operands: activations row- or column-major, results too, bf16 or fp16; W as stored, [nnz * bn, bk].
//   input   [pieces][tokens][k of a piece], column-major [pieces][tokens / 64][k of a piece][64]
//   weight  [2 warpgroups][pieces][64][k of a piece], of NN [2][block rows][64][features of a block]
//   All go to shared memory through TMA, swizzled over the width of their rows (32 to 128 bytes).
// CTA: 128 features x 256, 128 or 64 tokens. Features are the rows of wgmma, 64 in each of two
// warpgroups, so that a warpgroup skips the steps in which its features have no block.
// Cluster of 2: different tokens, which share the weight by multicast (tiles of 512 or 256 x 128), or
// different block rows, which share the activations of the columns that both walk (256, 128 or 64 x 256).
// Warps: 1 loads activations, 2 load the weight, 1 schedules, 8 multiply and store. CTAs are persistent.
// K loop: the plan's steps of 64 k in which one of the tile's block rows has a block (common/plan.h).
// Activations have one ring of stages and the weight of each warpgroup another, so that neither waits
// for steps that only the other needs.
// Split-K: where tiles are few, those of 128 or 64 tokens are cut along k; a second kernel adds the sums
// in a fixed order (dds_reduce).
// Chosen where its estimate is least: blocks of 64 and 128, blocks with more features
// than k, which dds_narrow does not take, and batches that are too large for decode.
#define TS_ROW_dds(name, op, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::op, math, token_ranks, row_ranks, tile_tokens>)

// Forward and dgrad of values that are 2:4 inside their blocks: dds with wgmma for sparse operands.
//   Y[M,N] = X[M,K] * W[N,K]^T
// dgrad is the same product of the transposed pattern with values compressed along their columns.
// Operands: as in dds, but values [nnz * bn, bk / 2] and metadata, both in a stage of the weight
// (weights.cuh). CTA, cluster, warps and K loop: as in dds. The two warps that load the
// weight copy the metadata of each box as well, in bulk.
// Chosen where its estimate is least, for compressed values.
#define TS_ROW_dds_2_4(name, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::dds_nt, math, token_ranks, row_ranks, tile_tokens, CompressedWeight<math>>)

// Forward of activations and values in 8 bits, the values 2:4 inside their blocks: dds_8bit with wgmma
// for sparse operands.
//   Y[M,N] = scale[M] * (X[M,K] * W[N,K]^T) * scale[N]
// Operands: X and Y as in dds_8bit, values [nnz * bn, bk / 2] and metadata, both in a stage of the weight
// (weights.cuh); blocks of 64 columns and more. CTA, cluster, warps, steps and sums: as in
// dds_8bit. The two warps that load the weight copy the metadata of each box as well, in bulk.
// Chosen where its estimate is least, for compressed values.
#define TS_ROW_dds_2_4_8bit(name, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, CompressedBytes<math, token_ranks, row_ranks, tile_tokens>)

// Forward of activations and values in 8 bits, int8 or float8_e4m3fn: dds with wgmma for these types.
//   Y[M,N] = scale[M] * (X[M,K] * W[N,K]^T) * scale[N]
// Operands: as in dds, but X row-major alone: wgmma reads 8 bits along k only, as both lie. The scales
// stay outside of the sums, in the epilogue. Y in bf16, fp16 or fp32.
// CTA, cluster (or none), warps: as in dds. K loop: steps of 128 k, which have the bytes of 64 k of 16 bits.
// Sums: int32, exact, of int8. Those of float8 are carried over now and then (CarriedSums), which the
// warpgroups do at different steps: meanwhile the other one multiplies.
// Chosen where its estimate is least.
#define TS_ROW_dds_8bit(name, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::dds_nt, math, token_ranks, row_ranks, tile_tokens, ByteWeight<math>>)

// Forward of float8_e4m3fn with scales inside of the sums: dds_8bit for blocks of 128 x 128.
//   Y[M,N] = sum over b of scale[M,b] * scale of block (N,b) * (X[M,b] * W[N,b]^T), b: 128 of K
// Operands: as in dds_8bit, and the scales of X [K / 128][M], those of W [nnz]. TMA brings those of a
// step's tokens into the stage of the activations; the warp that loads blocks reads theirs with the plan, 32
// at a time, and writes them beside the stages of the weight.
// Sums: those of a step, of tensor cores, are multiplied by both scales as they are added to others in
// float32. The warpgroups take turns: while one of them scales and adds, the other one multiplies.
// Chosen where its estimate is least.
#define TS_ROW_dds_8bit_scaled(name, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::dds_nt, math, token_ranks, row_ranks, tile_tokens, ScaledByteWeight<math>>)

// Forward and dgrad of float32: dds with the weight in registers (wgmma RS).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Operands: row-major float32 activations, blocks of 32 rows and columns at least. tf32 rounds both;
// tf32x3 takes two parts of each and leaves out the product of the second ones (gemm.cuh).
// CTA: 128 features x 256 or 128 tokens; clusters of 2 share the weight. Steps of 32 k.
// Warps: as in dds; tf32x3 has 4 more, which write the second parts of activations beside the first.
// Chosen where its estimate is least.
#define TS_ROW_dds_float(name, op, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::op, math, token_ranks, row_ranks, tile_tokens, FloatWeight<Op::op, math>>)

// Grouped forward and dgrad of 16-bit types, and forward of 8 bits (sm_90): dds and dds_8bit for
// groups of tokens, each of which meets a weight of its own. A tile has tokens of one group and block rows of
// its weight; scales of features are numbered over all weights, as biases are. Where groups begin is known on
// the GPU alone: a kernel before this one counts spans of tokens (tma/groups.cuh), from which the schedule
// finds its work. The last tile of a group loads tokens of the next, which meet the wrong weight, and does
// not store them (encode_ranges). Chosen where its estimate is least.
#define TS_ROW_dds_grouped(name, op, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name,                                                           \
                Dds<Op::op, math, token_ranks, row_ranks, tile_tokens, GroupedWeight<Op::op, math>, true>)
