// dds for blocks of 16 or 32 features of the result by as many k or more, in both directions:
//   nt: y[t, f] = sum over k of x[t, k] W[f, k]      nn: x[t, f] = sum over k of y[t, k] W[k, f]
// with "features" f of the result and k summed over, whichever of out and in features they are. A long block
// counts as several, which are square.
//
// Features are the rows of wgmma. Of its 64 rows each warp has 16 and gives their weight from registers,
// zeros where its block row has no block: so two block rows of 32 or four of 16 share their products, chosen
// so that they have as many columns as possible in common, and k in which none of them has a block cost
// nothing. Four warpgroups take turns: while one reads its weight the others multiply.
//
// Activations are walked in whole steps of k, with what there is of the weight. Its blocks are packed in the
// order in which they are multiplied, transposed where need be, so that those of a step are one copy: by the
// caller once for many calls, or by each call. With few tokens that may take as long as all else: then blocks
// that need not be transposed are copied one by one from where they are. The two CTAs of a cluster compute
// different features from the same activations, of which each loads one half for both; or the same features
// of different tokens, each loading half of the weight: tiles that may fit features and tokens better.
//
// The plan says how wide steps are, since only who builds it sees how many blocks share one; rings are made
// for either (see NarrowKinds).
//
// Where tiles are few, the steps of each are cut into parts, for which a cluster has two CTAs each. In the
// end the CTAs of one part add up the sums of a warpgroup, which the others put into their shared memory.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/dds_epilogue.cuh"
#include "sm90/dds_narrow_pack.cuh"
#include "sm90/dds_narrow_traits.cuh"
#include "sm90/launch.cuh"
#include "sm90/select.h"
#include "tma/chunks.cuh"
#include "tma/launch.cuh"
#include "tma/partial_sums.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// The warp that fills the stages.
template <class Traits, bool kRowMajorInput>
class NarrowProducer {
  public:
    __device__ NarrowProducer(const DdsArguments& arguments, typename Traits::Shared& shared,
                              const DdsPlan& plan, int rank, int first_rank, int lane)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          first_rank_(first_rank),
          lane_(lane),
          elected_(cute::elect_one_sync() != 0) {}

    __device__ void run() {
        typename Ring<Traits::Schedule::kQueue>::Position next;
        cudaGridDependencySynchronize();  // the weight is packed
        while (true) {
            const Work work = shared_.schedule.pop(next, lane_);
            if (work.tile < 0) return;
            const int token =
                Traits::first_token(work, rank_) + Traits::row_rank(rank_) * Traits::kRankTokens;
            for (int first = 0; first < work.steps; first += 32) {
                const int step = work.step + min(first + lane_, work.steps - 1);
                const int k = __ldg(plan_.k + step);
                const int* const starts = plan_.starts + Traits::plan_index(step, rank_);
                const int begin = __ldg(starts), end = __ldg(starts + 1);
                const int count = min(32, work.steps - first);
                const auto slots_of = [&](int i) {
                    if (arguments_.packed != nullptr) return 0;
                    return slot_of_lane(__shfl_sync(~0u, begin, i), __shfl_sync(~0u, end, i));
                };
                int next_slots = slots_of(0);
                for (int i = 0; i < count; ++i) {
                    const int slots = next_slots, block = __shfl_sync(~0u, begin, i);
                    next_slots = slots_of(min(i + 1, count - 1));
                    load_step(block, __shfl_sync(~0u, end, i), slots, __shfl_sync(~0u, k, i), token);
                }
            }
        }
    }

  private:
    using Position = typename Ring<Traits::kStages>::Position;

    // Of blocks that are not packed: of the lane's block, from `block` on.
    __device__ int slot_of_lane(int block, int end) const {
        return block + lane_ < end ? __ldg(plan_.slots + block + lane_) : 0;
    }

