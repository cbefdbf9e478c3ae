// The arguments of the dds kernel for narrow blocks and what follows from its tile.
#pragma once

#include <cudaTypedefs.h>

#include <cute/arch/mma_sm90_gmma.hpp>

#include "common/plan.h"
#include "common/problem.h"
#include "sm90/pipeline.cuh"
#include "sm90/schedule.cuh"
#include "sm90/wgmma.cuh"

namespace ts::sm90 {

struct NarrowArguments {
    CUtensorMap input;
    CUtensorMap output;  // if it is feature-major
    const PlanHeader* plan;
    const void* bias;
    const char* units;  // the packed weight
    void* output_data;
    int64_t output_ld;
    const void* residual;  // may be null
    int64_t residual_ld;
    int tokens;
    bool deferred;  // see NarrowConsumer::multiply
    ScheduleArguments schedule;
    Layout output_layout;  // also the residual's
    Activation activation;
};

// Products of 64 tokens and 32 features.
template <class Math, cute::SM90::GMMA::Major kInput>
struct NarrowAtom;
template <cute::SM90::GMMA::Major kInput>
struct NarrowAtom<bf16, kInput> {
    using Type = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<kInput, cute::SM90::GMMA::Major::K>;
};
template <cute::SM90::GMMA::Major kInput>
struct NarrowAtom<f16, kInput> {
    using Type = cute::SM90::GMMA::MMA_64x32x16_F32F16F16_SS<kInput, cute::SM90::GMMA::Major::K>;
};

// A cluster of two CTAs computes 128 tokens x 768 features, half of the features each.
template <class Math_, int kBlock_, int kStep_, int kStages_, int kWeightBytes_, int kBuffers_>
struct NarrowTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    static constexpr int kBlock = kBlock_;
    static constexpr int kRanks = 2;
    static constexpr uint16_t kAllRanks = (1 << kRanks) - 1;

    static constexpr int kHalfTokens = 64;  // as many as wgmma has rows
    static constexpr int kHalves = 2;
    static constexpr int kTileTokens = kHalves * kHalfTokens;
    static constexpr int kRowFeatures = 32;
    static constexpr int kParts = kRowFeatures / kBlock;  // block rows of a row
    static constexpr int kGroups = 2;                     // warpgroups that multiply
    static constexpr int kRows = 6;                       // of a warpgroup
    static constexpr int kRowSums = kHalfTokens * kRowFeatures / 128;
    static constexpr int kTileFeatures = kGroups * kRows * kRowFeatures;
    static constexpr int kStep = kStep_;  // k of a stage
    static constexpr int kThreads = 128 * (1 + kGroups);

    static constexpr int kStages = kStages_;
    static constexpr int kHalfBytes = kHalfTokens * kStep * 2;
    static constexpr int kUnitBytes = kRowFeatures * kBlock * 2;
    static constexpr int kUnits = kWeightBytes_ / kUnitBytes;   // in shared memory
    static_assert(kUnits >= kGroups * kRows * kStep / kBlock);  // as many as a stage can have
    static constexpr int kBufferBytes = kHalfTokens * kRowFeatures * 2;
    static constexpr int kBuffers = kBuffers_;  // of results, for each warpgroup

    using Schedule = sm90::Schedule<false>;
    struct Shared {
        alignas(1024) char input[kStages][kHalves][kHalfBytes];
        alignas(1024) char weight[kUnits][kUnitBytes];
        alignas(1024) char output[kGroups][kBuffers][kBufferBytes];
        Ring<kStages> ring;
        int first_unit[kStages];   // where a stage's units begin in `weight`
        int taken_units[kStages];  // what becomes free with a stage
        Schedule schedule;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
    static_assert(kSharedBytes <= 227 * 1024);
};

// The plan's arrays; see plan_narrow in cpp/src/narrow_plan.h.
struct NarrowPlan {
    static constexpr int kWords = 8;  // of a warpgroup in a stage

    const int2* tiles;
    const int* rows;
    const int* words;
    const int* starts;
    const int* slots;
    int tile_count;
    int stages;
    int padded_stages;  // of `words`
    int unit_count;

    __device__ explicit NarrowPlan(const PlanHeader* plan) {
        const auto* base = reinterpret_cast<const int*>(plan);
        tiles = reinterpret_cast<const int2*>(plan + 1);  // found without waiting for the header
        rows = base + plan->rows_at;
        words = base + plan->masks_at;
        starts = base + plan->k_at;
        slots = base + plan->slots_at;
        tile_count = plan->tiles;
        stages = plan->steps;
        padded_stages = (stages + 3) / 4 * 4;
        unit_count = plan->reserved[0];
    }
};

}  // namespace ts::sm90
