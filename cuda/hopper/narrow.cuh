// Forward and gradient of x for blocks of 16 or 32 features: loading, multiplying, storing.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm75.hpp>

#include <algorithm>

#include "common/tf32.cuh"
#include "common/weight.h"
#include "hopper/atoms.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/gemm.cuh"
#include "hopper/weights.cuh"
#include "tma/partial_sums.cuh"
#include "tma/ring.cuh"

namespace ts::sm90 {

// The weight formats of dds kernels for narrow blocks (see common/weight.h), which multiply from registers.
// The weight is packed first, see narrow_rows.cuh; here is what a packed block looks like.

// A packed block is [kBlock features][kBlock of k]. Of its lines of kLine bytes, vectors of 16 are swizzled
// as TMA does over that width, so that eight features can be read from shared memory at once.
template <class Math, int kBlock_>
struct DenseNarrowWeight : DenseStorage {
    using Value = typename Math::Value;
    static constexpr int kBlock = kBlock_;
    static constexpr int kBlockBytes = kBlock * kBlock * sizeof(Value);

    // One warp packs a block, which is features by k or, transposed, k by features, in lines of `width`
    // elements. A lane moves vectors, which it reads side by side with the other lanes.
    template <bool kTransposed>
    __device__ static void pack(const Value* block, int width, char* packed, int lane) {
        constexpr int kAll = kBlock * kVectors / 32;
        alignas(16) Value elements[kAll][kVector];
        int places[kAll];
#pragma unroll
        for (int i = 0; i < kAll; ++i) {
            const int index = i * 32 + lane;
            const int feature = kTransposed ? index % kBlock : index / kVectors;
            const int vector = kTransposed ? index / kBlock : index % kVectors;
            if (kTransposed) {
#pragma unroll
                for (int k = 0; k < kVector; ++k)
                    elements[i][k] = block[(vector * kVector + k) * width + feature];
            } else {
                reinterpret_cast<uint4&>(elements[i]) =
                    reinterpret_cast<const uint4*>(block + feature * width)[vector];
            }
            if constexpr (std::is_same_v<Value, float> && Math::kPrecision == Precision::tf32)
#pragma unroll
                for (float& value : elements[i]) value = __uint_as_float(round_to_tf32(value));
            places[i] = place(feature, vector);
        }
#pragma unroll
        for (int i = 0; i < kAll; ++i)
            *reinterpret_cast<uint4*>(packed + places[i]) = reinterpret_cast<const uint4&>(elements[i]);
    }

    // A lane's read of the first 32 bytes of k, of 16 features from `first` on, begins here in a block.
    __device__ static uint32_t first_place(int first, int lane) {
        return place(first + lane % 16, lane / 16);
    }

    // The i-th 32 bytes of k. `at`: first_place in some block, from the beginning of `blocks` on.
    __device__ static void read(WeightFragment& fragment, const char* blocks, uint32_t at, int i) {
        const auto& line = *reinterpret_cast<const cute::uint128_t*>(blocks + (at ^ i * 32));
        cute::SM75_U32x4_LDSM_N::copy(line, fragment[0], fragment[1], fragment[2], fragment[3]);
    }

  private:
    static constexpr int kVector = 16 / sizeof(Value);  // elements of k
    static constexpr int kVectors = kBlock / kVector;
    static constexpr int kLine = kBlock * sizeof(Value);

    __device__ static int place(int feature, int vector) {
        return feature * kLine + (vector ^ (feature * kLine / 128 & kVectors - 1)) * 16;
    }
};

// Constants that follow from the tile of the dds kernel for narrow blocks.

// A step takes a while, and longer the more blocks are in it. Steps of 128 k of random patterns at densities
// .1, .25 and .5 took about .22 + density in units of 2 us.
template <int kBlock, int kStep, int kBlockRows, int kElementBytes>
struct NarrowCosts {
    static constexpr int kPerUnit = kStep * kElementBytes / 32;
    static constexpr int kTile = 8;
    static constexpr int kRound = 130;
    static constexpr int kMostOfStep = (5 * kPerUnit + 3) / 4;

    const int2* tiles;
    const int* starts;
    int row_ranks;