    // The blocks from `block` to `end`; `slots`: see slot_of_lane().
    __device__ void load_step(int block, int end, int slots, int k, int token) {
        const int blocks = end - block;
        reserve(blocks);
        const Barrier& full = shared_.ring.full[position_.stage];
        if (elected_) {
            shared_.first_block[position_.stage] = head_;
            full.arrive_and_expect_tx(Traits::kInputBytes + blocks * Traits::kBlockBytes);
            load_input(full, shared_.input[position_.stage], k, token);
            if (arguments_.packed != nullptr) load_packed(full, block, blocks);
        }
        __syncwarp();
        if (arguments_.packed == nullptr) load_blocks(full, block, end, slots);
        head_ += blocks;
        position_.advance();
    }

    // The CTAs of several ranks of tokens load a part each, for both.
    __device__ void load_packed(const Barrier& full, int block, int blocks) const {
        const int rank = Traits::token_rank(rank_);
        const int first = blocks * rank / Traits::kTokenRanks;
        const int count = blocks * (rank + 1) / Traits::kTokenRanks - first;
        if (count > 0)
            load_bytes(arguments_.packed + int64_t{block + first} * Traits::kBlockBytes, full,
                       shared_by(Traits::kTokenRanks), shared_.weight[head_ + first],
                       count * Traits::kBlockBytes);
    }

    // Swizzled on their way, they are as if they were packed.
    __device__ void load_blocks(const Barrier& full, int block, int end, int slots) const {
        for (int i = 0; i < end - block; ++i) {
            if (i > 0 && i % 32 == 0) slots = slot_of_lane(block + i, end);
            const int slot = __shfl_sync(~0u, slots, i % 32);
            if (elected_ && i % Traits::kTokenRanks == Traits::token_rank(rank_))
                load_box(&arguments_.values, full, shared_by(Traits::kTokenRanks), shared_.weight[head_ + i],
                         0, slot * Traits::kBlock);
        }
        __syncwarp();
    }

    // Of the tokens from `token` on: this CTA's own, or the half of them that it loads for both.
    __device__ void load_input(const Barrier& full, char* stage, int k, int token) const {
        const Multicast to = shared_by(Traits::kRowRanks);
        const int place = Traits::row_rank(rank_) * Traits::kRankTokens;  // of these tokens in the stage
        if (kRowMajorInput) {
            for (int i = 0; i < Traits::kLines; ++i)
                load_box(&arguments_.input, full, to,
                         stage + (i * Traits::kTileTokens + place) * Traits::kLine * 2, k + i * Traits::kLine,
                         token);
        } else {
            for (int i = 0; i < Traits::kRankTokens; i += Traits::kBoxTokens)
                for (int j = 0; j < Traits::kStep; j += Traits::kLine)
                    load_box(&arguments_.input, full, to,
                             stage + ((place + i) * Traits::kStep + j * Traits::kBoxTokens) * 2, token + i,
                             k + j);
        }
    }

    // What so many ranks of the cluster share goes to both CTAs that have a part.
    __device__ Multicast shared_by(int ranks) const {
        return {ranks == 1 ? uint16_t{1} : static_cast<uint16_t>(Traits::kAllRanks << first_rank_)};
    }

    // Waits until a stage is free, and a place for its blocks. They do not go round the end of the memory.
    __device__ void reserve(int blocks) {
        int skipped;
        while (true) {
            if (stages_ == 0) head_ = used_ = 0;
            skipped = head_ + blocks > Traits::kBlocks ? Traits::kBlocks - head_ : 0;
            if (stages_ < Traits::kStages && used_ + skipped + blocks <= Traits::kBlocks) break;
            wait(shared_.ring.empty[oldest_.stage], oldest_.parity);
            used_ -= shared_.taken_blocks[oldest_.stage];
            oldest_.advance();
            --stages_;
        }
        if (head_ + blocks > Traits::kBlocks) head_ = 0;
        used_ += skipped + blocks;
        ++stages_;
        __syncwarp();
        if (elected_) shared_.taken_blocks[position_.stage] = skipped + blocks;
        __syncwarp();
    }

