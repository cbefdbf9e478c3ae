// The host side of narrow.cuh, and its rows.
#pragma once

#include <algorithm>

#include "hopper/launch.cuh"
#include "hopper/narrow.cuh"
#include "hopper/select.h"
#include "hopper/weights.cuh"
#include "tma/chunks.cuh"
#include "tma/launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// Packs the weight for the dds kernel for narrow blocks: its squares one after another in the order in which
// they are multiplied, as the weight's format has them. A block is some of them in a row or one below the
// other: `beside` lie side by side in memory.

// One warp for each square.
template <class Weight, bool kTransposed>
__global__ void __launch_bounds__(256)
    pack_narrow_kernel(const PlanHeader* header, int key, PlanReport report, int count, int beside,
                       const typename Weight::Value* __restrict__ values, char* __restrict__ packed) {
    cudaTriggerProgrammaticLaunchCompletion();  // the kernel that multiplies may begin, and waits by itself
    constexpr int kBlock = Weight::kBlock;
    const int place = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (place >= count) return;
    const DdsPlan plan(header, key);
    if (!plan.is_own) return report_stale(report);
    const int square = __ldg(plan.slots + place), in_block = square % beside;
    const int64_t first = int64_t{square - in_block} * (kBlock * kBlock) + in_block * kBlock;
    Weight::template pack<kTransposed>(values + first, beside * kBlock,
                                       packed + int64_t{place} * Weight::kBlockBytes, lane);
}

// The host side of the dds kernel for narrow blocks.