    __device__ NarrowCosts(const DdsPlan& plan, int row_ranks)
        : tiles(reinterpret_cast<const int2*>(plan.tiles)), starts(plan.starts), row_ranks(row_ranks) {}
    __device__ int of(int first, int steps) const {
        constexpr int kPlaces = kBlockRows * kStep / kBlock;  // for the blocks of a CTA's step
        const int blocks = __ldg(starts + (first + steps) * row_ranks) - __ldg(starts + first * row_ranks);
        return kPerUnit * (0.22f * steps + blocks * ((row_ranks > 1 ? 0.5f : 1.0f) / kPlaces));
    }
};

// A cluster of two CTAs computes 512 features x 128 tokens, half of the features each, and shares the
// activations; or, with two ranks of tokens, 256 x 256, half of the tokens each, and shares the weight. The
// plan says which, so that one kernel serves both and is compiled in half of the time that two take.
struct NarrowRanks {
    int rank;  // of the two CTAs
    int rows;  // ranks along the block rows: 2 or 1

    __device__ int tokens() const { return 3 - rows; }  // ranks along the tokens
    __device__ int row_rank() const { return rows > 1 ? rank : 0; }
    __device__ int token_rank() const { return rows > 1 ? 0 : rank; }
    // The place in the plan of what a CTA has of a tile or step.
    __device__ int plan_index(int index) const { return index * rows + row_rank(); }
};

// Warpgroups with more blocks in a step than others fall behind by what shared memory holds beside the
// results.
template <class Math_, class Weight_, int kStep_, int kInputRingBytes, bool kSplits_>
struct NarrowTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    using Weight = Weight_;                    // its format
    static constexpr bool kPairsRows = false;  // see ByteWeight
    static constexpr int kBlock = Weight::kBlock;
    static constexpr int kRanks = 2;
    // The sums of each step of tf32x3 take as many registers as those of all.
    static constexpr int kTileTokens = Math::kParts == 1 ? 128 : 64;

    __device__ static int first_token(const Work& work, const NarrowRanks& ranks) {
        return (work.span * ranks.tokens() + ranks.token_rank()) * kTileTokens;
    }
    static constexpr int kBoxTokens = 64;          // of column-major activations, those that lie side by side
    static constexpr int kWarpgroups = 4;          // warpgroups that multiply
    static constexpr int kWarpgroupFeatures = 64;  // as many as wgmma has rows
    static constexpr int kTileFeatures = kWarpgroups * kWarpgroupFeatures;
    static constexpr int kWarpFeatures = kWarpgroupFeatures / 4;  // of which one warp has the weight
    static constexpr int kBlockRows = kTileFeatures / kBlock;
    static constexpr int kThreads = 128 * (1 + kWarpgroups);

    static constexpr bool kGrouped = false;  // see DdsTraits
    static constexpr bool kScaled = false;
    static constexpr int kStep = kStep_;
    static constexpr int kLine = std::min<int>(64, 128 / sizeof(Input));  // of k that lie side by side
    static constexpr int kLines = kStep / kLine;
    static constexpr int kLineBytes = kLine * sizeof(Input);
    static constexpr int kInputBytes = kTileTokens * kStep * sizeof(Input);
    static constexpr int kStageBytes = kInputBytes * Math::kParts;
    static constexpr int kStages = kInputRingBytes / kStageBytes;
    static constexpr bool kSplitsInput = Math::kParts > 1;
    static constexpr int kSplitWarps = kSplitsInput ? 2 : 0;  // beside those that load and schedule
    static constexpr int kBlockBytes = Weight::kBlockBytes;
    static constexpr int kChunkTokens = 128 / sizeof(Result);  // stored at a time
    static constexpr int kChunkBytes = kChunkTokens * kWarpgroupFeatures * sizeof(Result);
    static constexpr int kAllChunks = kTileTokens / kChunkTokens;
    static constexpr int kChunks = 1;
    static constexpr int kResultBytes = kWarpgroups * kChunks * kChunkBytes;
    static constexpr bool kCarries = Math::kAccumulation == Accumulation::carried;
    static constexpr int kSums = kTileTokens * kWarpgroupFeatures / 128;  // of a thread
    static constexpr int kCarriedBytes = kCarries ? kWarpgroups * 128 * kSums * 2 : 0;
    static constexpr int kMoreControlBytes = 32 * std::max(0, kStages - 8);  // of many stages
    static constexpr int kBlocks =
        (kStagedBytes - kResultBytes - kInputRingBytes - kCarriedBytes - kMoreControlBytes) / kBlockBytes;
    static_assert(kBlocks >= kBlockRows * kStep / kBlock);  // as many as a step can have

