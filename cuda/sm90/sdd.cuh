// sdd, the gradient of the block-sparse weight: W[n, k] = sum over tokens t of y[t, n] x[t, k], for the kept
// blocks only, written (or added) to their slots in values.
//
// A CTA computes tiles of two halves, one for each of two warpgroups: 64 features of y, the rows of wgmma, by
// 256 gathered features of x. One warp loads the tokens in steps of 64 through TMA: the strips of y and the
// units of x that the halves need, which the plan chose to have many units in common (see
// common/strip_plan.h), so that few bytes are loaded for what is multiplied. Blocks smaller than a strip by a
// unit are rounded up to it; sums that belong to no block are not stored. sdd_schedule.cuh says which CTA
// computes what. A tile of blocks of 128 x 128 is two of them. For two of a column, y and x change places in
// the tile, whose sums are then transposed. Such tiles are computed by teams of two CTAs, which load strips
// that both need once.
//
// Few tokens leave little time to begin and to end: what is read one thing after another is fetched ahead,
// and TMA stores the results of one tile while the next is computed.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>

#include "elementwise/sums.cuh"
#include "sm90/launch.cuh"
#include "sm90/sdd_epilogue.cuh"
#include "sm90/sdd_traits.cuh"
#include "sm90/select.h"
#include "tma/launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// The warp that fills the rings.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddProducer {
  public:
    __device__ SddProducer(const SddArguments& arguments, typename Traits::Shared& shared, int rank)
        : arguments_(arguments), shared_(shared), rank_(rank), lane_(threadIdx.x % 32), cursor_(arguments) {}

    __device__ void run(const SddPlan& plan, const SddSchedule& schedule) {
        const int team = blockIdx.x / arguments_.team_size, teams = gridDim.x / arguments_.team_size;
        for (int index = team; index < schedule.size(); index += teams) {
            const SddWork work = schedule.work(index, rank_);
            plan.prefetch(work.tile, 2 * Traits::kWindow >> arguments_.unit_shift, lane_);
            const SddTile tile = plan.tile(work.tile);
            const SddTile other = plan.tile(min(work.tile ^ 1, plan.tile_count - 1));  // in a team of two
            const bool shares = arguments_.team_size > 1 && tile.has_strips_of(other);
            const int feature = my_feature(plan, work.tile, tile);
            select(tile.is_large(arguments_.unit_shift));
            // Back and forth: the tokens that the tile before used last are still in L2.
            load(work, tile, feature, index / teams % 2 != 0,
                 arguments_.pace != nullptr && schedule.is_whole(index), shares);
        }
    }

  private:
    // Lanes load the strips and then the units of a tile, one each. The plan is asked for the units before it
    // has said how many strips there are.
    __device__ int my_feature(const SddPlan& plan, int index, const SddTile& tile) const {
        const int room = 2 * Traits::kWindow >> arguments_.unit_shift;
        const int unit = lane_ < room ? __ldg(plan.units + index * room + lane_) : -1;
        const int after_strips = __shfl_sync(~0u, unit, lane_ - tile.strips());
        return lane_ < tile.strips() ? tile.strip(lane_) : after_strips;
    }

    // Before stages of another size are filled, those that lie there must be empty.
    __device__ void select(bool large) {
        if (large == cursor_.large) return;
        auto position = cursor_.position;
        for (int i = 0; i < cursor_.stages(); ++i) {
            shared_.rings[cursor_.large].wait_empty(position);
            position.advance(cursor_.stages());
        }
        cursor_.select(large);
    }

    // `shares`: strips with the other CTA of the team. Each of them loads one for both.
    __device__ void load(const SddWork& work, const SddTile& tile, int feature, bool backwards, bool paced,
                         bool shares) {
        const bool is_strip = lane_ < tile.strips();
        const bool is_y = is_strip != tile.is_swapped();
        const bool row_major = is_y ? kRowMajorY : kRowMajorX;
        const CUtensorMap* const map = is_y ? &arguments_.y : &arguments_.x;
        const int unit_bytes = Traits::kFeatureBytes << arguments_.unit_shift;
        const int offset = is_strip ? lane_ * Traits::kStripBytes
                                    : tile.strips() * (Traits::kStripBytes - unit_bytes) + lane_ * unit_bytes;
        const int bytes = tile.features(arguments_.unit_shift) * Traits::kFeatureBytes;
        const bool loads = feature >= 0 && !(shares && is_strip && lane_ != rank_);
        const Multicast to{static_cast<uint16_t>(shares && is_strip ? 3 : 1 << rank_)};
        Ring<Traits::kMaxStages>& ring = shared_.rings[cursor_.large];
        for (int step = work.first_step; step < work.last_step; ++step) {
            const int token =
                Traits::kStep * (backwards ? work.first_step + work.last_step - 1 - step : step);
            if (paced && step % Pace::kSteps == 0 && lane_ == 0)
                pace_.begin(arguments_.pace, static_cast<int>(gridDim.x));
            __syncwarp();
            ring.wait_empty(cursor_.position);
            const Barrier& full = ring.full[cursor_.position.stage];
            if (lane_ == 0) full.arrive_and_expect_tx(bytes);
            __syncwarp();
            if (loads)
                load_box(map, full, to, shared_.stages + cursor_.stage_offset() + offset,
                         row_major ? feature : token, row_major ? token : feature);
            __syncwarp();
            cursor_.advance();
        }
    }

    const SddArguments& arguments_;
    typename Traits::Shared& shared_;
    int rank_;
    int lane_;
    Pace pace_;
    SddCursor<Traits> cursor_;
};

