// Constants that follow from the tile of a dds kernel.
#pragma once

#include <type_traits>

#include "common/plan_view.cuh"
#include "sm80/async.cuh"
#include "sm80/dds_weight.cuh"
#include "sm80/math.cuh"
#include "sm80/tile.cuh"

namespace ts::sm80 {

// Scales inside of the sums: of a step, whose features and k are one block, times the unit of its sums. Read
// from memory before its products.
template <int kTokenTiles, class Math>
struct StepScales {
    float of[kTokenTiles][2];  // of a thread's tokens

    __device__ StepScales(const DdsArguments& arguments, const PlanView& plan, int step, int first_token,
                          int lane) {
        const int slot = __ldg(plan.slots + step), k = __ldg(plan.k + step);
        const float* const of_tokens = arguments.x_scales + k / kScaleGroup * arguments.x_scales_ld;
        const float of_block = __ldg(arguments.scales + slot) * Math::kSumUnit;
#pragma unroll
        for (int i = 0; i < 2 * kTokenTiles; ++i) {
            const int token = min(first_token + 8 * i + lane / 4, arguments.tokens - 1);
            of[i / 2][i % 2] = __ldg(of_tokens + token) * of_block;
        }
    }
};
struct UnscaledSteps {
    __device__ UnscaledSteps(const DdsArguments&, const PlanView&, int, int, int) {}
};

template <class Math_, class Weight_, int kTileTokens_, int kWarpTokens_, int kWarpFeatures_>
struct DdsTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr bool kQuantized = is_quantized(Math::kInput);                // x is, and has scales:
    static constexpr bool kScaled = Math::kAccumulation == Accumulation::scaled;  // inside of the sums
    using Weight = Weight_;  // its format, see dds_weight.cuh
    static constexpr int kTileTokens = kTileTokens_;
    static constexpr int kTileFeatures = Weight::kFeatures;
    static constexpr int kWarpTokens = kWarpTokens_;
    static constexpr int kWarpFeatures = kWarpFeatures_;
    static constexpr int kFeatureWarps = kTileFeatures / kWarpFeatures;
    static constexpr int kTokenWarps = kTileTokens / kWarpTokens;
    static constexpr int kWarps = kTokenWarps * kFeatureWarps;
    // Either all threads load and compute, or those of some warps more only load.
    static constexpr bool kOnlyLoad = Weight::kLoaderWarps > 0;
    static constexpr int kComputers = 32 * kWarps;
    static constexpr int kLoaders = kOnlyLoad ? 32 * Weight::kLoaderWarps : kComputers;
    static constexpr int kFirstComputer = kOnlyLoad ? kLoaders : 0;
    static constexpr int kThreads = kFirstComputer + kComputers;
    // CTAs on a multiprocessor: its registers hold 8 warps of 64 x 64 sums, or 16 of half as many.
    // Sums of steps apart are as many again.
    static constexpr int kSumWords = kWarpTokens * kWarpFeatures * static_cast<int>(sizeof(Accumulator) / 4) *
                                     (Math::kAccumulation == Accumulation::kept ? 1 : 2);
    static constexpr bool kSmallWarps = kSumWords <= 64 * 32 && (sizeof(Input) <= 2 || kWarps == 16);
    static constexpr int kResident = (kSmallWarps ? 16 : 8) / kWarps;
    static constexpr int kTokenTiles = kWarpTokens / 16;
    static constexpr int kFeatureTiles = kWarpFeatures / 16;
    static constexpr int kStep = kLineBytes / sizeof(Input);
    static constexpr int kStepShift = log2_of(kStep);
    static constexpr int kChunk = kChunkBytes / sizeof(Input);
    static_assert(kTileFeatures == 128, "plans' masks hold 8 tiles of 16 features");

    template <bool kRowMajorInput>
    using InputTile = Tile<Input, kTileTokens, kRowMajorInput>;
    template <bool kRowMajorInput>
    using InputReader = typename Weight::template InputReader<InputTile<kRowMajorInput>, kTokenTiles>;
    using WeightReader = typename Weight::template Reader<kFeatureTiles>;
    using Sums = typename Weight::template Sums<kTokenTiles, kFeatureTiles>;
    using StepScales = std::conditional_t<kScaled, sm80::StepScales<kTokenTiles, Math>, UnscaledSteps>;

    static constexpr bool kColumnMajorInput = !kQuantized;  // ldmatrix transposes elements of 16 bits
    static constexpr int kInputBytes = kColumnMajorInput && InputTile<false>::kBytes > InputTile<true>::kBytes
                                           ? InputTile<false>::kBytes
                                           : InputTile<true>::kBytes;
    static constexpr int kStageBytes = kInputBytes + Weight::kBytes;

    // Sums of 8 tokens at a time pass through shared memory, so that each lane can store 8 neighbours: of
    // each warp [8 tokens][kStagingLine], of which kWarpFeatures are used. The padding keeps what lanes write
    // at once off each other's banks: 8 features of 4 tokens, or 8 of every other token.
    static constexpr int kStagingLine = kWarpFeatures + (Weight::kSumsByToken ? 8 : 4);
    static constexpr bool kStages = sizeof(Accumulator) == sizeof(float);
    static constexpr int kStagingFloats = kStages ? 8 * kStagingLine : 0;
    static constexpr int kStagingBytes = kWarps * kStagingFloats * static_cast<int>(sizeof(float));

    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 8;
    static constexpr int shared_bytes(int stages) {
        return stages * kStageBytes + kStagingBytes + Ring::bytes(stages);
    }
};

}  // namespace ts::sm80
