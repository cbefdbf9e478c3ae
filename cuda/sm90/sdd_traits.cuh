// The arguments of an sdd kernel and what follows from its tile.
#pragma once

#include <cudaTypedefs.h>

#include "common/problem.h"
#include "common/strip_plan.h"
#include "elementwise/groups.h"
#include "elementwise/sums.h"
#include "sm90/sdd_plan.cuh"
#include "sm90/shared_memory.cuh"
#include "sm90/wgmma.cuh"
#include "tma/ring.cuh"
#include "tma/sdd_schedule.cuh"
#include "tma/work_queue.cuh"

namespace ts::sm90 {

constexpr int kSmallTileFeatures = 2 * kStripFeatures + kStripWindow;

struct SddArguments {
    CUtensorMap y;       // row-major [tokens][features], else [features][tokens]
    CUtensorMap x;       // likewise
    CUtensorMap blocks;  // values [nnz * 128][128], if results leave through TMA
    const PlanHeader* plan;
    void* values;
    float4* partial;    // [partials][kHalves], see SddPartials, or nullptr
    int* pace;          // the counters, or nullptr
    Operand y_operand;  // as the products read them from shared memory
    Operand x_operand;
    int plan_lines;  // of 128 bytes that the plan has at least
    int steps;       // of 64 tokens
    int team_size;   // CTAs of a cluster, which compute as many tiles side by side
    int teams;       // that the device holds
    bool may_split;
    bool stages_results;  // in the place of the last stage, and TMA stores them
    bool stages_last;     // those of a CTA's last tile, in the place of the strips
    int unit_shift;       // log2 of a unit's features
    int row_shift;        // log2 of bn
    int col_shift;        // log2 of bk
    bool accumulate;
    int plan_key;     // that the plan must have
    sums::Sums sums;  // over tokens of y, by the warps that have nothing to load; no parts if there are none
    groups::Groups groups;  // of a grouped product
    int group_features;     // likewise, of y for each weight
    PlanReport plan_report;
};

// A tile of a grouped product, and the tokens of its group.
struct GroupTile {
    int tile;  // of the plan; -1: no more
    int begin;
    int end;

    template <class Visit>
    __device__ void each(Visit visit) {
        visit(tile), visit(begin), visit(end);
    }
    __device__ int steps() const { return (end - begin + kSddStep - 1) / kSddStep; }
};

struct NoQueue {
    using Position = int;
};

// Values are stored as Math::Result, the type of the operands or float. `kGrouped_`: of grouped products.
template <class Math_, bool kGrouped_ = false>
struct SddTraits {
    static constexpr bool kGrouped = kGrouped_;
    using Queue = std::conditional_t<kGrouped, WorkQueue<GroupTile>, NoQueue>;
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr int kHalves = 2;  // warpgroups that multiply
    static constexpr int kStrip = kStripFeatures;
    static constexpr int kWindow = kStripWindow;
    static constexpr int kStep = kSddStep;
    static constexpr int64_t kTileValues = kHalves * kStrip * kWindow;  // of a tile at most
    static constexpr int kThreads = 128 * (1 + kHalves);
    static constexpr int kSumWarps = 3;   // beside the one that loads
    static constexpr int kSumsAhead = 4;  // lines that they read at a time, which their registers bound
    static constexpr int kFeatureBytes = kStep * sizeof(Input);  // of a feature in a stage
    static constexpr int kStripBytes = kStrip * kFeatureBytes;

    // Most tiles are small and leave room for one more stage, or for their results.
    static constexpr int kLargeStageBytes = kStripTileFeatures * kFeatureBytes;
    static constexpr int kSmallStageBytes = kSmallTileFeatures * kFeatureBytes;
    static constexpr int kLargeStages = kSharedCapacity / kLargeStageBytes;
    static constexpr int kMaxStages = kSharedCapacity / kSmallStageBytes;
    // There is no room for results of float.
    static constexpr bool kMayStageResults = sizeof(Result) == 2;
    static constexpr int kResultBytes = 2 * kStrip * kWindow;  // of a half, in 16 bits

