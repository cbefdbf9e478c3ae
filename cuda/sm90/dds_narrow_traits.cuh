// Constants that follow from the tile of the dds kernel for narrow blocks.
#pragma once

#include <algorithm>

#include "sm90/dds_arguments.cuh"
#include "sm90/dds_narrow_weight.cuh"
#include "sm90/dds_traits.cuh"
#include "sm90/shared_memory.cuh"
#include "tma/ring.cuh"

namespace ts::sm90 {

// A step takes a while, and longer the more blocks are in it. Steps of 128 k of random patterns at densities
// .1, .25 and .5 took about .22 + density in units of 2 us.
template <int kBlock, int kStep, int kBlockRows, int kRowRanks, int kElementBytes>
struct NarrowCosts {
    static constexpr int kPerUnit = kStep * kElementBytes / 32;
    static constexpr int kTile = 8;
    static constexpr int kRound = 130;
    static constexpr int kMostOfStep = (5 * kPerUnit + 3) / 4;

    const int2* tiles;
    const int* starts;

    __device__ explicit NarrowCosts(const DdsPlan& plan)
        : tiles(reinterpret_cast<const int2*>(plan.tiles)), starts(plan.starts) {}
    __device__ int of(int first, int steps) const {
        constexpr int kPlaces = kRowRanks * kBlockRows * kStep / kBlock;  // for the blocks of a step
        const int blocks = __ldg(starts + (first + steps) * kRowRanks) - __ldg(starts + first * kRowRanks);
        return kPerUnit * (0.22f * steps + blocks / float(kPlaces));
    }
};

// The sums of each step of tf32x3 take as many registers as those of all.
template <class Math, int kTokenRanks>
using NarrowRanks = DdsRanks<kTokenRanks, 2 / kTokenRanks, Math::kParts == 1 ? 128 : 64>;

// A cluster of two CTAs computes 512 features x 128 tokens, half of the features each, and shares the
// activations; with two ranks of tokens 256 x 256, half of the tokens each, and shares the weight.
//
// Warpgroups with more blocks in a step than others fall behind by what shared memory holds beside the
// results.
template <class Math_, class Weight_, int kTokenRanks, int kStep_, int kInputRingBytes, bool kSplits_>
struct NarrowTraits : NarrowRanks<Math_, kTokenRanks> {
    using Ranks = NarrowRanks<Math_, kTokenRanks>;
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    using Weight = Weight_;  // its format, see dds_narrow_weight.cuh
    static constexpr int kBlock = Weight::kBlock;
    using Ranks::kRowRanks, Ranks::kTileTokens;

    // The block rows of a CTA's tile, each of one square or more.
    __device__ static const int* rows_of(const DdsPlan& plan, int tile, int rank) {
        return plan.rows + Ranks::plan_index(tile, rank) * (plan.group_rows / kRowRanks);
    }

    static constexpr int kRankTokens = kTileTokens / kRowRanks;  // of which a CTA loads the activations
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
    using Costs = NarrowCosts<kBlock, kStep, kBlockRows, kRowRanks, sizeof(Input)>;
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
        alignas(1024) char weight[kBlocks][kBlockBytes];  // see dds_narrow_weight.cuh
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
template <class Math, class Weight, int kTokenRanks, bool kSplits>
struct NarrowKinds {
    // For activations. Where tiles are split, these bytes also receive the sums of other parts.
    static constexpr bool kCarries = Math::kAccumulation == Accumulation::carried;
    static constexpr int kStep = sizeof(typename Math::Input) == 4 ? 64 : 128;
    static constexpr int kMoreBytes = (kCarries ? 80 : 128) << 10;
    static constexpr int kFewerBytes = kSplits ? kMoreBytes : (kCarries ? 64 : 96) << 10;
    using Crowded = NarrowTraits<Math, Weight, kTokenRanks, kStep / 2, kFewerBytes, kSplits>;  // narrow steps
    using Thin = NarrowTraits<Math, Weight, kTokenRanks, kStep, kMoreBytes, kSplits>;
    // In float32 a step has half as many blocks, for which what Thin leaves is enough.
    using Common = std::conditional_t<sizeof(typename Math::Input) == 4, Thin,
                                      NarrowTraits<Math, Weight, kTokenRanks, kStep, kFewerBytes, kSplits>>;
    static constexpr int kThinFill = 20;  // up to which a plan is thin; see PlanHeader

    static constexpr int kRanks = Common::kRanks, kThreads = Common::kThreads;
    static constexpr int kSharedBytes =
        std::max({Crowded::kSharedBytes, Common::kSharedBytes, Thin::kSharedBytes});
};

}  // namespace ts::sm90