// One row of the registry.
template <class Math, int kTokenRanks, int kRowRanks, template <class, int> class Weight = DenseNarrowWeight>
struct DdsNarrow {
    static constexpr int kElementBytes = sizeof(typename Math::Input);
    // Sides of squares: products of 8 bits have as many k as a block of 32; float32 has other kernels for 32.
    static constexpr int kLeastSide = kElementBytes == 1 ? 32 : 16, kMostSide = kElementBytes == 4 ? 16 : 32;
    static constexpr bool kTall = kElementBytes == 4;    // blocks may have more features than k
    static constexpr bool kAlongK = kElementBytes != 2;  // wgmma reads activations along k alone
    template <int kBlock, bool kSplits>
    using Kinds = NarrowKinds<Math, Weight<Math, kBlock>, kSplits>;
    // For what is the same for all blocks and kinds.
    using Common = typename Kinds<kMostSide, false>::Common;
    static_assert(kTokenRanks * kRowRanks == Common::kRanks);
    static constexpr int kClusterTokens = kTokenRanks * Common::kTileTokens;
    static constexpr int kClusterFeatures = kRowRanks * Common::kTileFeatures;
    static constexpr PlanShape kPlan = {kClusterFeatures, Common::kStep, kRowRanks, PlanKind::aligned};

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Kinds<kMostSide, false>::kSharedBytes, Common::kRanks))
            return reason;
        if (kTall && side_of(problem) != 16) return "its blocks have a side of 16";
        if (!kTall && (problem.row_block() > 32 || problem.row_block() > problem.k_block()))
            return "its blocks have 16 or 32 features of the result and at least as many of k";
        if (side_of(problem) < kLeastSide) return "its blocks have 32 features of the result";
        if (kAlongK && problem.input().layout != Layout::row_major) return "it reads row-major activations";
        if (most_spans(problem, device) <= 0 || square_count(problem) > INT32_MAX)
            return "so large a weight is out of its reach";
        return refuses_results(problem.output(), problem.tokens);
    }

    // The packed weight, where each call packs.
    static size_t workspace_size(const Problem& problem, const Device&, const Decision& decision) {
        return packs_itself(problem, decision) ? packed_size(problem) : 0;
    }

    static size_t packed_size(const Problem& problem) {
        return problem.pattern.value_count() * kElementBytes;
    }

    static int32_t pack(const Problem& problem, void* packed, void* stream) {
        if (side_of(problem) == kLeastSide) return pack_as<Weight<Math, kLeastSide>>(problem, packed, stream);
        return pack_as<Weight<Math, kMostSide>>(problem, packed, stream);
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision& chosen,
                          void* workspace, void* stream) {
        if (side_of(problem) == kLeastSide)
            return launch_blocks<kLeastSide>(problem, device, chosen, workspace, stream);
        return launch_blocks<kMostSide>(problem, device, chosen, workspace, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<DdsNarrow>(name, "sm90_narrow");
        row.ops = kElementBytes == 1 ? bits_of(Op::dds_nt) : bits_of(Op::dds_nt, Op::dds_nn);
        row.input_dtypes = bits_of(Math::kInput);
        if (Math::kResult != Math::kInput) row.result_dtypes = bits_of(Math::kResult);
        row.precision = Math::kPrecision;
        row.accumulation = Math::kAccumulation;
        row.tile_tokens = kClusterTokens;
        row.tile_features = kClusterFeatures;
        row.splits = true;
        row.storages = Weight<Math, kMostSide>::kStorages;
        row.values_dtypes = Weight<Math, kMostSide>::kDTypes;
        row.prepacked_size = packed_size;
        row.prepack = pack;
        row.cluster = kTokenRanks * kRowRanks;
        row.united_features = 128;  // as the coefficients were fitted; the steps of a CTA are whole ones of k
        row.decide = decide_narrow;
        return row;
    }

  private:
    template <int kBlock>
    static int32_t launch_blocks(const Problem& problem, const Device& device, const Decision& chosen,
                                 void* workspace, void* stream) {
        Decision decision = chosen;
        if (const cudaError_t error = fit_parts<kBlock>(problem, decision.parts)) return error;
        const auto start = decision.parts > 1 ? launch_as<kBlock, true> : launch_as<kBlock, false>;
        const int64_t most = most_spans(problem, device);
        if (span_count(problem) <= most) return start(problem, device, decision, workspace, stream);
        Problem packed = problem;  // once for all chunks
        if (packs_itself(problem, decision)) {
            packed.prepacked = workspace;
            if (const int32_t error = pack(problem, workspace, stream)) return error;
        }
        return in_chunks(packed, kClusterTokens, most, [&](const Problem& chunk) {
            return start(chunk, device, decision, nullptr, stream);
        });
    }

    // Lowers the number of parts until the current device holds all clusters at a time.
    template <int kBlock>
    static cudaError_t fit_parts(const Problem& problem, int64_t& parts) {
        using Split = Kinds<kBlock, true>;
        const int64_t items = tile_count(problem) * span_count(problem);
        for (; parts > 1; --parts) {
            int resident = 0;
            if (const cudaError_t error =
                    ClusterLauncher<dds_narrow_kernel<Split, true>, DdsArguments>::resident(
                        static_cast<int>(parts) * Split::kRanks, Split::kThreads, Split::kSharedBytes,
                        resident))
                return error;
            if (resident >= items) break;
        }
        return cudaSuccess;
    }
    // The side of the squares that blocks consist of.
    static int side_of(const Problem& problem) { return std::min(problem.row_block(), problem.k_block()); }
    static int64_t square_count(const Problem& problem) {
        return problem.pattern.value_count() / (side_of(problem) * side_of(problem));
    }
    static bool packs_itself(const Problem& problem, const Decision& decision) {
        return problem.prepacked == nullptr && !decision.reads_blocks && problem.pattern.nnz > 0;
    }

    static int64_t tile_count(const Problem& problem) {
        return (problem.features() + kClusterFeatures - 1) / kClusterFeatures;
    }
    static int64_t span_count(const Problem& problem) {
        return (problem.tokens + kClusterTokens - 1) / kClusterTokens;
    }
    static int64_t most_spans(const Problem& problem, const Device& device) {
        return Common::Schedule::most_spans(tile_count(problem), problem.k_size() / Common::kStep + 1,
                                            device.multiprocessors);
    }

    template <int kBlock, bool kInParts>
    static int32_t launch_as(const Problem& problem, const Device& device, const Decision& decision,
                             void* workspace, void* stream) {
        using Own = Kinds<kBlock, kInParts>;
        const int64_t tiles = tile_count(problem), spans = span_count(problem);
        if (tiles * spans == 0) return cudaSuccess;
        DdsArguments arguments{};
        const int64_t parts = decision.parts;
        const bool packs = packs_itself(problem, decision);
        arguments.packed = static_cast<const char*>(packs ? workspace : problem.prepacked);
        if (const cudaError_t error = describe(arguments, problem, device, tiles, spans, parts)) return error;
        if (packs)
            if (const cudaError_t error = pack_as<Weight<Math, kBlock>>(problem, workspace, stream))
                return error;
        auto start = ClusterLauncher<dds_narrow_kernel<Own, true>, DdsArguments>::launch;
        if constexpr (!kAlongK)
            if (problem.input().layout != Layout::row_major)
                start = ClusterLauncher<dds_narrow_kernel<Own, false>, DdsArguments>::launch;
        const int64_t clusters = std::min<int64_t>(tiles * spans, Common::Schedule::kMaxClusters);
        return start(arguments, device, clusters, static_cast<int>(parts) * Own::kRanks, Own::kThreads,
                     Own::kSharedBytes, stream, packs);
    }

    template <class Format>
    static cudaError_t pack_as(const Problem& problem, void* packed, void* stream) {
        constexpr int kThreads = 256;
        auto count = static_cast<int>(square_count(problem));
        int beside = problem.pattern.block_cols / side_of(problem);
        if (count == 0) return cudaSuccess;
        auto kernel = pack_narrow_kernel<Format, false>;
        if constexpr (kElementBytes > 1)
            if (!problem.forward()) kernel = pack_narrow_kernel<Format, true>;
        const int64_t ctas = (int64_t{count} * 32 + kThreads - 1) / kThreads;
        const void* plan = problem.plan;
        int key = plan_key(problem.pattern, problem.op, kPlan);
        PlanReport report = problem.plan_report;
        void* values = problem.values.data;
        void* parameters[] = {&plan, &key, &report, &count, &beside, &values, &packed};
        return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), static_cast<unsigned>(ctas), kThreads,
                                parameters, 0, static_cast<cudaStream_t>(stream));
    }

    static cudaError_t describe(DdsArguments& arguments, const Problem& problem, const Device& device,
                                int64_t tiles, int64_t spans, int64_t parts) {
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.plan_key = plan_key(problem.pattern, problem.op, kPlan);
        arguments.plan_report = problem.plan_report;
        arguments.value_rows = problem.pattern.nnz * problem.pattern.block_rows;
        arguments.tokens = static_cast<int>(problem.tokens);
        arguments.carried_products = carried_products(problem);
        arguments.x_scales = problem.x_scales;
        arguments.scales = problem.values.scales;
        arguments.spans = static_cast<int>(spans);
        arguments.schedule =
            schedule_arguments(static_cast<int>(tiles), arguments.spans, static_cast<int>(parts),
                               static_cast<int>(parts) * band_spans(problem, device, tiles, spans));
        arguments.tokens_by_k = operand(Common::kLineBytes, 0);
        if (arguments.value_rows > 0)
            if (const cudaError_t error = map_input(arguments, problem)) return error;
        if (arguments.value_rows > 0 && arguments.packed == nullptr)
            if (const cudaError_t error = map_blocks(arguments, problem)) return error;
        return describe_results(arguments, result_shape<Common>, problem);
    }

    // So many tokens that their activations take a sixth of L2. In two rounds nearly all is under way at
    // once, and long tiles, with which a band begins, should not have to wait for the second: all tokens are
    // one band if L2 holds their activations.
    static int band_spans(const Problem& problem, const Device& device, int64_t tiles, int64_t spans) {
        const int64_t bytes =
            int64_t{kClusterTokens} * std::max<int64_t>(problem.k_size(), 1) * sizeof(typename Math::Input);
        if (tiles * spans <= Common::Schedule::kMaxClusters && spans * bytes <= share_of_l2(device, 32 << 20))
            return static_cast<int>(spans);
        return static_cast<int>(std::max<int64_t>(1, share_of_l2(device, 8 << 20) / bytes));
    }

    static cudaError_t map_blocks(DdsArguments& arguments, const Problem& problem) {
        const int block = problem.pattern.block_rows;
        return encode(arguments.values, Math::kMapType, problem.values.data,
                      {{block, 1, block}, {arguments.value_rows, block, block}});
    }

    static cudaError_t map_input(DdsArguments& arguments, const Problem& problem) {
        const Matrix& matrix = problem.input();
        if (matrix.layout == Layout::row_major)
            return encode(arguments.input, Math::kMapType, matrix.data,
                          {{problem.k_size(), 1, Common::kLine},
                           {problem.tokens, matrix.ld, Common::kTileTokens / kRowRanks}});
        return encode(
            arguments.input, Math::kMapType, matrix.data,
            {{problem.tokens, 1, Common::kBoxTokens}, {problem.k_size(), matrix.ld, Common::kLine}});
    }
};