    static constexpr bool kSplits = kSplits_;  // for few tiles
    // A CTA has the other parts' sums of one or two of its warpgroups in place of activations, and of what is
    // carried, which lies behind them.
    static_assert(!kSplits_ || kInputRingBytes + kCarriedBytes >= kWarpgroups * kSums * 128 * 4);
    static_assert(kInputRingBytes % kStageBytes == 0);
    using Costs = NarrowCosts<kBlock, kStep, kBlockRows, sizeof(Input)>;
    using Schedule = tma::Schedule<Bands<kSplits>, Costs>;

    struct Shared {
        // Row-major [kLines][kTileTokens][kLine], else [kTileTokens / 64][kStep][64].
        // Second parts of tf32x3 lie behind those that are loaded.
        alignas(1024) char input[kStages][kStageBytes];
        // The carried part of each thread's sums, in vectors of 8. Registers have no room for it.
        [[no_unique_address]] std::conditional_t<kCarries, uint4[kWarpgroups][kSums / 8][128], NoCarriedSums>
            carried;
        // A buffer is row-major [warpgroup_rows][kChunkTokens][row_width], else [64 features][kChunkTokens].
        alignas(1024) char output[kWarpgroups][kChunks][kChunkBytes];
        alignas(1024) char weight[kBlocks][kBlockBytes];
        Ring<kStages> ring;
        [[no_unique_address]] std::conditional_t<kSplitsInput, Barrier[kStages], NoBarriers> split;
        int first_block[kStages];   // where a stage's blocks begin in `weight`
        int taken_blocks[kStages];  // what becomes free with a stage
        Barrier residual[kWarpgroups][kChunks];
        Schedule schedule;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
    static_assert(kSharedBytes <= kSharedCapacity);
};

// The rest of shared memory is for activations where the weight is sparse, for more of the weight where
// it is not: by the steps of the plan, and how full they are.
template <class Math, class Weight, bool kSplits>
struct NarrowKinds {
    // For activations. Where tiles are split, these bytes also receive the sums of other parts.
    static constexpr bool kCarries = Math::kAccumulation == Accumulation::carried;
    static constexpr int kStep = sizeof(typename Math::Input) == 4 ? 64 : 128;
    static constexpr int kMoreBytes = (kCarries ? 80 : 128) << 10;
    static constexpr int kFewerBytes = kSplits ? kMoreBytes : (kCarries ? 64 : 96) << 10;
    using Crowded = NarrowTraits<Math, Weight, kStep / 2, kFewerBytes, kSplits>;  // narrow steps
    using Thin = NarrowTraits<Math, Weight, kStep, kMoreBytes, kSplits>;
    // In float32 a step has half as many blocks, for which what Thin leaves is enough.
    using Common = std::conditional_t<sizeof(typename Math::Input) == 4, Thin,
                                      NarrowTraits<Math, Weight, kStep, kFewerBytes, kSplits>>;
    static constexpr int kThinFill = 20;  // up to which a plan is thin; see PlanHeader