    const DdsArguments& arguments_;
    typename Traits::Shared& shared_;
    const DdsPlan& plan_;
    int rank_;        // of the two that have a part
    int first_rank_;  // of them in the cluster
    int lane_;
    bool elected_;  // the one lane that starts copies, from values that all lanes have
    Position position_;
    Position oldest_;  // of the stages in use
    int stages_ = 0;   // in use
    int head_ = 0;     // where blocks go next
    int used_ = 0;     // places in use or skipped
};

// One warpgroup's products of all its tiles.
template <class Traits, bool kRowMajorInput>
class NarrowConsumer {
  public:
    __device__ NarrowConsumer(const DdsArguments& arguments, typename Traits::Shared& shared,
                              const DdsPlan& plan, int rank, int first_rank, int warp, int lane)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          first_rank_(first_rank),
          warpgroup_(warp / 4),
          warp_(warp % 4),
          lane_(lane),
          place_(Weight::first_place(warp_ * Traits::kWarpFeatures % Traits::kBlock, lane)) {}

    __device__ void run() {
        Epilogue epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_], warpgroup_);
        float sums[Traits::kSums];
        Work work = next_work(epilogue);
        epilogue.read_bias();
        while (work.tile >= 0) {
            epilogue.begin(Traits::first_token(work, rank_));
            multiply_all(sums, work);
            work = next_work(epilogue);
            epilogue.store(sums);
        }
        epilogue.finish_stores();
    }

    // Of the one part of a tile that the CTA has.
    __device__ void run_part() {
        Epilogue epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_], warpgroup_);
        float sums[Traits::kSums];
        const Work work = next_work(epilogue);
        const int parts = arguments_.schedule.by_parts.divisor, adding = warpgroup_ % parts;
        if (work.part == adding) {
            epilogue.read_bias();
            epilogue.begin(Traits::first_token(work, rank_));
        }
        multiply_all(sums, work);
        cute::cluster_sync();  // nobody needs the stages any more
        const auto others = reinterpret_cast<float4*>(shared_.input);
        const int first = warpgroup_ / parts * (parts - 1);
        if (work.part != adding) {
            const int place = first + work.part - (work.part > adding);
            void* const to = __cluster_map_shared_rank(others, adding * Traits::kRanks + rank_);
            store_sums(partial_sums<Traits::kSums>(static_cast<float4*>(to), place), sums);
        }
        cute::cluster_sync();
        if (work.part == adding) {
            for (int i = 0; i < parts - 1; ++i) add(sums, partial_sums<Traits::kSums>(others, first + i));
            epilogue.store(sums);
            epilogue.finish_stores();
        }
    }

  private:
    using Weight = typename Traits::Weight;
    using Epilogue = DdsEpilogue<Traits>;
    using Atom =
        typename NarrowAtom<typename Traits::Math,
                            kRowMajorInput ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN>::Type;
    static constexpr int kQuarters = Traits::kLine / 16;
    static constexpr int kBlockQuarters = Traits::kBlock / 16;
    // Of activations as an operand, but for their address; see operand().
    static constexpr uint32_t kInput = kRowMajorInput ? 0 : Traits::kBoxTokens * Traits::kStep * 2 / 16 << 16;

    __device__ static void add(float (&sums)[Traits::kSums], const float4* from) {
#pragma unroll
        for (int i = 0; i < Traits::kSums / 4; ++i) add_vector(from[128 * i], sums + 4 * i);
    }

    __device__ Work next_work(Epilogue& epilogue) {
        const Work work = shared_.schedule.pop(next_, lane_);
        if (work.tile < 0) return work;
        masks_ = masks_from(work, 0);
        epilogue.prepare(Traits::rows_of(plan_, work.tile, rank_));
        return work;
    }

    // What the plan says of the lane's step, of 32 from the tile's step `first`.
    __device__ int2 masks_from(const Work& work, int first) const {
        const int step = work.step + min(first + lane_, work.steps - 1);
        if (work.steps == 0) return {};
        const auto* const masks = reinterpret_cast<const int2*>(plan_.masks);
        return __ldg(masks + Traits::plan_index(step, rank_) * Traits::kWarpgroups + warpgroup_);
    }

    __device__ void multiply_all(float (&sums)[Traits::kSums], const Work& work) {
#pragma unroll
        for (int i = 0; i < Traits::kSums; ++i) sums[i] = 0.0f;
        for (int first = 0; first < work.steps; first += 32) {
            const int2 masks = masks_;
            masks_ = masks_from(work, first + 32);
            const int count = min(32, work.steps - first);
            for (int i = 0; i < count; ++i)
                multiply_step(sums, __shfl_sync(~0u, masks.x, i), __shfl_sync(~0u, masks.y, i));
        }
    }

    // `mask`: for each 16 of k which 16 features have a block. `firsts`: the first block of each warp.
    __device__ void multiply_step(float (&sums)[Traits::kSums], uint32_t mask, uint32_t firsts) {
        shared_.ring.wait_full(position_);
        const uint32_t input = kInput + operand_address(shared_.input[position_.stage]);
        const uint32_t block = shared_.first_block[position_.stage] + (firsts >> 8 * warp_ & 0xff);
        uint32_t weight = place_ + block * Traits::kBlockBytes;
        constexpr uint32_t kNext =
            kRowMajorInput ? Traits::kTileTokens * Traits::kLine * 2 / 16 : Traits::kLine * 128 / 16;
#pragma unroll
        for (int line = 0; line < Traits::kLines; ++line)
            if (const uint32_t present = mask >> 16 * line & 0xffff)
                multiply(sums, present, weight, input + line * kNext);
        // Every warp for itself, since without products nothing keeps them together.
        if (lane_ < Traits::kRanks) shared_.ring.empty[position_.stage].arrive(first_rank_ + lane_);
        position_.advance();
    }

    // 64 of k. `weight`: where the warp's next block is.
    __device__ void multiply(float (&sums)[Traits::kSums], uint32_t mask, uint32_t& weight, uint32_t input) {
        WeightFragment fragments[kQuarters];
        const uint32_t own = mask >> warp_;
#pragma unroll
        for (int k16 = 0; k16 < kQuarters; k16 += kBlockQuarters) {
            const bool present = own >> 4 * k16 & 1;
#pragma unroll
            for (int i = 0; i < kBlockQuarters; ++i) {
                WeightFragment& fragment = fragments[k16 + i];
                fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0;
                if (present) Weight::read(fragment, shared_.weight[0], weight, i);
            }
            if (present) weight += Traits::kBlockBytes;
        }
        cute::warpgroup_arrive();
#pragma unroll
        for (int k16 = 0; k16 < kQuarters; k16 += kBlockQuarters) {
            if ((mask >> 4 * k16 & 0xf) == 0) continue;
#pragma unroll
            for (int i = k16; i < k16 + kBlockQuarters; ++i)
                fma(sums, fragments[i],
                    uint64_t{arguments_.tokens_by_k.high} << 32 | (input + i * (kRowMajorInput ? 2 : 128)),
                    std::make_index_sequence<Traits::kSums>());
            cute::warpgroup_commit_batch();
        }
        cute::warpgroup_wait<0>();
    }

    template <size_t... kIndex>
    __device__ static void fma(float (&sums)[Traits::kSums], const WeightFragment& a, uint64_t b,
                               std::index_sequence<kIndex...>) {
        Atom::fma(a[0], a[1], a[2], a[3], b, sums[kIndex]..., cute::SM90::GMMA::ScaleOut::One);
    }

    const DdsArguments& arguments_;
    typename Traits::Shared& shared_;
    const DdsPlan& plan_;
    int rank_;
    int first_rank_;
    int warpgroup_;
    int warp_;
    int lane_;
    uint32_t place_;  // see Weight::first_place()
    typename Ring<Traits::Schedule::kQueue>::Position next_;
    int2 masks_ = {};  // what the plan says of the lane's step of the next tile
    typename Ring<Traits::kStages>::Position position_;
};

