// sdd: the gradient of the block-sparse weight, for the kept blocks alone (sm_80, mma.sync).
//   dW[N,K] = Y[M,N]^T * X[M,K], written or added to values
// Operands: Y and X each row-major or column-major, bf16, fp16, float32 (TF32, or three TF32 products with
// float32's error) or float64; values [nnz, bn, bk] of the same dtype or float32; float32 sums, or float64.
// A CTA computes tiles of kTileRows features of y x kTileColumns features of x, one after another: block rows
// and columns that have blocks in common, both gathered (see common/plan.h).
// Warps: 8 or 16, which all load and multiply. They skip the parts of a tile that are not kept.
// M loop: steps of 128 bytes of tokens through a ring of 2 to 6 stages (cp.async, mbarriers), on into the
// next tile.
// Split over tokens, where tiles are too few for the GPU: partial sums go to the workspace, and a second
// kernel adds them in a fixed order.
// Grouped products: a tile has blocks of one group and sums over this group's tokens, which only the device
// knows; they are not split.
// Chosen where its estimate is least: 64 rows for blocks of 32 or 64 rows, otherwise 128; one row of blocks
// of 32 in float64.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/problem.h"
#include "sm80/launch.cuh"
#include "sm80/math.cuh"
#include "sm80/sdd_epilogue.cuh"
#include "sm80/sdd_loader.cuh"
#include "sm80/sdd_traits.cuh"
#include "sm80/tile.cuh"

namespace ts::sm80 {

// One step for the 16 x 16 tiles whose bit row * kNTiles + column is set in `present`, by instructions of a
// quarter.
template <class Math, class Sum, int kMTiles, int kNTiles, class ReaderA, class ReaderB>
__device__ inline void multiply_present(Accumulators<Sum, kMTiles, kNTiles>& sums, const ReaderA& read_a,
                                        uint32_t tile_a, const ReaderB& read_b, uint32_t tile_b,
                                        uint32_t present) {
    constexpr uint32_t kRow = (1u << kNTiles) - 1;
    for (int quarter = 0; quarter < kQuarters; quarter += Math::kQuarters) {
        typename Math::template Operand<2 * Math::kQuarters> b[kNTiles][2];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
            load_b<Math>(read_b, tile_b, n, quarter,
                         [&](int half, const auto& of_half) { b[n][half] = of_half; });
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const uint32_t row = present >> m * kNTiles & kRow;
            if (row == 0) continue;
            const auto a = load_a<Math>(read_a, tile_a, m, quarter);
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
                if (!(row >> n & 1)) continue;
                Math::mma(sums[m][n][0], a, b[n][0]);
                Math::mma(sums[m][n][1], a, b[n][1]);
            }
        }
    }
}

template <class Traits, bool kRowMajorY, bool kRowMajorX, bool kGrouped = false>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kResident)
    sdd_kernel(const __grid_constant__ SddArguments arguments) {
    constexpr int kMTiles = Traits::kMTiles, kNTiles = Traits::kNTiles;
    constexpr uint32_t kAll = kMTiles * kNTiles == 32 ? 0xffffffffu : (1u << kMTiles * kNTiles % 32) - 1;
    using Math = typename Traits::Math;
    using Input = typename Traits::Input;
    using Sums = Accumulators<typename Traits::Accumulator, kMTiles, kNTiles>;
    // [stages][y, x], a Tile each; [stages] barriers.
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    const Ring ring(stages + arguments.stages * Traits::kStageBytes, arguments.stages);
    if (threadIdx.x == 0) ring.init(Traits::kThreads, Traits::kThreads);
    __syncthreads();

    const OwnPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    if (!plan.is_own) return;
    SddLoader<Traits, kRowMajorY, kRowMajorX, kGrouped> loader(arguments, plan, ring, stages);
    for (int ahead = 0; ahead < arguments.lookahead; ++ahead) loader.load();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % Traits::kRowWarps * Traits::kWarpRows;
    const int warp_column = warp / Traits::kRowWarps * Traits::kWarpColumns;
    const Reader<typename Traits::template YTile<kRowMajorY>, Input, Side::a, kMTiles> read_y(warp_row, lane);
    const Reader<typename Traits::template XTile<kRowMajorX>, Input, Side::b, kNTiles> read_x(warp_column,
                                                                                              lane);
    RingPosition position;
    for (int index = blockIdx.x; index < plan.tile_count * arguments.parts; index += gridDim.x) {
        const SddWork work = sdd_work<kGrouped>(arguments, plan, index);
        uint32_t present = 0;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const uint32_t mask =
                __ldg(plan.masks + work.tile * (Traits::kTileRows / 16) + warp_row / 16 + m);
            present |= (mask >> warp_column / 16 & (1u << kNTiles) - 1) << m * kNTiles;
        }
        Sums sums = {};
        for (int token = work.first_token; token < work.last_token; token += Traits::kStep) {
            loader.load();
            ring.full(position.stage).wait(position.parity);
            const uint32_t stage = stages + position.stage * Traits::kStageBytes;
            accumulate<Math>(sums, [&](Sums& to) {
                const uint32_t x = stage + Traits::kYBytes;
                const auto release = [&] { ring.empty(position.stage).arrive(); };
                if constexpr (Math::kQuarters > 1) {
                    const auto multiply = [&](auto has) {
                        multiply_long<Math>(to, read_y, stage, read_x, x, has, release);
                    };
                    if (present == kAll) return multiply([](int, int) { return true; });
                    if (present != 0)
                        return multiply([&](int m, int n) { return present >> m * kNTiles + n & 1; });
                } else if (present == kAll) {
                    multiply_all<Math>(to, read_y, stage, read_x, x);
                } else if (present != 0) {
                    multiply_present<Math>(to, read_y, stage, read_x, x, present);
                }
                release();
            });
            position.advance(arguments.stages);
        }
        if (present != 0) sdd_store<Traits>(arguments, plan, work, sums, warp_row, warp_column, lane);
    }
}

