// What every dds kernel is told, and where it finds the plan's arrays.
#pragma once

#include <cudaTypedefs.h>

#include "common/plan.h"
#include "common/problem.h"
#include "sm90/wgmma.cuh"
#include "tma/schedule.cuh"

namespace ts::sm90 {

struct DdsArguments {
    // Left empty where nothing is read through them. Those of activations and results are row-major
    // [tokens][features], else [features][tokens].
    CUtensorMap input;       // of dds_kernel, column-major: [tokens / 64][k][64]
    CUtensorMap input_tail;  // column-major: the tokens that do not fill 64
    CUtensorMap values;      // [nnz * block_rows][block_cols]
    CUtensorMap output;
    CUtensorMap residual;  // or gate
    const PlanHeader* plan;
    const void* bias;
    const char* packed;  // the weight in the order of its products, for narrow blocks
    float4* partial;     // [tiles][spans][parts][kRanks][kWarpgroups] sums of parts of k, or nullptr
    int spans;           // of tokens
    ScheduleArguments schedule;
    Operand weight;  // as the products read it from shared memory
    Operand tokens_by_k;
    int tokens;
    int k_size;            // features summed over
    int row_block;         // features of a block
    int row_shift;         // their log2
    int row_width;         // features of a block in a warpgroup
    int warpgroup_rows;    // block rows in the features of a warpgroup, or 1
    int k_block;           // k of a block
    int64_t value_rows;    // lines of values; without any, nothing is loaded
    Layout output_layout;  // also the residual's
    Activation activation;
    Activation gate_activation;
    bool has_residual;
    bool gated;                // the residual is a gate
    int plan_key;              // that the plan must have
    const uint32_t* metadata;  // of compressed values
};

// The CTAs of a cluster, each of which computes a tile of so many tokens and some block rows. Those of
// different tokens share the weight, those of different rows the activations.
template <int kTokenRanks_, int kRowRanks_, int kTileTokens_>
struct DdsRanks {
    static constexpr int kTokenRanks = kTokenRanks_, kRowRanks = kRowRanks_, kTileTokens = kTileTokens_;
    static constexpr int kRanks = kTokenRanks * kRowRanks;
    static constexpr uint16_t kAllRanks = (1 << kRanks) - 1;

    // Of a CTA of the cluster: its places along the block rows and along the tokens.
    __device__ static int row_rank(int rank) { return kRowRanks > 1 ? rank : 0; }
    __device__ static int token_rank(int rank) { return kTokenRanks > 1 ? rank : 0; }
    // The place in the plan of what a CTA has of a tile or step.
    __device__ static int plan_index(int index, int rank) { return index * kRowRanks + row_rank(rank); }
    __device__ static int first_token(const Work& work, int rank) {
        return (work.span * kTokenRanks + token_rank(rank)) * kTileTokens;
    }
};

// Where a warpgroup's sums of a part of k lie among the partial sums.
template <class Traits>
__device__ int64_t partial_place(const DdsArguments& arguments, const Work& work, int rank, int warpgroup) {
    const int64_t first_part =
        (int64_t{work.tile} * arguments.spans + work.span) * arguments.schedule.by_parts.divisor;
    return ((first_part + work.part) * Traits::kRanks + rank) * Traits::kWarpgroups + warpgroup;
}

// The plan's arrays; see common/plan.h.
struct DdsPlan {
    const int2* tiles;
    const int* rows;
    const int* masks;
    const int* k;
    const int* slots;
    const int* starts;  // by aligned steps alone
    int group_rows;
    int pieces;
    int step;  // of aligned steps, and how full they are
    int fill;
    bool is_own;  // the plan of this launch; another must not be walked

    __device__ DdsPlan(const PlanHeader* plan, int key) {
        const auto* words = reinterpret_cast<const int*>(plan);
        tiles = reinterpret_cast<const int2*>(plan + 1);  // found without waiting for the header
        rows = words + plan->rows_at;
        masks = words + plan->masks_at;
        k = words + plan->k_at;
        slots = words + plan->slots_at;
        starts = words + plan->starts_at;
        group_rows = plan->group_rows;
        pieces = plan->pieces;
        step = plan->step;
        fill = plan->fill;
        is_own = plan->key == key;
    }
};

}  // namespace ts::sm90
