// The arguments of a dds kernel and what follows from its tile.
#pragma once

#include "common/plan.h"
#include "common/problem.h"
#include "sm80/async.cuh"
#include "sm80/math.cuh"
#include "sm80/tile.cuh"

namespace ts::sm80 {

struct DdsArguments {
    const void* input;
    uint32_t input_ld;  // in chunks of 16 bytes
    void* output;
    int64_t output_ld;
    const void* values;
    const void* bias;
    const void* residual;  // in the output's layout
    int64_t residual_ld;
    const PlanHeader* plan;
    Layout output_layout;
    Activation activation;
    int tokens;
    int row_tiles;
    int row_shift;  // log2 of the features of a block
    int k_shift;    // log2 of the k of a block
    int stages;
    int lookahead;  // steps whose copies are under way while one is multiplied
};

template <Op kOp, class Math_, int kTileTokens_, int kTileFeatures_, int kWarpTokens_, int kWarpFeatures_>
struct DdsTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    static constexpr bool kTransposed = kOp == Op::dds_nn;
    static constexpr int kTileTokens = kTileTokens_;
    static constexpr int kTileFeatures = kTileFeatures_;
    static constexpr int kWarpTokens = kWarpTokens_;
    static constexpr int kWarpFeatures = kWarpFeatures_;
    static constexpr int kFeatureWarps = kTileFeatures / kWarpFeatures;
    static constexpr int kTokenWarps = kTileTokens / kWarpTokens;
    static constexpr int kWarps = kTokenWarps * kFeatureWarps;
    static constexpr int kThreads = 32 * kWarps;
    // CTAs on a multiprocessor: its registers hold 8 warps of 64 x 64 sums, or 16 of half as many.
    static constexpr bool kSmallWarps = sizeof(Element) == 2 && kWarpTokens * kWarpFeatures <= 64 * 32;
    static constexpr int kResident = (kSmallWarps ? 16 : 8) / kWarps;
    static constexpr int kMTiles = kWarpTokens / 16;
    static constexpr int kNTiles = kWarpFeatures / 16;
    static constexpr int kStep = kLineBytes / sizeof(Element);
    static constexpr int kStepShift = sizeof(Element) == 2 ? 6 : 5;
    static constexpr int kChunk = kChunkBytes / sizeof(Element);
    static_assert(1 << kStepShift == kStep);
    static_assert(kTileFeatures == 128, "plans' masks hold 8 tiles of 16 features");

    using WeightTile = Tile<Element, kTileFeatures, !kTransposed>;
    template <bool kRowMajorInput>
    using InputTile = Tile<Element, kTileTokens, kRowMajorInput>;

    static constexpr int kInputBytes = InputTile<true>::kBytes > InputTile<false>::kBytes
                                           ? InputTile<true>::kBytes
                                           : InputTile<false>::kBytes;
    static constexpr int kStageBytes = kInputBytes + WeightTile::kBytes;

    // Sums of 8 tokens at a time pass through shared memory, so that each lane can store 8 neighbours.
    // The padding keeps the 4 lanes of a token and 4 tokens off each other's banks.
    static constexpr int kStagingLine = kWarpFeatures + 8;
    static constexpr int kStagingFloats = 8 * kStagingLine;
    static constexpr int kStagingBytes = kWarps * kStagingFloats * static_cast<int>(sizeof(float));

    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 8;
    static constexpr int shared_bytes(int stages) {
        return stages * kStageBytes + kStagingBytes + Ring::bytes(stages);
    }
};

}  // namespace ts::sm80
