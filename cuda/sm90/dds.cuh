// dds, the product of dense activations and the block-sparse weight, in both directions:
//   nt: y[t, f] = sum over k of x[t, k] W[f, k]      nn: x[t, f] = sum over k of y[t, k] W[k, f]
// with "features" f of the result and k summed over, whichever of out and in features they are.
//
// CTAs come in clusters of two and stay on their multiprocessors. A CTA computes tiles of 256, 128 or 64
// tokens x 128 features, 64 features in each of two warpgroups: features are the rows of wgmma, so that a
// warpgroup skips the steps in which its features have no block. It walks the steps of k in which one of the
// tile's block rows has a block (see common/plan.h). Three warps load through TMA: the activations, and the
// weight of each warpgroup in a ring of its own, so that neither waits for steps that only the other needs.
// What the two CTAs have in common is loaded once, by multicast: the weight if their tiles differ in tokens,
// the activations of the columns they share if they differ in block rows.
//
// Where tiles are few, those of 128 or 64 tokens are cut into parts along k, and a second kernel adds the
// sums.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/dds_epilogue.cuh"
#include "sm90/dds_producer.cuh"
#include "sm90/dds_reduce.cuh"
#include "sm90/dds_split.cuh"
#include "sm90/dds_traits.cuh"
#include "sm90/launch.cuh"
#include "sm90/select.h"
#include "tma/chunks.cuh"
#include "tma/launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// One warpgroup's products of all its tiles.
template <class Traits, bool kRowMajorInput>
class DdsConsumer {
  public:
    __device__ DdsConsumer(const DdsArguments& arguments, typename Traits::Shared& shared,
                           const DdsPlan& plan, int rank, int warpgroup)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          warpgroup_(warpgroup),
          lane_(threadIdx.x % kWarpSize) {}

