// The arguments of an sdd kernel and what follows from its tile.
#pragma once

#include <cudaTypedefs.h>

#include "common/plan.h"
#include "common/problem.h"
#include "sm90/pipeline.cuh"
#include "sm90/sdd_schedule.cuh"
#include "sm90/wgmma.cuh"

namespace ts::sm90 {

struct SddArguments {
    CUtensorMap y;
    CUtensorMap x;
    const PlanHeader* plan;
    void* values;
    float4* partial;
    Operand y_operand;  // as the products read them from shared memory
    Operand x_operand;
    int steps;        // of 64 tokens
    int ctas;         // of the kernel that multiplies
    int stages;       // of the ring
    int stage_bytes;
    int unit_shift;  // log2 of a unit's features
    int row_shift;   // log2 of bn
    int col_shift;   // log2 of bk
    bool accumulate;
};

template <class Math_>
struct SddTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    static constexpr int kHalves = 2;  // warpgroups that multiply
    static constexpr int kStrip = kStripFeatures;
    static constexpr int kWindow = kStripWindow;
    static constexpr int kStep = 64;  // tokens
    static constexpr int kThreads = 128 * (1 + kHalves);
    static constexpr int kFeatureBytes = kStep * 2;  // of a feature in a stage
    static constexpr int kStripBytes = kStrip * kFeatureBytes;

    // Where blocks fill two strips their tiles have no more than two strips and one window.
    static constexpr int kMaxStages = 4;
    static constexpr int stage_bytes(int block_rows) {
        return kFeatureBytes * (block_rows > kStrip ? 2 * kStrip + kWindow : kStripTileFeatures);
    }
    static constexpr int stages(int block_rows) { return block_rows > kStrip ? 4 : 3; }

    template <bool kRowMajor>
    static constexpr cute::SM90::GMMA::Major kMajor = kRowMajor ? cute::SM90::GMMA::Major::MN
                                                                : cute::SM90::GMMA::Major::K;
    template <bool kRowMajorY, bool kRowMajorX>
    using Atom = typename Math::template Atom<kMajor<kRowMajorY>, kMajor<kRowMajorX>>;

    struct Shared {
        alignas(1024) char stages[3 * kStripTileFeatures * kFeatureBytes];
        Ring<kMaxStages> ring;
    };
    static_assert(sizeof(Shared::stages) >= 4 * kFeatureBytes * (2 * kStrip + kWindow));
    static constexpr int kSharedBytes = sizeof(Shared);
};

// The plan's arrays; see common/plan.h.
struct SddPlan {
    int tile_count;
    int parts;  // blocks of a strip by a unit
    const int4* tiles;
    const int* units;
    const int* slots;

    __device__ explicit SddPlan(const PlanHeader* plan) {
        const auto* words = reinterpret_cast<const int*>(plan);
        // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
        tile_count = __shfl_sync(~0u, plan->tiles, 0);
        parts = plan->groups;
        tiles = reinterpret_cast<const int4*>(words + plan->tiles_at);
        units = words + plan->k_at;
        slots = words + plan->slots_at;
    }

    // First features of the strips, the second -1 if there is one; number of units; start of the second window.
    __device__ int4 tile(int index) const { return __ldg(tiles + index); }
};

}  // namespace ts::sm90
