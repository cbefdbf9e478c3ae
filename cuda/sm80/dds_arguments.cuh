// What every dds kernel is told, and where it finds the plan's arrays.
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
};

// A plan's arrays on the device. Ends the kernel with an error if it is not the plan that the launch is for.
struct DdsPlan {
    int group_rows, pieces;
    const int2* tiles;
    const int *rows, *masks, *k, *slots;

    __device__ DdsPlan(const PlanHeader* header, int key)
        : group_rows(header->group_rows), pieces(header->pieces) {
        if (header->key != key) __trap();
        const int* words = reinterpret_cast<const int*>(header);
        tiles = reinterpret_cast<const int2*>(words + header->tiles_at);
        rows = words + header->rows_at;
        masks = words + header->masks_at;
        k = words + header->k_at;
        slots = words + header->slots_at;
    }
};

}  // namespace ts::sm80
