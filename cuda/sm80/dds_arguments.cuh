// Arguments of every dds kernel.
#pragma once

#include "common/plan.h"
#include "common/problem.h"

namespace ts::sm80 {

struct DdsArguments {
    const void* input;
    uint32_t input_ld;  // in chunks of 16 bytes
    void* output;
    int64_t output_ld;
    const void* values;
    const void* bias;
    const void* residual;  // or gate, in the output's layout
    int64_t residual_ld;
    const PlanHeader* plan;
    Layout output_layout;
    Activation activation;
    Activation gate_activation;
    bool gated;
    int tokens;
    int row_tiles;
    int row_shift;  // log2 of the features of a block
    int k_shift;    // log2 of the k of a block
    int stages;
    int lookahead;  // steps whose copies are under way while one is multiplied
    int plan_key;   // that the plan must have
    const uint32_t* metadata;
    const float* scales;    // of each feature, and
    const float* x_scales;  // of each token, of factors in 8 bits; or inside of the sums of each block, and
    int64_t x_scales_ld;    // of each kScaleGroup of k of a token, [k / kScaleGroup][x_scales_ld]
    // Grouped products:
    const int32_t* offsets;
    int groups;
    int group_features;    // of results
    int most_token_tiles;  // see most_token_tiles()
    PlanReport plan_report;
};

}  // namespace ts::sm80