// One warpgroup's products of its half of all tiles.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddConsumer {
  public:
    __device__ SddConsumer(const SddArguments& arguments, typename Traits::Shared& shared, int rank, int half)
        : arguments_(arguments), shared_(shared), rank_(rank), half_(half), cursor_(arguments) {}

    __device__ void run(const SddPlan& plan, const SddSchedule& schedule) {
        float sums[kSums];
        const int team = blockIdx.x / arguments_.team_size, teams = gridDim.x / arguments_.team_size;
        for (int index = team; index < schedule.size(); index += teams) {
            // Skipping what has no steps would make the compiler think that lanes of a warp differ.
            const SddWork work = schedule.work(index, rank_);
            const SddTile tile = plan.tile(work.tile);
            cursor_.select(tile.is_large(arguments_.unit_shift));
            const int strip = half_ < tile.strips() ? half_ * Traits::kStripBytes : 0;
            const int window = tile.window(half_) << arguments_.unit_shift;
            sum_up(sums, tile.is_swapped(), strip,
                   tile.strips() * Traits::kStripBytes + window * Traits::kFeatureBytes,
                   work.last_step - work.first_step);
            // The other CTA may exit while this one stores.
            const bool is_last = index + teams >= schedule.size();
            if (is_last) cute::cluster_arrive();
            if (work.partial >= 0) {
                cudaTriggerProgrammaticLaunchCompletion();
                store_sums(partial_sums<kSums>(arguments_.partial, 2 * int64_t{work.partial} + half_), sums);
            } else if (Traits::kMayStageResults && work.exists &&
                       (arguments_.stages_results || is_last && arguments_.stages_last)) {
                SddEpilogue<Traits>(arguments_, plan, work.tile, half_)
                    .store_through(place_of_results(), sums);
            } else if (work.exists) {
                SddEpilogue<Traits>(arguments_, plan, work.tile, half_).store(sums, 0);
            }
        }
        if (team >= schedule.size()) cute::cluster_arrive();
        if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();
    }

  private:
    // In the place of the last stage or, where all stages are needed until the end, of this half's strips.
    __device__ StagedResults place_of_results() const {
        if (arguments_.stages_results)
            return {shared_.stages + Traits::kResultsAt + half_ * Traits::kResultBytes, Traits::kStripBytes};
        return {shared_.stages + half_ * Traits::kStripBytes, Traits::kSmallStageBytes};
    }

    // `strip`, `window`: where they lie in a stage.
    __device__ void sum_up(float (&sums)[kSums], bool swapped, int strip, int window, int steps) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
        // Units are as wide as strips where y and x are swapped: with the same layout, they are operands
        // alike.
        if (kRowMajorY == kRowMajorX || !__shfl_sync(~0u, swapped, 0))
            multiply_steps<kRowMajorY, kRowMajorX>(sums, arguments_.y_operand, strip, arguments_.x_operand,
                                                   window, steps);
        else
            multiply_steps<kRowMajorX, kRowMajorY>(sums, arguments_.x_operand, strip, arguments_.y_operand,
                                                   window, steps);
    }

    template <bool kRowMajorStrip, bool kRowMajorUnits>
    __device__ void multiply_steps(float (&sums)[kSums], const Operand& strip_operand, int strip,
                                   const Operand& units_operand, int window, int steps) {
        Ring<Traits::kMaxStages>& ring = shared_.rings[cursor_.large];
        int multiplied = -1;
        for (int step = 0; step < steps; ++step) {
            ring.wait_full(cursor_.position);
            const uint32_t stage = cute::cast_smem_ptr_to_uint(shared_.stages) + cursor_.stage_offset();
            multiply_step<typename Traits::template Atom<kRowMajorStrip, kRowMajorUnits>>(
                sums, strip_operand, operand_address(stage + strip), units_operand,
                operand_address(stage + window), true);
            cute::warpgroup_wait<1>();
            if (multiplied >= 0) release(ring, multiplied);
            multiplied = cursor_.position.stage;
            cursor_.advance();
        }
        cute::warpgroup_wait<0>();
        if (multiplied >= 0) release(ring, multiplied);
    }

    // To all CTAs of the team, since any may load for all.
    __device__ void release(const Ring<Traits::kMaxStages>& ring, int stage) const {
        const int thread = threadIdx.x % 128;
        if (thread < arguments_.team_size) ring.empty[stage].arrive(thread);
    }

    const SddArguments& arguments_;
    typename Traits::Shared& shared_;
    int rank_;
    int half_;
    SddCursor<Traits> cursor_;
};

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_kernel(const __grid_constant__ SddArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 128) prefetch_plan(arguments);
    if (threadIdx.x == 0) {
        if (arguments.steps > 0)
            for (const CUtensorMap* map : {&arguments.y, &arguments.x}) prefetch(map);
        for (auto& ring : shared.rings) ring.init(Traits::kHalves * arguments.team_size);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_arrive();
    const int rank = blockIdx.x % arguments.team_size;
    const SddPlan plan(arguments.plan, arguments.plan_key);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.teams, arguments.team_size,
                               arguments.may_split);
    cute::cluster_wait();
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (warp == 0)
            SddProducer<Traits, kRowMajorY, kRowMajorX>(arguments, shared, rank).run(plan, schedule);
        else
            sums::sum_items<typename Traits::Math::Element, Traits::kSumsAhead, true>(
                arguments.sums, (warp - 1) * gridDim.x + blockIdx.x, Traits::kSumWarps * gridDim.x,
                threadIdx.x % 32);
        cute::cluster_arrive();
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        SddConsumer<Traits, kRowMajorY, kRowMajorX>(arguments, shared, rank, warp / 4 - 1)
            .run(plan, schedule);
    }
    cute::cluster_wait();  // the other CTA may still arrive at barriers of this one
}