    static constexpr int kRanks = Common::kRanks, kThreads = Common::kThreads;
    static constexpr int kSharedBytes =
        std::max({Crowded::kSharedBytes, Common::kSharedBytes, Thin::kSharedBytes});
};

// The warp that loads in the dds kernel for narrow blocks.

// The warp that fills the stages. It is often the slowest, so kRowRanks is a constant here.
template <class Traits, bool kRowMajorInput, int kRowRanks>
class NarrowProducer {
    static constexpr int kRankTokens = Traits::kTileTokens / kRowRanks;  // that a CTA loads
    using Ranks = DdsRanks<Traits::kRanks / kRowRanks, kRowRanks, Traits::kTileTokens>;

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
            if (work.tile < 0) return finish();
            const int token = Ranks::first_token(work, rank_) + Ranks::row_rank(rank_) * kRankTokens;
            for (int first = 0; first < work.steps; first += 32) {
                const int step = work.step + min(first + lane_, work.steps - 1);
                const int k = __ldg(plan_.k + step);
                const int* const starts = plan_.starts + Ranks::plan_index(step, rank_);
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

    // Waits for all stages in use: the other CTA may still have to release them.
    __device__ void finish() {
        for (; stages_ > 0; --stages_, oldest_.advance())
            wait(shared_.ring.empty[oldest_.stage], oldest_.parity);
    }

    // Slot of the lane's block, from `block` on, for blocks that are not prepacked.
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
        const int rank = Ranks::token_rank(rank_);
        const int first = blocks * rank / Ranks::kTokenRanks;
        const int count = blocks * (rank + 1) / Ranks::kTokenRanks - first;
        if (count > 0)
            load_bytes(arguments_.packed + int64_t{block + first} * Traits::kBlockBytes, full,
                       shared_by(Ranks::kTokenRanks), shared_.weight[head_ + first],
                       count * Traits::kBlockBytes);
    }

    // Swizzled on their way, they are as if they were packed.
    __device__ void load_blocks(const Barrier& full, int block, int end, int slots) const {
        for (int i = 0; i < end - block; ++i) {
            if (i > 0 && i % 32 == 0) slots = slot_of_lane(block + i, end);
            const int slot = __shfl_sync(~0u, slots, i % 32);
            if (elected_ && i % Ranks::kTokenRanks == Ranks::token_rank(rank_))
                load_box(&arguments_.values, full, shared_by(Ranks::kTokenRanks), shared_.weight[head_ + i],
                         0, slot * Traits::kBlock);
        }
        __syncwarp();
    }

    // Loads the tokens from `token` on: this CTA's own, or the half of them that it loads for both.
    __device__ void load_input(const Barrier& full, char* stage, int k, int token) const {
        const Multicast to = shared_by(kRowRanks);
        const int place = Ranks::row_rank(rank_) * kRankTokens;  // of these tokens in the stage
        if (kRowMajorInput) {
            for (int i = 0; i < Traits::kLines; ++i)
                load_box(&arguments_.input, full, to,
                         stage + (i * Traits::kTileTokens + place) * Traits::kLineBytes,
                         k + i * Traits::kLine, token);
        } else {
            for (int i = 0; i < kRankTokens; i += Traits::kBoxTokens)
                for (int j = 0; j < Traits::kStep; j += Traits::kLine)
                    load_box(&arguments_.input, full, to,
                             stage + ((place + i) * Traits::kStep + j * Traits::kBoxTokens) * 2, token + i,
                             k + j);
        }
    }

    // Loads that this many ranks of the cluster share go to both CTAs that have a part.
    __device__ Multicast shared_by(int ranks) const {
        return {ranks == 1 ? uint16_t{1} : static_cast<uint16_t>(Ranks::kAllRanks << first_rank_)};
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

// The warpgroups that multiply in the dds kernel for narrow blocks.

// One warpgroup's products of all its tiles.
template <class Traits, bool kRowMajorInput>
class NarrowConsumer {
    using Sum = typename Traits::Accumulator;

  public:
    __device__ NarrowConsumer(const DdsArguments& arguments, typename Traits::Shared& shared,
                              const DdsPlan& plan, NarrowRanks ranks, int first_rank, int warp, int lane)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          ranks_(ranks),
          first_rank_(first_rank),
          warpgroup_(warp / 4),
          warp_(warp % 4),
          lane_(lane),
          place_(Weight::first_place(warp_ * Traits::kWarpFeatures % Traits::kBlock, lane)) {}

    __device__ void run() {
        Epilogue epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_], warpgroup_);
        Sum sums[Traits::kSums];
        Work work = next_work(epilogue);
        epilogue.read_bias();
        while (work.tile >= 0) {
            epilogue.begin(Traits::first_token(work, ranks_));
            multiply_all(sums, work);
            work = next_work(epilogue);
            epilogue.store(sums);
        }
        epilogue.finish_stores();
    }