// Host side: one row of the registry.
template <class Math, int kTileRows, int kTileColumns, int kWarpRows, int kWarpColumns>
struct Sdd {
    using Traits = SddTraits<Math, kTileRows, kTileColumns, kWarpRows, kWarpColumns>;
    using Wide =
        std::conditional_t<std::is_same_v<typename Math::Accumulator, double>, Math, WithResult<Math, float>>;
    using WideTraits = SddTraits<Wide, kTileRows, kTileColumns, kWarpRows, kWarpColumns>;
    static constexpr PlanShape kPlan = {kTileRows, kTileColumns};

    static int stages(const Device& device) {
        constexpr int kReservedBytes = 1024;  // of each CTA, by the system
        return stages_within<Traits>((device.shared_memory + kReservedBytes) / Traits::kResident -
                                     kReservedBytes);
    }

    static const char* refuses(const Problem& problem, const Device& device) {
        if (are_too_wide<Traits>(problem)) return kTooWide;
        if (problem.pattern.block_rows > kTileRows) return "its tile has fewer rows than a block";
        if (Traits::kResident > 1 && problem.pattern.block_rows < kTileRows)
            return "its tile is one block row";
        return stages(device) < Traits::kMinStages ? "the device has too little shared memory" : nullptr;
    }

    // Tiles if blocks were spread at random; the plan, which knows, is on the device.
    static double expected_tiles(const Pattern& pattern) {
        const double rows = static_cast<double>(pattern.out_features / pattern.block_rows);
        const double columns = static_cast<double>(pattern.in_features / pattern.block_cols);
        const double group_rows = kTileRows / pattern.block_rows;
        double absent = 1;  // probability that a column has no block in a group
        for (int i = 0; i < group_rows; ++i)
            absent *= 1 - static_cast<double>(pattern.nnz) / (rows * columns);
        const double group_columns = columns * (1 - absent);
        // Half a tile is lost in each group on the average.
        return rows / group_rows * (group_columns * pattern.block_cols / kTileColumns + 0.5);
    }

    // The number of parts with the least estimated time. Times are counted in steps of a tile.
    static int choose_parts(const Problem& problem, const Device& device) {
        if (problem.pattern.nnz == 0 || problem.grouped()) return 1;
        constexpr double kTileOverhead = 6;        // filling the ring, storing the sums
        constexpr double kStepsPerPartial = 4e-6;  // writing, reading and adding one partial sum
        const int64_t steps = (problem.tokens + Traits::kStep - 1) / Traits::kStep;
        const double tiles = expected_tiles(problem.pattern);
        const int64_t ctas = Traits::kResident * device.multiprocessors;
        int best = 1;
        double least = 0;
        const int64_t most = std::min({kMaxParts, steps / kMinStepsOfPart, kMaxWork / problem.pattern.nnz});
        for (int count = 1; count == 1 || count <= most; ++count) {
            const int64_t waves = (static_cast<int64_t>(tiles * count) + ctas) / ctas;
            const double reduction =
                count > 1 ? kStepsPerPartial * count * static_cast<double>(problem.pattern.value_count()) : 0;
            const double time =
                static_cast<double>(waves) * (static_cast<double>(steps) / count + kTileOverhead) + reduction;
            if (count == 1 || time < least) best = count, least = time;
        }
        return best;
    }

