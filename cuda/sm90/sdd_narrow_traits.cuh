// The arguments of the sdd kernel for blocks of 16 x 16 and what follows from its tile.
#pragma once

#include <cudaTypedefs.h>

#include "common/list_plan.h"
#include "common/problem.h"
#include "sm90/elements.cuh"
#include "sm90/sdd_plan.cuh"
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
    PlanReport plan_report;
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
    static constexpr bool kFloat = sizeof(Input) == 4;
    static constexpr int kStageTokens = kFloat ? 16 : 32;
    static constexpr int kBoxFeatures = kFloat ? 32 : kListUnit;  // of row-major operands, that a copy brings
    static constexpr int kBlockSums = kBlock * kBlock / 32;       // of a lane
    static constexpr int kSums = kBlocks * kBlockSums;
    static constexpr int kUnitBytes = kListUnit * kStageTokens * sizeof(Input);
    static constexpr int kStageBytes = kListUnits * kUnitBytes;
    static constexpr int kStages = kSharedCapacity / kStageBytes;

    struct Shared {
        // A unit has lines of 128 bytes, [kStageTokens][kListUnit], or of 64 bytes,
        // [kListUnit][kStageTokens].
        alignas(1024) char stages[kStages * kStageBytes];
        Ring<kStages> ring;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
};

}  // namespace ts::sm90