    // Multiplies the one part of a tile that the CTA has, if the plan is the launch's.
    __device__ void run_part() {
        Epilogue epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_], warpgroup_);
        Sum sums[Traits::kSums];
        const Work work = next_work(epilogue);
        if (work.tile < 0) {  // in all CTAs of the cluster, which take one tile
            cute::cluster_sync();
            cute::cluster_sync();
            return;
        }
        const int parts = arguments_.schedule.by_parts.divisor, adding = warpgroup_ % parts;
        if (work.part == adding) {
            epilogue.read_bias();
            epilogue.begin(Traits::first_token(work, ranks_));
        }
        multiply_all(sums, work);
        cute::cluster_sync();  // nobody needs the stages any more
        const auto others = reinterpret_cast<float4*>(shared_.input);
        const int first = warpgroup_ / parts * (parts - 1);
        if (work.part != adding) {
            const int place = first + work.part - (work.part > adding);
            void* const to = __cluster_map_shared_rank(others, adding * Traits::kRanks + ranks_.rank);
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
    using Atom = typename Traits::Math::template RegisterAtom<
        kRowMajorInput ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN, Traits::kTileTokens>;
    static constexpr int kProduct = 32 / sizeof(typename Traits::Input);  // of k
    static constexpr int kProducts = Traits::kLine / kProduct;
    static constexpr int kBlockProducts = Traits::kBlock / kProduct;
    static constexpr bool kSplit = Traits::kSplitsInput;  // three products for one
    // Bits of a mask before those of a product.
    static constexpr int mask_bits(int product) { return product * kProduct / 16 * 4; }
    static constexpr uint32_t kMaskOfLine = (1u << mask_bits(kProducts)) - 1;
    // Descriptor of activations as an operand, but for their address; see operand().
    static constexpr uint32_t kInput = kRowMajorInput ? 0 : Traits::kBoxTokens * Traits::kStep * 2 / 16 << 16;

    __device__ static void add(Sum (&sums)[Traits::kSums], const float4* from) {
#pragma unroll
        for (int i = 0; i < Traits::kSums / 4; ++i) add_vector(from[128 * i], sums + 4 * i);
    }

    __device__ Work next_work(Epilogue& epilogue) {
        const Work work = shared_.schedule.pop(next_, lane_);
        if (work.tile < 0) return work;
        masks_ = masks_from(work, 0);
        const int rows = Traits::kTileFeatures >> arguments_.row_shift;  // block rows of a CTA
        epilogue.prepare(plan_.rows + ranks_.plan_index(work.tile) * rows);
        return work;
    }

    // The plan's masks of the lane's step, of 32 from the tile's step `first`.
    __device__ int2 masks_from(const Work& work, int first) const {
        const int step = work.step + min(first + lane_, work.steps - 1);
        if (work.steps == 0) return {};
        const auto* const masks = reinterpret_cast<const int2*>(plan_.masks);
        return __ldg(masks + ranks_.plan_index(step) * Traits::kWarpgroups + warpgroup_);
    }

    __device__ void multiply_all(Sum (&sums)[Traits::kSums], const Work& work) {
#pragma unroll
        for (int i = 0; i < Traits::kSums; ++i) sums[i] = 0;
        carried_ = false;
        carry_times_.begin(arguments_.carried_products, warpgroup_, Traits::kWarpgroups);
        for (int first = 0; first < work.steps; first += 32) {
            const int2 masks = masks_;
            masks_ = masks_from(work, first + 32);
            const int count = min(32, work.steps - first);
            for (int i = 0; i < count; ++i)
                multiply_step(sums, __shfl_sync(~0u, masks.x, i), __shfl_sync(~0u, masks.y, i));
        }
        if constexpr (Traits::kCarries)
            if (carried_)
                each_carried(sums, [](float& a, float& b, uint32_t pair) { add_carried(a, b, pair); });
    }

    // Calls visit(first sum, second sum, what is carried of both), and keeps what is carried afterwards.
    template <class Visit>
    __device__ void each_carried(Sum (&sums)[Traits::kSums], Visit visit) {
        uint4* const vectors = shared_.carried[warpgroup_][0] + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < Traits::kSums / 8; ++i) {
            uint4 vector = carried_ ? vectors[128 * i] : uint4{};
            visit(sums[8 * i], sums[8 * i + 1], vector.x);
            visit(sums[8 * i + 2], sums[8 * i + 3], vector.y);
            visit(sums[8 * i + 4], sums[8 * i + 5], vector.z);
            visit(sums[8 * i + 6], sums[8 * i + 7], vector.w);
            vectors[128 * i] = vector;
        }
    }

