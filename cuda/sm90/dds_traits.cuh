// The arguments of a dds kernel and what follows from its tile.
#pragma once

#include <cudaTypedefs.h>

#include "common/plan.h"
#include "common/problem.h"
#include "sm90/pipeline.cuh"
#include "sm90/schedule.cuh"
#include "sm90/wgmma.cuh"

namespace ts::sm90 {

struct DdsArguments {
    CUtensorMap input;
    CUtensorMap input_tail;  // feature-major: the tokens that do not fill 64
    CUtensorMap values;
    CUtensorMap output;
    CUtensorMap residual;
    const PlanHeader* plan;
    const void* bias;
    const char* packed;  // the weight in the order of its products, for narrow blocks
    float4* partial;     // sums of parts of k, or nullptr
    int units;           // of tokens
    ScheduleArguments schedule;
    Operand weight;  // as the products read it from shared memory
    Operand tokens_by_k;
    int tokens;
    int k_size;     // features summed over
    int row_block;  // features of a block
    int row_shift;  // their log2
    int row_width;  // features of a block in a warpgroup
    int row_parts;  // blocks across the features of a warpgroup
    int k_block;    // k of a block
    int64_t value_rows;
    Layout output_layout;  // also the residual's
    Activation activation;
    bool has_residual;
};

// Where a warpgroup's sums of a part of k lie among the partial sums.
template <class Traits>
__device__ int64_t partial_place(const DdsArguments& arguments, const Work& work, int rank, int group) {
    const int64_t part =
        (int64_t{work.tile} * arguments.units + work.unit) * arguments.schedule.by_splits.divisor;
    return ((part + work.split) * Traits::kRanks + rank) * Traits::kGroups + group;
}

// The plan's arrays; see common/plan.h.
struct DdsPlan {
    const int2* tiles;
    const int* rows;
    const int* masks;
    const int* k;
    const int* slots;
    const int* starts;  // by aligned steps alone
    int groups;
    int pieces;

    __device__ explicit DdsPlan(const PlanHeader* plan) {
        const auto* words = reinterpret_cast<const int*>(plan);
        tiles = reinterpret_cast<const int2*>(plan + 1);  // found without waiting for the header
        rows = words + plan->rows_at;
        masks = words + plan->masks_at;
        k = words + plan->k_at;
        slots = words + plan->slots_at;
        starts = words + plan->starts_at;
        groups = plan->groups;
        pieces = plan->pieces;
    }
};

// A cluster computes kTokenRanks x kRowRanks tiles of 256 or 128 tokens x 128 features, one of them a CTA.
// With two ranks of tokens the CTAs share the weight, with two ranks of rows the activations.
template <Op kOp, class Math_, int kTokenRanks_, int kRowRanks_, int kTileTokens_>
struct DdsTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    static constexpr bool kTransposed = kOp == Op::dds_nn;
    static constexpr int kTokenRanks = kTokenRanks_;
    static constexpr int kRowRanks = kRowRanks_;
    static constexpr int kRanks = kTokenRanks * kRowRanks;
    static constexpr uint16_t kAllRanks = (1 << kRanks) - 1;
    // Of a CTA of the cluster: its places along the block rows and along the tokens.
    __device__ static int row_rank(int rank) { return kRowRanks > 1 ? rank : 0; }
    __device__ static int token_rank(int rank) { return kTokenRanks > 1 ? rank : 0; }
    // The place in the plan of a CTA's part of a tile or step.
    __device__ static int plan_index(int index, int rank) { return index * kRowRanks + row_rank(rank); }
    __device__ static int first_token(const Work& work, int rank) {
        return (work.unit * kTokenRanks + token_rank(rank)) * kTileTokens;
    }

    // The block rows of a CTA's tile.
    __device__ static const int* rows_of(const DdsPlan& plan, int tile, int rank) {
        return plan.rows + plan_index(tile, rank) * plan.groups;
    }

    static constexpr int kTileTokens = kTileTokens_;
    static constexpr int kGroups = 2;  // warpgroups that multiply, each 64 features
    static constexpr int kGroupFeatures = 64;
    static constexpr int kTileFeatures = kGroups * kGroupFeatures;
    static constexpr int kStep = 64;
    static constexpr int kThreads = 128 * (1 + kGroups);

    static constexpr int kInputBytes = kTileTokens * kStep * 2;
    static constexpr int kWeightBytes = kGroupFeatures * kStep * 2;
    static constexpr int kInputStages = 4 * 256 / kTileTokens;
    static constexpr int kWeightStages = 3;

    static constexpr int kChunkTokens = 64;  // stored at a time
    static constexpr int kChunkBytes = kChunkTokens * kGroupFeatures * 2;
    static constexpr int kAllChunks = kTileTokens / kChunkTokens;
    static constexpr int kChunks = kAllChunks < 3 ? kAllChunks : 3;   // buffers of a warpgroup
    static constexpr int kSums = kTileTokens * kGroupFeatures / 128;  // of a thread
    static constexpr bool kSplits = kTileTokens == 128;               // made for few tiles
    using Schedule = sm90::Schedule<kSplits>;

    template <bool kRowMajorInput>
    using Atom = typename Math::template Atom<
        kTransposed ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K,
        kRowMajorInput ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN, kTileTokens>;

    struct Shared {
        alignas(1024) char input[kInputStages][kInputBytes];
        alignas(1024) char weight[kGroups][kWeightStages][kWeightBytes];
        alignas(1024) char output[kGroups][kChunks][kChunkBytes];
        Ring<kInputStages> input_ring;
        Ring<kWeightStages> weight_ring[kGroups];
        Barrier residual[kGroups][kChunks];
        Schedule schedule;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
};

}  // namespace ts::sm90