    __device__ void run() {
        DdsEpilogue<Traits> epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_],
                                     warpgroup_);
        float sums[Traits::kSums];
        Work work = next_work(epilogue);
        epilogue.read_bias();
        while (work.tile >= 0) {
            epilogue.begin(Traits::first_token(work, rank_));
            const int64_t partial = partial_place<Traits>(arguments_, work, rank_, warpgroup_);
            if constexpr (Traits::kSplitsInput) products_.begin(sums);
            const bool any = multiply_all(sums, work);
            // While the last products are under way, so that what the plan says of the next tile has arrived
            // when the barriers of the epilogue wait for all that is read.
            work = next_work(epilogue);
            release_multiplied(sums);
            if (!any) clear(sums);
            if (Traits::kSplits && arguments_.partial != nullptr)
                store_sums(partial_sums<Traits::kSums>(arguments_.partial, partial), sums);
            else
                epilogue.store(sums);
        }
        epilogue.finish_stores();
    }

  private:
    using InputPosition = typename Ring<Traits::kInputStages>::Position;
    using WeightPosition = typename Ring<Traits::kWeightStages>::Position;
    static constexpr int kWarpSize = 32;

    __device__ Work next_work(DdsEpilogue<Traits>& epilogue) {
        const Work work = shared_.schedule.pop(next_, lane_);
        if (work.tile < 0) return work;
        mask_ = mask_from(work, 0);
        epilogue.prepare(Traits::rows_of(plan_, work.tile, rank_));
        return work;
    }

    // What the plan says of the lane's step, of 32 from the tile's step `first`.
    __device__ uint32_t mask_from(const Work& work, int first) const {
        const int step = first + lane_;
        return step < work.steps ? __ldg(plan_.masks + Traits::plan_index(work.step + step, rank_)) : 0;
    }

    // Starts all products of a tile; false if there are none. The last may be under way afterwards.
    __device__ bool multiply_all(float (&sums)[Traits::kSums], const Work& work) {
        bool any = false;
        for (int first = 0; first < work.steps; first += kWarpSize) {
            // Those in which the warpgroup has blocks.
            const uint32_t steps_present = __ballot_sync(~0u, (mask_ >> 16 * warpgroup_ & 0xffff) != 0);
            mask_ = mask_from(work, first + kWarpSize);
            const int count = min(kWarpSize, work.steps - first);
            for (int step = 0; step < count; ++step) {
                wait_input();
                if (steps_present >> step & 1) {
                    multiply(sums, any);
                    any = true;
                } else {
                    release_multiplied(sums);
                    release_input(input_.stage);
                }
                input_.advance();
            }
        }
        return any;
    }

    __device__ void wait_input() const {
        if constexpr (Traits::kSplitsInput)
            wait(shared_.split[input_.stage], input_.parity);
        else
            shared_.input_ring.wait_full(input_);
    }

    __device__ static void clear(float (&sums)[Traits::kSums]) {
        asm volatile("");  // a branch, which is rarely taken, is faster than choosing each sum
#pragma unroll
        for (int i = 0; i < Traits::kSums; ++i) sums[i] = 0.0f;
    }

    __device__ void multiply(float (&sums)[Traits::kSums], bool add) {
        shared_.weight_ring[warpgroup_].wait_full(weight_);
        const char* const stage = shared_.weight[warpgroup_][weight_.stage];
        const uint32_t tokens = operand_address(shared_.input[input_.stage]);
        if constexpr (Traits::Weight::kInRegisters) {
            release_multiplied(sums);  // they read registers that are written now
            products_.start(sums, stage, arguments_.tokens_by_k, tokens, add);
        } else {
            Traits::Weight::template multiply<kRowMajorInput, Traits::kTileTokens>(sums, arguments_, stage,
                                                                                   tokens, add);
            if (multiplied_) {
                cute::warpgroup_wait<1>();
                release(multiplied_input_, multiplied_weight_);
            }
        }
        multiplied_ = true;
        multiplied_input_ = input_.stage;
        multiplied_weight_ = weight_.stage;
        weight_.advance();
    }

    // Waits for the products under way and gives their stages back.
    __device__ void release_multiplied(float (&sums)[Traits::kSums]) {
        cute::warpgroup_wait<0>();  // outside of the condition, or the compiler serialises wgmma
        if (!multiplied_) return;
        if constexpr (Traits::kSplitsInput) products_.add(sums);
        release(multiplied_input_, multiplied_weight_);
        multiplied_ = false;
    }

    __device__ void release(int input, int weight) const {
        release_input(input);
        const int thread = threadIdx.x % 128;
        if (Traits::kTokenRanks > 1) {
            if (thread < Traits::kRanks) shared_.weight_ring[warpgroup_].empty[weight].arrive(thread);
        } else if (thread == 0) {
            shared_.weight_ring[warpgroup_].empty[weight].arrive();
        }
    }
    // Every warp for itself: in steps without products nothing else keeps the warps together, and one that
    // is late would mistake the stage's next use but one for the one it waits for.
    __device__ void release_input(int stage) const {
        if (Traits::kRowRanks > 1) {
            if (lane_ < Traits::kRanks) shared_.input_ring.empty[stage].arrive(lane_);
        } else if (lane_ == 0) {
            shared_.input_ring.empty[stage].arrive();
        }
    }

    const DdsArguments& arguments_;
    typename Traits::Shared& shared_;
    const DdsPlan& plan_;
    int rank_;
    int warpgroup_;
    int lane_;
    typename Ring<Traits::Schedule::kQueue>::Position next_;
    uint32_t mask_ = 0;  // what the plan says of the lane's step of the next tile
    InputPosition input_;
    WeightPosition weight_;
    bool multiplied_ = false;
    int multiplied_input_ = 0;
    int multiplied_weight_ = 0;
    typename Traits::Weight::template Products<Traits::kTileTokens> products_;
};