// All that a CTA does.
template <class Traits, bool kRowMajorInput>
__device__ __forceinline__ void run_narrow(const DdsArguments& arguments, const DdsPlan& plan, char* memory) {
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const auto cluster_rank = static_cast<int>(cute::block_rank_in_cluster());
    const int rank = cluster_rank % Traits::kRanks, first_rank = Traits::kSplits ? cluster_rank - rank : 0;
    if (threadIdx.x == 32) {
        if (arguments.value_rows > 0) prefetch(&arguments.input);
        if (arguments.value_rows > 0 && arguments.packed == nullptr) prefetch(&arguments.values);
        prefetch(&arguments.output);
    }
    if (threadIdx.x == 0) {
        shared.ring.init(4 * Traits::kWarpgroups * Traits::kRanks);
        for (auto& chunks : shared.residual)
            for (const Barrier& arrived : chunks) arrived.init(1);
        shared.schedule.init(1 + 4 * Traits::kWarpgroups);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_sync();

    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<32>();
        if (warp == 0)
            NarrowProducer<Traits, kRowMajorInput>(arguments, shared, plan, rank, first_rank, lane).run();
        else if (warp == 1)
            shared.schedule.run(arguments.schedule, typename Traits::Costs(plan), plan.is_own,
                                blockIdx.x / Traits::kRanks, gridDim.x / Traits::kRanks, lane);
    } else {
        cutlass::arch::warpgroup_reg_alloc<112>();
        NarrowConsumer<Traits, kRowMajorInput> consumer(arguments, shared, plan, rank, first_rank, warp - 4,
                                                        lane);
        if constexpr (Traits::kSplits)
            consumer.run_part();
        else
            consumer.run();
    }
    if (Traits::kSplits && warp < 4) {  // as the others do
        cute::cluster_sync();
        cute::cluster_sync();
    }
    cute::cluster_sync();  // the other CTA may still write here
}