// Host side: one row of the registry.
template <class Math>
struct Sdd {
    using Traits = SddTraits<Math>;
    using WideTraits = SddTraits<Math, float>;
    static constexpr PlanShape kPlan = {Traits::kStrip, Traits::kWindow, Traits::kHalves, PlanKind::strips};

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Traits::kSharedBytes, 1)) return reason;
        return sdd_fits(problem, device) ? nullptr : "so many tokens are out of its reach";
    }

    // Beside products, which take most of what L2 gives, the warps that load nothing read so many bytes in a
    // microsecond (H200). Where the products take less time than that, a kernel of its own is faster.
    static bool sums_y(const Problem& problem, const Device& device) {
        constexpr double kBytes = 0.75e6;
        const double bytes = 2.0 * problem.tokens * problem.pattern.out_features;
        return problem.pattern.nnz > 0 && bytes < kBytes * estimate_sdd(row(""), problem, device);
    }

    // Counters of the pace and partial sums, and behind them the sums of y.
    static size_t workspace_size(const Problem& problem, const Device& device) {
        if (problem.pattern.nnz == 0) return 0;
        const bool sums_y = problem.bias_gradient.data != nullptr;
        return bytes_of_splits(problem, device) +
               (sums_y ? sums::partial_bytes(problem, sum_warps(device)) : 0);
    }

    static int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        SddArguments arguments{};
        if (const cudaError_t error = describe(arguments, problem, device)) return error;
        if (arguments.may_split) {
            const bool paced = is_paced(problem, device);
            if (const cudaError_t error = use_split_memory(arguments, workspace, paced, stream)) return error;
        }
        const auto start = problem.result_dtype == Math::kDType ? start_for<Traits> : start_for<WideTraits>;
        if (problem.bias_gradient.data == nullptr) return start(arguments, problem, stream);
        void* const partial = static_cast<char*>(workspace) + bytes_of_splits(problem, device);
        arguments.sums = sums::share(problem, sum_warps(device), partial);
        if (const cudaError_t error = start(arguments, problem, stream)) return error;
        return sums::add_partial(problem, arguments.sums, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row{name,
                   DeviceType::cuda,
                   90,
                   1u << static_cast<int>(Op::sdd_tn),
                   1u << static_cast<int>(Math::kDType),
                   Precision::highest,
                   kPlan,
                   0,
                   Traits::kHalves * Traits::kStrip,
                   0,
                   refuses,
                   workspace_size,
                   launch};
        row.result_dtypes = 1u << static_cast<int>(Math::kDType) | 1u << static_cast<int>(DType::float32);
        row.sums_y = sums_y;
        row.estimate = estimate_sdd;
        return row;
    }

  private:
    // A tile holds at most so many values.
    static constexpr int64_t kTileValues = Traits::kHalves * Traits::kStrip * Traits::kWindow;

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

    // Where tiles come one after another quickly, storing the results of one would keep the next waiting.
    // Where they take longer, or come alone, a fourth stage is worth more.
    static bool stages_results(const Problem& problem, const Device& device) {
        constexpr int kMostSteps = 12;
        return stages_last(problem) && sdd_steps(problem) <= kMostSteps &&
               fills(problem, device, kTileValues);
    }
    static bool stages_last(const Problem& problem) {
        return are_wide_blocks(problem.pattern) && !problem.accumulate &&
               problem.result_dtype == Math::kDType;
    }

    // Only where there is a round of tiles that are not split. Wide blocks have no use for it.
    static bool is_paced(const Problem& problem, const Device& device) {
        return !are_wide_blocks(problem.pattern) && fills(problem, device, kTileValues);
    }

    // The kernel, and the one that adds partial sums, for one dtype of results.
    template <class OfResult>
    static cudaError_t start_for(const SddArguments& arguments, const Problem& problem, void* stream) {
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        const auto start =
            row_major_y ? (row_major_x ? start_on<OfResult, true, true> : start_on<OfResult, true, false>)
                        : (row_major_x ? start_on<OfResult, false, true> : start_on<OfResult, false, false>);
        if (const cudaError_t error = start(arguments, stream)) return error;
        if (!arguments.may_split) return cudaSuccess;
        const int ctas = 16 * arguments.teams * arguments.team_size;
        return launch_early<sdd_reduce<OfResult>, 0>(arguments, ctas, 128, stream);
    }

    template <class OfResult, bool kRowMajorY, bool kRowMajorX>
    static cudaError_t start_on(const SddArguments& arguments, void* stream) {
        return ClusterLauncher<sdd_kernel<OfResult, kRowMajorY, kRowMajorX>, SddArguments>::launch(
            arguments, arguments.teams, arguments.team_size, Traits::kThreads, Traits::kSharedBytes, stream,
            false);
    }

    static cudaError_t describe(SddArguments& arguments, const Problem& problem, const Device& device) {
        const Pattern& pattern = problem.pattern;
        const int unit = strip_unit(pattern);
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.plan_key = plan_key(pattern, problem.op, kPlan);
        arguments.values = problem.values.data;
        arguments.y_operand = describe_operand(problem.y, Traits::kStrip);
        arguments.x_operand = describe_operand(problem.x, unit);
        arguments.plan_lines = plan_lines(pattern);
        arguments.steps = sdd_steps(problem);
        arguments.team_size = team_size(problem, device);
        arguments.teams = device.multiprocessors / arguments.team_size;
        arguments.may_split = may_split(problem, device);
        arguments.stages_results = stages_results(problem, device);
        arguments.stages_last = stages_last(problem);
        if (arguments.stages_last) {
            const int64_t lines = pattern.nnz * kWideBlock;
            if (const cudaError_t error = encode(arguments.blocks, problem.dtype, problem.values.data,
                                                 {{kWideBlock, 1, unit}, {lines, kWideBlock, unit}}))
                return error;
        }
        arguments.unit_shift = log2_of_block(unit);
        arguments.row_shift = log2_of_block(pattern.block_rows);
        arguments.col_shift = log2_of_block(pattern.block_cols);
        arguments.accumulate = problem.accumulate;
        if (problem.tokens == 0) return cudaSuccess;  // nothing is loaded
        if (const cudaError_t error =
                map(arguments.y, problem, problem.y, pattern.out_features, Traits::kStrip))
            return error;
        return map(arguments.x, problem, problem.x, pattern.in_features, unit);
    }

    static int plan_lines(const Pattern& pattern) {
        const int64_t tiles = (pattern.value_count() + kTileValues - 1) / kTileValues;
        const int units = 2 * Traits::kWindow / strip_unit(pattern);
        const int64_t words = tiles * (4 + 2 * units);  // of tiles, units and slots
        return static_cast<int>(std::min<int64_t>((sizeof(PlanHeader) + 4 * words) / 128, 4096));
    }

    // Row-major: tokens are lines of `width` features. Feature-major: features are lines of 64 tokens.
    static Operand describe_operand(const Matrix& matrix, int width) {
        const bool row_major = matrix.layout == Layout::row_major;
        Operand result =
            row_major ? operand(2 * width, width * Traits::kFeatureBytes) : operand(2 * Traits::kStep, 0);
        for (int i = 0; i < 4; ++i)
            result.step[i] = static_cast<uint32_t>(16 * i * (row_major ? 2 * width : 2) / 16);
        return result;
    }

    static cudaError_t map(CUtensorMap& map, const Problem& problem, const Matrix& matrix, int64_t features,
                           int width) {
        const bool row_major = matrix.layout == Layout::row_major;
        // What lies beside a line may not be needed before it leaves L2 again.
        const auto promotion =
            row_major && width == 32 ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
        if (row_major)
            return encode(map, problem.dtype, matrix.data,
                          {{features, 1, width}, {problem.tokens, matrix.ld, Traits::kStep}}, promotion);
        return encode(map, problem.dtype, matrix.data,
                      {{problem.tokens, 1, Traits::kStep}, {features, matrix.ld, width}}, promotion);
    }
};

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, math)                       \
    namespace ts::sm90 {                                      \
    const Kernel& name() {                                    \
        static constexpr Kernel kRow = Sdd<math>::row(#name); \
        return kRow;                                          \
    }                                                         \
    }
