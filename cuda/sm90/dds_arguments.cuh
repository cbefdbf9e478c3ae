// Arguments of every dds kernel, and its view of the plan.
#pragma once

#include <cudaTypedefs.h>

#include "common/plan_view.cuh"
#include "common/problem.h"
#include "sm90/wgmma.cuh"
#include "tma/groups.cuh"
#include "tma/schedule.cuh"

namespace ts::sm90 {

struct DdsArguments {
    // Left empty where nothing is read through them. Those of activations and results are row-major
    // [tokens][features], else [features][tokens].
    CUtensorMap input;       // of dds_kernel, column-major: [tokens / 64][k][64]
    CUtensorMap input_tail;  // column-major: the tokens that do not fill 64
    CUtensorMap values;      // [nnz * block_rows][block_cols]
    CUtensorMap output;
    CUtensorMap residual;    // or gate
    CUtensorMap scales_map;  // of x inside of the sums, [k / kScaleGroup][tokens]
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
    int carried_products;      // of wgmma, with 32 kept values of k each, after which sums are carried
    const uint32_t* metadata;  // of compressed values
    const float* x_scales;     // of 8 bits, for each token
    const float* scales;       // likewise, for each feature of the output, or inside of the sums each block
    GroupArguments groups;     // of a grouped product, instead of `schedule`
    int group_rows;            // likewise, block rows of each weight
    PlanReport plan_report;
};

constexpr int kCarriedProducts = 16;  // 512 of k; see carry()

inline int carried_products(const Problem& problem) {
    return problem.precision == Precision::fast ? INT_MAX : kCarriedProducts;
}

// The CTAs of a cluster, each of which computes a tile of so many tokens and some block rows. Those of
// different tokens share the weight, those of different rows the activations.
template <int kTokenRanks_, int kRowRanks_, int kTileTokens_>
struct DdsRanks {
    static constexpr int kTokenRanks = kTokenRanks_, kRowRanks = kRowRanks_, kTileTokens = kTileTokens_;
    static constexpr int kRanks = kTokenRanks * kRowRanks;
    static constexpr uint16_t kAllRanks = (1 << kRanks) - 1;

    // A CTA's places in the cluster along the block rows and along the tokens.
    __device__ static int row_rank(int rank) { return kRowRanks > 1 ? rank : 0; }
    __device__ static int token_rank(int rank) { return kTokenRanks > 1 ? rank : 0; }
    // The place in the plan of what a CTA has of a tile or step.
    __device__ static int plan_index(int index, int rank) { return index * kRowRanks + row_rank(rank); }
    __device__ static int first_token(const Work& work, int rank) {
        return (work.span * kTokenRanks + token_rank(rank)) * kTileTokens;
    }
    __device__ static int first_token(const GroupWork& work, int rank) {
        return work.token + token_rank(rank) * kTileTokens;
    }
};

// Place of a warpgroup's sums of a part of k among the partial sums.
template <class Traits>
__device__ int64_t partial_place(const DdsArguments& arguments, const Work& work, int rank, int warpgroup) {
    const int64_t first_part =
        (int64_t{work.tile} * arguments.spans + work.span) * arguments.schedule.by_parts.divisor;
    return ((first_part + work.part) * Traits::kRanks + rank) * Traits::kWarpgroups + warpgroup;
}

// See common/plan.h. Tiles are found without waiting for the header.
struct DdsPlan : PlanView {
    bool is_own;  // the plan of this launch

    __device__ DdsPlan(const PlanHeader* header, int key) {
        read_places(header);
        tiles = reinterpret_cast<const int*>(header + 1);
        read_numbers(header);
        is_own = header->key == key;
    }
    __device__ int step() const { return pieces; }  // of aligned steps
};

}  // namespace ts::sm90
