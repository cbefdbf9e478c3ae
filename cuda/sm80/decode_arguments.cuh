// Arguments of the decode kernel.
#pragma once

#include "common/problem.h"

namespace ts::sm80 {

struct DecodeArguments {
    const void* input;
    int64_t input_ld;  // in bytes
    void* output;
    int64_t output_ld;
    const void* values;
    const void* bias;
    const void* residual;  // or gate, in the output's layout
    int64_t residual_ld;
    Adjacency rows;  // of results
    Layout output_layout;
    Activation activation;  // of the sums or, if gated, of the gate
    bool gated;
    int tokens;
    int row_shift;  // log2 of the rows of a block
    int k_shift;    // log2 of the k of a block
    const uint32_t* metadata;
    const float* scales;
    bool row_scales;
    int chunks;  // of tokens; the CTAs of one block row follow one another, which read the same values
    // Grouped products:
    const int32_t* offsets;
    int groups;
    int group_features;  // of results
};

}  // namespace ts::sm80