    // `mask`: for each 16 of k which 16 features have a block. `firsts`: the first block of each warp.
    __device__ void multiply_step(Sum (&sums)[Traits::kSums], uint32_t mask, uint32_t firsts) {
        if constexpr (Traits::kCarries) {
            // A product has a bit for each warp.
            const int products = __popc((mask | mask >> 1 | mask >> 2 | mask >> 3) & 0x01010101);
            if (carry_times_.are_due() && products > 0) {
                cute::warpgroup_wait<0>();  // none is under way, or the compiler would serialise wgmma
                const float factor = carry_times_.factor();
                each_carried(sums, [&](float& a, float& b, uint32_t& pair) { carry(a, b, pair, factor); });
                carried_ = true;
            }
            carry_times_.add(products);
        }
        shared_.ring.wait_full(position_);
        if constexpr (kSplit) wait(shared_.split[position_.stage], position_.parity);
        const uint32_t input = kInput + operand_address(shared_.input[position_.stage]);
        const uint32_t block = shared_.first_block[position_.stage] + (firsts >> 8 * warp_ & 0xff);
        uint32_t weight = place_ + block * Traits::kBlockBytes;
        constexpr uint32_t kNext =
            kRowMajorInput ? Traits::kInputBytes / Traits::kLines / 16 : Traits::kLine * 128 / 16;
        const auto multiply_lines = [&](Sum(&to)[Traits::kSums]) {
#pragma unroll
            for (int line = 0; line < Traits::kLines; ++line)
                if (const uint32_t present = mask >> mask_bits(kProducts) * line & kMaskOfLine)
                    multiply(to, present, weight, input + line * kNext);
        };
        if constexpr (Traits::Math::kAccumulation == Accumulation::promoted) {
            Sum step[Traits::kSums] = {};
            multiply_lines(step);
#pragma unroll
            for (int i = 0; i < Traits::kSums; ++i) sums[i] += step[i];
        } else {
            multiply_lines(sums);
        }
        // Every warp for itself, since without products nothing keeps them together.
        if (lane_ < Traits::kRanks) shared_.ring.empty[position_.stage].arrive(first_rank_ + lane_);
        position_.advance();
    }

    // A line of k. `weight`: where the warp's next block is.
    __device__ void multiply(Sum (&sums)[Traits::kSums], uint32_t mask, uint32_t& weight, uint32_t input) {
        WeightFragment fragments[kProducts], rests[kProducts];
        const uint32_t own = mask >> warp_;
#pragma unroll
        for (int first = 0; first < kProducts; first += kBlockProducts) {
            const bool present = own >> mask_bits(first) & 1;
#pragma unroll
            for (int i = 0; i < kBlockProducts; ++i) {
                WeightFragment& fragment = fragments[first + i];
                WeightFragment& rest = rests[first + i];
                fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0;
                if (kSplit) rest[0] = rest[1] = rest[2] = rest[3] = 0;
                if (present) {
                    Weight::read(fragment, shared_.weight[0], weight, i);
                    if constexpr (kSplit) split_operand(fragment, rest);
                }
            }
            if (present) weight += Traits::kBlockBytes;
        }
        cute::warpgroup_arrive();
#pragma unroll
        for (int first = 0; first < kProducts; first += kBlockProducts) {
            if ((mask >> mask_bits(first) & 0xf) == 0) continue;
#pragma unroll
            for (int i = first; i < first + kBlockProducts; ++i) {
                const uint64_t operand =
                    uint64_t{arguments_.tokens_by_k.high} << 32 | (input + i * (kRowMajorInput ? 2 : 128));
                if constexpr (kSplit) {  // small ones first
                    wgmma<Atom>(sums, rests[i], operand, true);
                    wgmma<Atom>(sums, fragments[i], operand + Traits::kInputBytes / 16, true);
                }
                wgmma<Atom>(sums, fragments[i], operand, true);
            }
            cute::warpgroup_commit_batch();
        }
        cute::warpgroup_wait<0>();
    }