template <class Traits, bool kRowMajorInput>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    dds_kernel(const __grid_constant__ DdsArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const auto rank = static_cast<int>(cute::block_rank_in_cluster());
    // All of it is in memory at first: what will be read is asked for while the barriers are set up.
    const DdsPlan plan(arguments.plan, arguments.plan_key);
    if (threadIdx.x == 32) {
        if (arguments.value_rows > 0)
            for (const CUtensorMap* map : {&arguments.values, &arguments.input}) prefetch(map);
        prefetch(&arguments.output);
    }
    if (threadIdx.x == 0) {
        shared.input_ring.init(4 * Traits::kWarpgroups * Traits::kRowRanks);
        for (auto& ring : shared.weight_ring) ring.init(Traits::kTokenRanks, 1 + Traits::Weight::kOtherFills);
        for (auto& chunks : shared.residual)
            for (const Barrier& arrived : chunks) arrived.init(1);
        shared.schedule.init(1 + Traits::kWarpgroups + 4 * (Traits::kWarpgroups + Traits::kSplitsInput));
        if constexpr (Traits::kSplitsInput)
            for (const Barrier& split : shared.split) split.init(4);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_sync();
    if (Traits::kSplits && arguments.partial != nullptr)
        cudaTriggerProgrammaticLaunchCompletion();  // see dds_reduce

    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        const DdsProducer<Traits> producer{arguments, shared, plan, rank, lane, cute::elect_one_sync() != 0};
        if (warp == 0)
            producer.template load_input<kRowMajorInput>();
        else if (warp <= Traits::kWarpgroups)
            producer.load_weight(warp - 1);
        else
            shared.schedule.run(arguments.schedule, typename Traits::Costs(plan), plan.is_own,
                                blockIdx.x / Traits::kRanks, gridDim.x / Traits::kRanks, lane);
    } else if (warp >= 4 * (1 + Traits::kWarpgroups)) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        split_input<Traits>(shared, lane);
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::kComputerRegisters>();
        DdsConsumer<Traits, kRowMajorInput>(arguments, shared, plan, rank, warp / 4 - 1).run();
    }
    cute::cluster_sync();  // the other CTA may still write here
}

// Host side: one row of the registry.
template <Op kOp, class Math, int kTokenRanks, int kRowRanks, int kTileTokens,
          class Weight = PlainWeight<kOp, Math>>