// 8 bits with the first operand in registers.
template <class Math>
struct FromRegisters : Math {
    template <cute::SM90::GMMA::Major, int kColumns>
    using RegisterAtom =
        std::conditional_t<Math::kInput == DType::int8, cute::SM90::GMMA::MMA_64x128x32_S32S8S8_RS_TN,
                           cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>>;
};

template <class Math>
struct NarrowFloat : Math {
    template <cute::SM90::GMMA::Major, int kColumns>
    using RegisterAtom =
        std::conditional_t<kColumns == 128, cute::SM90::GMMA::MMA_64x128x8_F32TF32TF32_RS_TN<>,
                           cute::SM90::GMMA::MMA_64x64x8_F32TF32TF32_RS_TN<>>;
};

}  // namespace ts::sm90

// Forward and dgrad for blocks of 16 or 32 features by as many k or more (sm_90, wgmma RS).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// The result's columns are "features" here and what is summed over is "k". A long block counts as
// several square ones.
// Operands: activations row- or column-major, bf16 or fp16, through TMA; W packed in the order of its
// products, [blocks][features][k], transposed where need be, so that the blocks of a step are one copy.
// The caller packs once, or each call packs. A small batch may take less time than packing: then blocks
// that need not be transposed are copied one by one from values (Decision::reads_blocks).
//   input   [k / 64][128 tokens][64], column-major [128 tokens / 64][k][64], 128-byte swizzle
//   weight  [blocks][features of a block][k of a block], swizzled over its rows
// CTA: 256 features x 128 tokens. Features are the rows of wgmma. Of its 64 rows each warp has 16, whose
// weight it gives from registers, zeros where its block row has no block: two block rows of 32 or four
// of 16 share their products, chosen to have as many columns as possible in common.
// Cluster of 2: 512 features x 128 tokens, sharing the activations, or 256 x 256, sharing the weight.
// Warps: 1 loads, 1 schedules, 16 multiply and store. Four warpgroups take turns: while one reads its
// weight the others multiply. CTAs are persistent.
// K loop: whole steps of 128 k, or of 64 where blocks crowd, as the plan says: only its builder sees how
// many blocks share a step. A ring of activations, and the rest of shared memory for blocks
// (NarrowKinds).
// Split-K: where tiles are few a cluster has two CTAs for each of up to 4 parts, which add their sums
// through distributed shared memory.
// Chosen where its estimate is least, for such blocks.
#define TS_ROW_dds_narrow(name, math, token_ranks, row_ranks) \
    TS_SM90_ROW(name, DdsNarrow<math, token_ranks, row_ranks>)