    const DdsArguments& arguments_;
    typename Traits::Shared& shared_;
    const DdsPlan& plan_;
    NarrowRanks ranks_;
    int first_rank_;
    int warpgroup_;
    int warp_;
    int lane_;
    uint32_t place_;  // see Weight::first_place()
    typename Ring<Traits::Schedule::kQueue>::Position next_;
    int2 masks_ = {};  // what the plan says of the lane's step of the next tile
    typename Ring<Traits::kStages>::Position position_;
    bool carried_ = false;  // some of the sums
    CarryTimes carry_times_;
};

// The dds kernel for narrow blocks: which warps load, schedule and multiply.

// All that a CTA does.
template <class Traits, bool kRowMajorInput>
__device__ __forceinline__ void run_narrow(const DdsArguments& arguments, const DdsPlan& plan, char* memory) {
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const auto cluster_rank = static_cast<int>(cute::block_rank_in_cluster());
    const int rank = cluster_rank % Traits::kRanks, first_rank = Traits::kSplits ? cluster_rank - rank : 0;
    // The same in all lanes, as the compiler is to know.
    const int cluster_features = __shfl_sync(~0u, plan.group_rows, 0) << arguments.row_shift;
    const bool two_rows = cluster_features > Traits::kTileFeatures;
    const NarrowRanks ranks{rank, two_rows ? 2 : 1};
    if (threadIdx.x == 32) {
        if (arguments.value_rows > 0) prefetch(&arguments.input);
        if (arguments.value_rows > 0 && arguments.packed == nullptr) prefetch(&arguments.values);
        prefetch(&arguments.output);
    }
    set_up([&] {
        shared.ring.init(4 * Traits::kWarpgroups * Traits::kRanks);
        for (auto& chunks : shared.residual)
            for (const Barrier& arrived : chunks) arrived.init(1);
        shared.schedule.init(1 + Traits::kSplitWarps + 4 * Traits::kWarpgroups);
        if constexpr (Traits::kSplitsInput)
            for (const Barrier& split : shared.split) split.init(Traits::kSplitWarps);
    });
    if (warp != 1) cute::cluster_wait();

    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<32>();
        if (warp == 0) {
            if (two_rows)
                NarrowProducer<Traits, kRowMajorInput, 2>(arguments, shared, plan, rank, first_rank, lane)
                    .run();
            else
                NarrowProducer<Traits, kRowMajorInput, 1>(arguments, shared, plan, rank, first_rank, lane)
                    .run();
        } else if (warp == 1) {
            shared.schedule.run(arguments.schedule, typename Traits::Costs(plan, ranks.rows), plan.is_own,
                                blockIdx.x / Traits::kRanks, gridDim.x / Traits::kRanks, lane);
            if (!plan.is_own) report_stale(arguments.plan_report);
        } else {
            split_input<Traits, 32 * Traits::kSplitWarps>(shared, shared.ring, threadIdx.x - 64);
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<112>();
        NarrowConsumer<Traits, kRowMajorInput> consumer(arguments, shared, plan, ranks, first_rank, warp - 4,
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
}

template <class Kinds, bool kRowMajorInput>
__global__ void __launch_bounds__(Kinds::kThreads, 1)
    dds_narrow_kernel(const __grid_constant__ DdsArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    const DdsPlan plan(arguments.plan, arguments.plan_key);
    // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
    const int step = __shfl_sync(~0u, plan.step(), 0), fill = __shfl_sync(~0u, plan.fill, 0);
    if (step == Kinds::Crowded::kStep)
        return run_narrow<typename Kinds::Crowded, kRowMajorInput>(arguments, plan, memory);
    if constexpr (!std::is_same_v<typename Kinds::Common, typename Kinds::Thin>)
        if (fill > Kinds::kThinFill)
            return run_narrow<typename Kinds::Common, kRowMajorInput>(arguments, plan, memory);
    run_narrow<typename Kinds::Thin, kRowMajorInput>(arguments, plan, memory);
}

}  // namespace ts::sm90