    template <bool kRowMajor>
    static constexpr cute::SM90::GMMA::Major kMajor =
        kRowMajor ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K;
    template <bool kRowMajorY, bool kRowMajorX>
    using Atom = typename Math::template Atom<kMajor<kRowMajorY>, kMajor<kRowMajorX>>;

    struct Shared {
        // A stage has the strips and then the units of a tile, row-major [kStep][width], else [width][kStep].
        // At kResultsAt results are [kHalves][units of a window][64][64]; in the place of the strips, a
        // unit's are in each stage.
        alignas(1024) char stages[kLargeStages * kLargeStageBytes];
        Ring<kMaxStages> rings[2];  // of the stages of small and of large tiles
        Queue queue;
    };
    static_assert(sizeof(Shared::stages) >= kMaxStages * kSmallStageBytes);
    static constexpr int kResultsAt = (kMaxStages - 1) * kSmallStageBytes;
    static_assert(sizeof(Shared::stages) >= kResultsAt + kHalves * kResultBytes);
    static constexpr int kSharedBytes = sizeof(Shared);
};

// See the plan's `tiles`.
struct SddTile {
    int4 words;

    __device__ int strip(int half) const { return half == 0 || words.y < 0 ? words.x : words.y; }
    __device__ int strips() const { return words.y < 0 ? 1 : 2; }
    __device__ int units() const { return words.z; }
    __device__ int window(int half) const { return half == 0 ? 0 : max(words.w, 0); }
    // True if strips are of x and units of y.
    __device__ bool is_swapped() const { return words.w < 0; }
    __device__ int features(int unit_shift) const {
        return kStripFeatures * strips() + (units() << unit_shift);
    }
    __device__ bool has_strips_of(const SddTile& other) const {
        return words.x == other.words.x && words.y == other.words.y && is_swapped() == other.is_swapped();
    }
    // True if it takes the ring of large tiles.
    __device__ bool is_large(int unit_shift) const { return features(unit_shift) > kSmallTileFeatures; }
};

// See common/strip_plan.h.
struct StripPlan : SddPlan {
    using SddPlan::SddPlan;

    __device__ SddTile tile(int index) const { return {SddPlan::tile<int4>(index)}; }
    __device__ int unit_blocks() const { return group_rows; }
    __device__ const int* units() const { return k; }

    // Brings what concerns a tile close. Called by every lane of a warp, long before anyone reads it.
    // `units_of_tile`: of two windows.
    __device__ void prefetch(int index, int units_of_tile, int lane) const {
        constexpr int kLine = 128 / sizeof(int);
        const int slots_of_tile = units_of_tile * unit_blocks();
        const int* const of_slots = slots + index * slots_of_tile + (lane - 2) * kLine;
        const int* const at = lane == 0
                                  ? reinterpret_cast<const int*>(reinterpret_cast<const int4*>(tiles) + index)
                              : lane == 1 ? units() + index * units_of_tile
                                          : of_slots;
        if ((lane - 2) * kLine < slots_of_tile) asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
    }
};

// Brings the beginning of the plan into L2, for all that will read it one thing after another.
__device__ inline void prefetch_plan(const SddArguments& arguments) {
    for (int line = blockIdx.x; line < arguments.plan_lines; line += gridDim.x)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(arguments.plan + 2 * line));
}

// A position in the ring of the current tile's stages.
template <class Traits>
struct SddCursor {
    typename Ring<Traits::kMaxStages>::Position position;
    bool large = false;
    int small_stages;

    __device__ explicit SddCursor(const SddArguments& arguments)
        : small_stages(arguments.stages_results ? Traits::kMaxStages - 1 : Traits::kMaxStages) {}

    __device__ int stages() const { return large ? Traits::kLargeStages : small_stages; }
    __device__ int stage_offset() const {
        return position.stage * Traits::kFeatureBytes * (large ? kStripTileFeatures : kSmallTileFeatures);
    }
    __device__ void advance() { position.advance(stages()); }
    __device__ void select(bool now_large) {
        if (now_large == large) return;
        const auto before = position;
        position = other_;
        other_ = before;
        large = now_large;
    }

  private:
    typename Ring<Traits::kMaxStages>::Position other_;
};

}  // namespace ts::sm90