// Forward of activations and values in 8 bits for blocks of 32 features by as many k or more:
// dds_narrow with wgmma for these types.
//   Y[M,N] = scale[M] * (X[M,K] * W[N,K]^T) * scale[N]
// Operands: as in dds_narrow, but X row-major alone, in lines of 64 bytes, and the scales of
// dds_8bit. A product has 32 of k, those of one block. What is carried of sums of float8 lies in shared
// memory. CTA, cluster, warps, steps and splits: as in
// dds_narrow, with half of the bytes.
// Chosen where its estimate is least, for such blocks.
#define TS_ROW_dds_narrow_8bit(name, math, token_ranks, row_ranks) \
    TS_SM90_ROW(name, DdsNarrow<FromRegisters<math>, token_ranks, row_ranks>)

// Forward and dgrad of float32 for blocks with a side of 16: dds_narrow with wgmma for TF32. Blocks
// that have more features than k are several squares, too.
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Operands: as in dds_narrow, but row-major activations alone. Steps have 64 k, or 32 where blocks crowd.
// tf32 rounds both operands, the weight as it is packed. tf32x3 takes two parts of each (gemm.cuh): two
// more warps write the second parts of activations beside the first, and a CTA has 64 tokens. CTA, cluster,
// warps and splits: as in dds_narrow. Chosen where its estimate is least, for such blocks.
#define TS_ROW_dds_narrow_float(name, math, token_ranks, row_ranks) \
    TS_SM90_ROW(name, DdsNarrow<NarrowFloat<math>, token_ranks, row_ranks>)
