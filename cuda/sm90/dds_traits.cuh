// Constants that follow from the tile of a dds kernel.
#pragma once

#include <algorithm>
#include <type_traits>

#include "sm90/dds_arguments.cuh"
#include "sm90/dds_weight.cuh"
#include "sm90/shared_memory.cuh"

namespace ts::sm90 {

// Every step takes as long, whatever is in it.
struct StepCosts {
    static constexpr int kTile = 3;
    static constexpr int kRound = 25;
    static constexpr int kMostOfStep = 1;

    const int2* tiles;

    __device__ explicit StepCosts(const DdsPlan& plan) : tiles(reinterpret_cast<const int2*>(plan.tiles)) {}
    __device__ int of(int, int steps) const { return steps; }
};

struct NoBarriers {};

// Scales inside of the sums, of what is in each stage.
template <int kInputStages, int kTokens, int kWarpgroups, int kWeightStages>
struct StagedScales {
    alignas(128) float tokens[kInputStages][kTokens];
    float blocks[kWarpgroups][kWeightStages];
};
struct NoScales {};

// A CTA computes a tile of 256, 128 or 64 tokens x 128 features. `kGrouped_`: of grouped products.
template <class Math_, class Weight_, int kTokenRanks, int kRowRanks, int kTileTokens, bool kGrouped_ = false>
struct DdsTraits : DdsRanks<kTokenRanks, kRowRanks, kTileTokens> {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    using Weight = Weight_;  // its format, see dds_weight.cuh

    __device__ static const auto& schedule_of(const DdsArguments& arguments) {
        if constexpr (kGrouped_)
            return arguments.groups;
        else
            return arguments.schedule;
    }

    // The block rows of a CTA's tile.
    __device__ static const int* rows_of(const DdsPlan& plan, int tile, int rank) {
        return plan.rows + DdsTraits::plan_index(tile, rank) * plan.group_rows;
    }

    static constexpr bool kGrouped = kGrouped_;
    static constexpr bool kScaled = Math::kAccumulation == Accumulation::scaled;
    static constexpr bool kCarries = Math::kAccumulation == Accumulation::carried;
    // Tiles of which a group has no more than half the tokens load and multiply half as many.
    static constexpr bool kHalves = kGrouped && kTileTokens > 64;
    static constexpr int kBoxTokens = kHalves ? kTileTokens / 2 : kTileTokens;  // loaded at a time
    static constexpr int kWarpgroups = 2;  // warpgroups that multiply, each 64 features
    static constexpr int kWarpgroupFeatures = Weight::kFeatures;
    static constexpr int kTileFeatures = kWarpgroups * kWarpgroupFeatures;
    static constexpr int kStep = Weight::kStep;
    static constexpr bool kSplitsInput = Math::kParts > 1;  // in a warpgroup more, see dds_split.cuh
    static constexpr int kThreads = 128 * (1 + kWarpgroups + kSplitsInput);
    static constexpr int kComputerRegisters = kSplitsInput ? 216 : 232;

    static constexpr int kInputElementBytes = sizeof(Input);
    static constexpr int kTokenBytes = kTileTokens * kInputElementBytes;  // of all tokens at one k
    static constexpr int kInputBytes = kTokenBytes * kStep;
    static constexpr int kScaleBytes = kScaled ? sizeof(float) : 0;  // of a token in a step
    static constexpr int kChunkTokens = 128 / sizeof(Result);        // stored at a time
    static constexpr int kChunkBytes = kChunkTokens * kWarpgroupFeatures * sizeof(Result);
    static constexpr int kAllChunks = kTileTokens / kChunkTokens;
    static constexpr int kResultBuffers = 3;  // of a warpgroup, at most
    static constexpr int kChunks = std::min(kAllChunks, kResultBuffers);
    static constexpr int kResultBytes = kWarpgroups * kChunks * kChunkBytes;

    // The weight has what activations and results leave, up to the stages that its format asks for. Scaled
    // steps are short: what the CTAs of a cluster do not share has more of them.
    static constexpr int kInputRingBytes = (kTileTokens == 64          ? 80
                                            : kScaled && kRowRanks > 1 ? 100
                                                                       : 128)
                                           << 10;
    static constexpr int kInputStages =
        kInputRingBytes / (Math::kParts * kInputBytes + kTileTokens * kScaleBytes);
    static constexpr int kWeightStages =
        std::min((kStagedBytes - kResultBytes - kInputRingBytes) / (kWarpgroups * Weight::kStageBytes),
                 Weight::most_stages(kTileTokens));

    static constexpr int kSums = kTileTokens * kWarpgroupFeatures / 128;  // of a thread
    static constexpr bool kSplits = kTileTokens <= 128 && !kGrouped;      // made for few tiles
    using Costs = StepCosts;
    using Schedule = tma::Schedule<std::conditional_t<kGrouped, GroupSpans, Bands<kSplits>>, Costs>;
    using Work = typename Schedule::Work;

    // True if half of a tile has all tokens that there are from `token` on.
    __device__ static bool is_half(const Work& work, int token) {
        if constexpr (kHalves)
            return work.end - token <= kBoxTokens;
        else
            return false;
    }

    struct Shared {
        // Row-major [pieces][kTileTokens][k of a piece], else [pieces][kTileTokens / 64][k of a piece][64];
        // once for each part.
        alignas(1024) char input[kInputStages][Math::kParts * kInputBytes];
        // See dds_weight.cuh.
        alignas(1024) char weight[kWarpgroups][kWeightStages][Weight::kStageBytes];
        // See dds_staging.cuh.
        alignas(1024) char output[kWarpgroups][kChunks][kChunkBytes];
        [[no_unique_address]] std::conditional_t<
            kScaled, StagedScales<kInputStages, kTileTokens, kWarpgroups, kWeightStages>, NoScales> scales;
        Ring<kInputStages> input_ring;
        Ring<kWeightStages> weight_ring[kWarpgroups];
        Barrier residual[kWarpgroups][kChunks];
        Schedule schedule;
        std::conditional_t<kSplitsInput, Barrier[kInputStages], NoBarriers> split;  // of the input's stages
    };
    static constexpr int kSharedBytes = sizeof(Shared);
    static_assert(kSharedBytes <= kSharedCapacity);
};

// Host side: of k that lie in one block, those of a step.
template <class Traits>
int k_width(const DdsArguments& arguments) {
    return std::min(arguments.k_block, Traits::kStep);
}

// How the pieces of a step follow one another in shared memory.
template <class Traits>
Operand describe_input(const DdsArguments& arguments, Layout layout) {
    constexpr int kBytes = Traits::kInputElementBytes, kProduct = 32 / kBytes;  // of k
    const int width = k_width<Traits>(arguments);
    const bool row_major = layout == Layout::row_major;
    Operand tokens =
        row_major ? line_operand(kBytes * width, width * Traits::kTokenBytes) : operand(128, 128 * width);
    for (int i = 0; i < 4; ++i) {
        const int piece = kProduct * i / width, within = kProduct * i % width;
        const int offset = piece * width * Traits::kTokenBytes + within * (row_major ? kBytes : 128);
        tokens.step[i] = static_cast<uint32_t>(offset / 16);
    }
    return tokens;
}

}  // namespace ts::sm90