    static size_t workspace_size(const Problem& problem, const Device& device, const Decision&) {
        const int count = choose_parts(problem, device);
        return count > 1 ? count * problem.pattern.value_count() * sizeof(typename Traits::Accumulator) : 0;
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void* workspace,
                          void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        const int parts = choose_parts(problem, device), stage_count = stages(device);
        const int64_t steps = (problem.tokens + Traits::kStep - 1) / Traits::kStep;
        SddArguments arguments{};
        arguments.y = problem.y.data;
        arguments.y_ld = problem.y.ld;
        arguments.x = problem.x.data;
        arguments.x_ld = problem.x.ld;
        arguments.values = problem.values.data;
        arguments.partial = workspace;
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.value_count = problem.pattern.value_count();
        arguments.tokens = static_cast<int>(problem.tokens);
        arguments.parts = parts;
        arguments.part_tokens = static_cast<int>((steps + parts - 1) / parts * Traits::kStep);
        arguments.row_shift = log2_of_block(problem.pattern.block_rows);
        arguments.col_shift = log2_of_block(problem.pattern.block_cols);
        arguments.stages = stage_count;
        arguments.lookahead = std::min(lookahead(stage_count), kMostAhead<typename Traits::Input>);
        arguments.accumulate = problem.accumulate;
        arguments.plan_key = plan_key(problem.pattern, problem.op, kPlan);
        arguments.offsets = problem.offsets;
        arguments.groups = problem.pattern.groups;
        arguments.group_rows =
            static_cast<int>(problem.pattern.group_out_features() / problem.pattern.block_rows);
        arguments.plan_report = problem.plan_report;
        const auto start = problem.result_dtype == Math::kResult ? start_for<Traits> : start_for<WideTraits>;
        return start(arguments, problem, device, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<Sdd>(name, "sm80_sdd");
        if (Traits::kWarps == 16) row.variant = "_16_warps";
        row.ops = bits_of(Op::sdd_tn);
        row.input_dtypes = bits_of(Math::kInput);
        row.result_dtypes = bits_of(Math::kResult, Wide::kResult);
        row.grouped = bits_of(0, 1);
        row.precision = Math::kPrecision;
        row.plan = kPlan;
        row.tile_features = kTileRows;
        row.united_features = kTileRows;
        row.tile_values = kTileRows * kTileColumns;
        return row;
    }

  private:
    // The kernel, and the one that adds partial sums, for one dtype of results.
    template <class OfResult>
    static cudaError_t start_for(const SddArguments& arguments, const Problem& problem, const Device& device,
                                 void* stream) {
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        const auto start =
            problem.grouped() ? ts::sm80::launch<sdd_kernel<OfResult, true, true, true>, SddArguments>
            : row_major_y
                ? (row_major_x ? ts::sm80::launch<sdd_kernel<OfResult, true, true>, SddArguments>
                               : ts::sm80::launch<sdd_kernel<OfResult, true, false>, SddArguments>)
                : (row_major_x ? ts::sm80::launch<sdd_kernel<OfResult, false, true>, SddArguments>
                               : ts::sm80::launch<sdd_kernel<OfResult, false, false>, SddArguments>);
        const int bytes = Traits::shared_bytes(arguments.stages);
        if (const cudaError_t error = start(arguments, Traits::kResident * device.multiprocessors,
                                            Traits::kThreads, bytes, bytes, stream))
            return error;
        if (arguments.parts == 1) return cudaSuccess;
        constexpr int kReduceThreads = 256;
        return ts::sm80::launch<sdd_reduce<typename OfResult::Math>, SddArguments>(
            arguments, 8 * device.multiprocessors, kReduceThreads, 0, 0, stream);
    }

    static constexpr int64_t kMaxParts = 16;
    static constexpr int64_t kMinStepsOfPart = 8;
    static constexpr int64_t kMaxWork = 1 << 30;  // tiles of all parts, which 32 bits number
};

}  // namespace ts::sm80

#define TS_INSTANCE(name, kernel, math, tile_rows, tile_columns, warp_rows, warp_columns) \
    namespace ts::sm80 {                                                                  \
    const Kernel& name() {                                                                \
        static constexpr Kernel kRow =                                                    \
            Sdd<math, tile_rows, tile_columns, warp_rows, warp_columns>::row(#name);      \
        return kRow;                                                                      \
    }                                                                                     \
    }
