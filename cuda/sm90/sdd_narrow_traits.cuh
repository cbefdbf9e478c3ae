// The arguments of the sdd kernel for blocks of 16 x 16 and what follows from its tile.
#pragma once

#include <cudaTypedefs.h>

#include "common/list_plan.h"
#include "common/problem.h"
#include "sm90/elements.cuh"
#include "sm90/shared_memory.cuh"
#include "tma/ring.cuh"
#include "tma/sdd_schedule.cuh"

namespace ts::sm90 {

struct SddNarrowArguments {
    CUtensorMap y;
    CUtensorMap x;
    const PlanHeader* plan;
    void* values;
    float4* partial;  // [partials][kGroups], see SddPartials, or nullptr
    int* pace;        // the counters, or nullptr
    int steps;        // of 64 tokens
    int ctas;         // that the device holds
    bool may_split;
    bool accumulate;
    int plan_key;  // that the plan must have
};

// Values are stored as Math::Result, the type of the operands or float.
template <class Math_>
struct SddNarrowTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr int kBlock = 16;
    static constexpr int kBlocks = kListBlocks;
    static constexpr int kGroups = kListWarps / 4;  // warpgroups that multiply
    static constexpr int kThreads = 128 * (1 + kGroups);
    static constexpr int kStageTokens = 32;
    static constexpr int kBlockSums = kBlock * kBlock / 32;  // of a lane
    static constexpr int kSums = kBlocks * kBlockSums;
    static constexpr int kUnitBytes = kListUnit * kStageTokens * sizeof(Input);
    static constexpr int kStageBytes = kListUnits * kUnitBytes;
    static constexpr int kStages = kSharedCapacity / kStageBytes;

    struct Shared {
        // Of a unit lines of 128 bytes, [kStageTokens][kListUnit], or of 64 bytes, [kListUnit][kStageTokens].
        alignas(1024) char stages[kStages * kStageBytes];
        Ring<kStages> ring;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
};

// The plan's arrays; see common/list_plan.h.
struct ListPlan {
    int tile_count;
    const int4* tiles;
    const unsigned* masks;
    const int* units;
    const int* slots;

    // Ends the kernel with an error if the plan is not the one that the launch is for.
    __device__ ListPlan(const PlanHeader* plan, int key) {
        if (plan->key != key) __trap();
        const auto* words = reinterpret_cast<const int*>(plan);
        tile_count = __shfl_sync(~0u, plan->tiles, 0);
        tiles = reinterpret_cast<const int4*>(words + plan->tiles_at);
        masks = reinterpret_cast<const unsigned*>(words + plan->masks_at);
        units = words + plan->k_at;
        slots = words + plan->slots_at;
    }
};

}  // namespace ts::sm90