struct Dds {
    using Traits = DdsTraits<Math, Weight, kTokenRanks, kRowRanks, kTileTokens>;
    static constexpr PlanShape kPlan = {Traits::kTileFeatures, Traits::kStep, kRowRanks};
    static constexpr int kSpanTokens = kTokenRanks * Traits::kTileTokens;
    static constexpr int kClusterFeatures = kRowRanks * Traits::kTileFeatures;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Traits::kSharedBytes, Traits::kRanks)) return reason;
        if constexpr (Weight::kInRegisters)
            if (const char* reason = Weight::refuses(problem)) return reason;
        if (Weight::value_rows(problem.pattern) > INT32_MAX - 128)
            return "values of 2^31 rows or more are out of its reach";
        if (most_spans(problem, device) <= 0) return "so large a weight is out of its reach";
        return refuses_results(problem.output(), problem.tokens);
    }

    // The partial sums.
    static size_t workspace_size(const Problem& problem, const Device& device) {
        return partial_bytes<Traits>(tile_count(problem) * span_count(problem), parts_of(problem, device));
    }

    static int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
        const int64_t parts = parts_of(problem, device);
        return in_chunks(problem, kSpanTokens, most_spans(problem, device),
                         [&](const Problem& chunk) { return launch_chunk(chunk, parts, workspace, stream); });
    }

    static constexpr Kernel row(const char* name) {
        Kernel row{name,
                   DeviceType::cuda,
                   90,
                   1u << static_cast<int>(kOp),
                   1u << static_cast<int>(Math::kDType),
                   Math::kPrecision,
                   kPlan,
                   kSpanTokens,
                   kClusterFeatures,
                   0,
                   refuses,
                   workspace_size,
                   launch,
                   Traits::kSplits,
                   Weight::kStorages,
                   Weight::kDTypes};
        row.estimate = Weight::kEstimate;
        row.clusters = count_clusters<dds_kernel<Traits, true>, DdsArguments, Traits>;
        return row;
    }

  private:
    static cudaError_t launch_chunk(const Problem& problem, int64_t parts, void* workspace, void* stream) {
        const int64_t tiles = tile_count(problem), spans = span_count(problem);
        if (tiles * spans == 0) return cudaSuccess;
        DdsArguments arguments{};
        if (const cudaError_t error = describe(arguments, problem, tiles, spans, parts)) return error;
        if constexpr (Traits::kSplits)
            if (parts > 1) {
                arguments.partial = static_cast<float4*>(workspace);
                return multiply_parts(arguments, problem, tiles * spans, stream);
            }
        return multiply(arguments, problem, tiles * spans, stream);
    }

    static int64_t parts_of(const Problem& problem, const Device& device) {
        if (!Traits::kSplits) return 1;
        return part_count(problem, tile_count(problem) * span_count(problem),
                          device.multiprocessors / Traits::kRanks);
    }

    static cudaError_t multiply(const DdsArguments& arguments, const Problem& problem, int64_t items,
                                void* stream) {
        auto start = ClusterLauncher<dds_kernel<Traits, true>, DdsArguments>::launch;
        if constexpr (!Weight::kInRegisters)
            if (problem.input().layout != Layout::row_major)
                start = ClusterLauncher<dds_kernel<Traits, false>, DdsArguments>::launch;
        const int64_t clusters = std::min<int64_t>(items, Traits::Schedule::kMaxClusters);
        return start(arguments, clusters, Traits::kRanks, Traits::kThreads, Traits::kSharedBytes, stream,
                     false);
    }

    static cudaError_t multiply_parts(DdsArguments& arguments, const Problem& problem, int64_t items,
                                      void* stream) {
        const int64_t all_parts = items * arguments.schedule.by_parts.divisor;
        if (const cudaError_t error = multiply(without_epilogue(arguments), problem, all_parts, stream))
            return error;
        return reduce_parts<Traits>(arguments, items, stream);
    }

    static int64_t tile_count(const Problem& problem) {
        const int64_t tile_rows = kClusterFeatures / problem.row_block();
        return (problem.features() / problem.row_block() + tile_rows - 1) / tile_rows;
    }
    static int64_t span_count(const Problem& problem) {
        return (problem.tokens + kSpanTokens - 1) / kSpanTokens;
    }

    static int64_t most_spans(const Problem& problem, const Device& device) {
        return Traits::Schedule::most_spans(tile_count(problem), problem.k_size() / Traits::kStep + 1,
                                            device.multiprocessors);
    }

    static cudaError_t describe(DdsArguments& arguments, const Problem& problem, int64_t tiles, int64_t spans,
                                int64_t parts) {
        const Pattern& pattern = problem.pattern;
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.plan_key = plan_key(pattern, problem.op, kPlan);
        arguments.tokens = static_cast<int>(problem.tokens);
        arguments.k_size = static_cast<int>(problem.k_size());
        arguments.k_block = problem.k_block();
        arguments.value_rows = Weight::value_rows(pattern);
        arguments.spans = static_cast<int>(spans);
        arguments.schedule = schedule_arguments(static_cast<int>(tiles), arguments.spans,
                                                static_cast<int>(parts), band_spans(arguments.k_size));
        if (const cudaError_t error = describe_results<Traits>(arguments, problem)) return error;
        if (arguments.value_rows == 0) return cudaSuccess;  // nothing is loaded, there may be nothing to map
        if constexpr (!Weight::kInRegisters) arguments.weight = Weight::operand(arguments);
        arguments.tokens_by_k = describe_input<Traits>(arguments, problem.input().layout);
        if (const cudaError_t error = map_input(arguments, problem)) return error;
        return Weight::map(arguments, problem);
    }

    // So many tokens that their activations take a third of L2, but two spans at least: within a band tiles
    // are in order, and the longer the order the better they are balanced.
    static int band_spans(int k_size) {
        constexpr int64_t kPanelBytes = 16 << 20;
        const int64_t bytes = int64_t{kSpanTokens} * std::max(k_size, 1) * Traits::kElementBytes;
        return static_cast<int>(std::max<int64_t>(2, kPanelBytes / bytes));
    }

    static cudaError_t map_input(DdsArguments& arguments, const Problem& problem) {
        const Matrix& matrix = problem.input();
        const int width = k_width<Traits>(arguments);
        const int64_t k_size = arguments.k_size, tokens = problem.tokens;
        if (matrix.layout == Layout::row_major)
            return encode(arguments.input, Math::kMapType, matrix.data,
                          {{k_size, 1, width}, {tokens, matrix.ld, Traits::kTileTokens}});
        constexpr int kAtom = 64;
        const int64_t atoms = std::max<int64_t>(1, tokens / kAtom);
        if (const cudaError_t error = encode(
                arguments.input, problem.dtype, matrix.data,
                {{kAtom, 1, kAtom}, {k_size, matrix.ld, width}, {atoms, kAtom, Traits::kTileTokens / kAtom}}))
            return error;
        return encode(arguments.input_tail, problem.dtype, matrix.data,
                      {{tokens, 1, kAtom}, {k_size, matrix.ld, width}});
    }
};

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, op, math, token_ranks, row_ranks, tile_tokens)                           \
    namespace ts::sm90 {                                                                                   \
    const Kernel& name() {                                                                                 \
        static constexpr Kernel kRow = Dds<Op::op, math, token_ranks, row_ranks, tile_tokens>::row(#name); \
        return kRow;                                                                                       \
    }                                                                                                      \
    }