template <class Kinds, bool kRowMajorInput>
__global__ void __launch_bounds__(Kinds::kThreads, 1)
    dds_narrow_kernel(const __grid_constant__ DdsArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    const DdsPlan plan(arguments.plan, arguments.plan_key);
    // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
    const int step = __shfl_sync(~0u, plan.step, 0), fill = __shfl_sync(~0u, plan.fill, 0);
    if (step == Kinds::Crowded::kStep)
        run_narrow<typename Kinds::Crowded, kRowMajorInput>(arguments, plan, memory);
    else if (fill <= Kinds::kThinFill)
        run_narrow<typename Kinds::Thin, kRowMajorInput>(arguments, plan, memory);
    else
        run_narrow<typename Kinds::Common, kRowMajorInput>(arguments, plan, memory);
}

// Host side: one row of the registry.
template <class Math, int kTokenRanks, int kRowRanks, template <class, int> class Weight = PlainNarrowWeight>
struct DdsNarrow {
    template <int kBlock, bool kSplits>
    using Kinds = NarrowKinds<Math, Weight<Math, kBlock>, kTokenRanks, kSplits>;
    // For what is the same for all blocks and kinds.
    using Common = typename Kinds<32, false>::Common;
    static_assert(Common::kRowRanks == kRowRanks);
    static constexpr int kClusterTokens = kTokenRanks * Common::kTileTokens;
    static constexpr int kClusterFeatures = kRowRanks * Common::kTileFeatures;
    static constexpr PlanShape kPlan = {kClusterFeatures, Common::kStep, kRowRanks, PlanKind::aligned};

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Kinds<32, false>::kSharedBytes, Common::kRanks))
            return reason;
        if (problem.row_block() > 32 || problem.row_block() > problem.k_block())
            return "its blocks have 16 or 32 features of the result and at least as many of k";
        if (most_spans(problem, device) <= 0 || square_count(problem) > INT32_MAX)
            return "so large a weight is out of its reach";
        return refuses_results(problem.output(), problem.tokens);
    }

    // The packed weight, where each call packs.
    static size_t workspace_size(const Problem& problem, const Device& device) {
        return packs_itself(problem, device) ? packed_size(problem) : 0;
    }

    static size_t packed_size(const Problem& problem) {
        constexpr int64_t kWide = Weight<Math, 32>::kBlockBytes, kNarrow = Weight<Math, 16>::kBlockBytes;
        return square_count(problem) * (is_wide(problem) ? kWide : kNarrow);
    }

    static int32_t pack(const Problem& problem, void* packed, void* stream) {
        return is_wide(problem) ? pack_as<Weight<Math, 32>>(problem, packed, stream)
                                : pack_as<Weight<Math, 16>>(problem, packed, stream);
    }

    static int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
        const bool wide = is_wide(problem);
        int64_t parts = 1;
        if (const cudaError_t error = (wide ? find_parts<32> : find_parts<16>)(problem, device, parts))
            return error;
        const auto start = parts > 1 ? (wide ? launch_as<32, true> : launch_as<16, true>)
                                     : (wide ? launch_as<32, false> : launch_as<16, false>);
        const int64_t most = most_spans(problem, device);
        if (span_count(problem) <= most) return start(problem, device, parts, workspace, stream);
        Problem packed = problem;  // once for all chunks
        if (packs_itself(problem, device)) {
            packed.packed = workspace;
            if (const int32_t error = pack(problem, workspace, stream)) return error;
        }
        return in_chunks(packed, kClusterTokens, most,
                         [&](const Problem& chunk) { return start(chunk, device, parts, nullptr, stream); });
    }

    static constexpr Kernel row(const char* name) {
        Kernel row{name,
                   DeviceType::cuda,
                   90,
                   1u << static_cast<int>(Op::dds_nt) | 1u << static_cast<int>(Op::dds_nn),
                   1u << static_cast<int>(Math::kDType),
                   Precision::highest,
                   kPlan,
                   kClusterTokens,
                   kClusterFeatures,
                   0,
                   refuses,
                   workspace_size,
                   launch,
                   true,
                   Weight<Math, 32>::kStorages,
                   Weight<Math, 32>::kDTypes,
                   0,
                   nullptr,
                   nullptr,
                   packed_size,
                   pack};
        row.estimate = estimate_narrow;
        return row;
    }

  private:
    // So many that all clusters are there at a time.
    template <int kBlock>
    static cudaError_t find_parts(const Problem& problem, const Device& device, int64_t& parts) {
        using Split = Kinds<kBlock, true>;
        const int64_t items = tile_count(problem) * span_count(problem);
        for (parts = narrow_parts(problem, device, kPlan); parts > 1; --parts) {
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
    static bool is_wide(const Problem& problem) { return problem.row_block() == 32; }
    static int64_t square_count(const Problem& problem) {
        return problem.pattern.nnz * (problem.k_block() / problem.row_block());
    }
    static bool packs_itself(const Problem& problem, const Device& device) {
        return problem.packed == nullptr && !narrow_reads_blocks(problem, device, kPlan) &&
               problem.pattern.nnz > 0;
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
    static int32_t launch_as(const Problem& problem, const Device& device, int64_t parts, void* workspace,
                             void* stream) {
        using Own = Kinds<kBlock, kInParts>;
        const int64_t tiles = tile_count(problem), spans = span_count(problem);
        if (tiles * spans == 0) return cudaSuccess;
        DdsArguments arguments{};
        const bool packs = packs_itself(problem, device);
        arguments.packed = static_cast<const char*>(packs ? workspace : problem.packed);
        if (const cudaError_t error = describe(arguments, problem, tiles, spans, parts)) return error;
        if (packs)
            if (const cudaError_t error = pack_as<Weight<Math, kBlock>>(problem, workspace, stream))
                return error;
        const auto start = problem.input().layout == Layout::row_major
                               ? ClusterLauncher<dds_narrow_kernel<Own, true>, DdsArguments>::launch
                               : ClusterLauncher<dds_narrow_kernel<Own, false>, DdsArguments>::launch;
        const int64_t clusters = std::min<int64_t>(tiles * spans, Common::Schedule::kMaxClusters);
        return start(arguments, clusters, static_cast<int>(parts) * Own::kRanks, Own::kThreads,
                     Own::kSharedBytes, stream, packs);
    }

    template <class Format>
    static cudaError_t pack_as(const Problem& problem, void* packed, void* stream) {
        constexpr int kThreads = 256;
        auto count = static_cast<int>(square_count(problem));
        int squares = problem.k_block() / problem.row_block();
        if (count == 0) return cudaSuccess;
        const auto kernel =
            problem.forward() ? pack_narrow_kernel<Format, false> : pack_narrow_kernel<Format, true>;
        const int64_t ctas = (int64_t{count} * 32 + kThreads - 1) / kThreads;
        const void* plan = problem.plan;
        int key = plan_key(problem.pattern, problem.op, kPlan);
        void* values = problem.values.data;
        void* parameters[] = {&plan, &key, &count, &squares, &values, &packed};
        return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), static_cast<unsigned>(ctas), kThreads,
                                parameters, 0, static_cast<cudaStream_t>(stream));
    }

    static cudaError_t describe(DdsArguments& arguments, const Problem& problem, int64_t tiles, int64_t spans,
                                int64_t parts) {
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.plan_key = plan_key(problem.pattern, problem.op, kPlan);
        arguments.value_rows = problem.pattern.nnz * problem.pattern.block_rows;
        arguments.spans = static_cast<int>(spans);
        arguments.schedule =
            schedule_arguments(static_cast<int>(tiles), arguments.spans, static_cast<int>(parts),
                               static_cast<int>(parts) * band_spans(problem, tiles, spans));
        arguments.tokens_by_k = operand(128, 0);
        if (arguments.value_rows > 0)
            if (const cudaError_t error = map_input(arguments, problem)) return error;
        if (arguments.value_rows > 0 && arguments.packed == nullptr)
            if (const cudaError_t error = map_blocks(arguments, problem)) return error;
        return describe_results<Common>(arguments, problem);
    }

    // So many tokens that their activations take a sixth of L2. In two rounds nearly all is under way at
    // once, and long tiles, with which a band begins, should not have to wait for the second: all tokens are
    // one band if L2 holds their activations.
    static int band_spans(const Problem& problem, int64_t tiles, int64_t spans) {
        constexpr int64_t kPanelBytes = 8 << 20, kHeldBytes = 32 << 20;
        const int64_t bytes = int64_t{kClusterTokens} * std::max<int64_t>(problem.k_size(), 1) * 2;
        if (tiles * spans <= Common::Schedule::kMaxClusters && spans * bytes <= kHeldBytes)
            return static_cast<int>(spans);
        return static_cast<int>(std::max<int64_t>(1, kPanelBytes / bytes));
    }

    static cudaError_t map_blocks(DdsArguments& arguments, const Problem& problem) {
        const int block = problem.pattern.block_rows;
        return encode(arguments.values, problem.dtype, problem.values.data,
                      {{block, 1, block}, {arguments.value_rows, block, block}});
    }

    static cudaError_t map_input(DdsArguments& arguments, const Problem& problem) {
        const Matrix& matrix = problem.input();
        if (matrix.layout == Layout::row_major)
            return encode(
                arguments.input, problem.dtype, matrix.data,
                {{problem.k_size(), 1, Common::kLine}, {problem.tokens, matrix.ld, Common::kRankTokens}});
        return encode(
            arguments.input, problem.dtype, matrix.data,
            {{problem.tokens, 1, Common::kBoxTokens}, {problem.k_size(), matrix.ld, Common::kLine}});
    }
};

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks)                             \
    namespace ts::sm90 {                                                                    \
    const Kernel& name() {                                                                  \
        static constexpr Kernel kRow = DdsNarrow<math, token_ranks, row_ranks>::row(#name); \
        return kRow;                                                                        \
    }                                                                                       \
    }
