// dds of float32: the kernel of dds.cuh with the weight in registers, see dds_weight_float.cuh.
#pragma once

#include "sm90/dds_launch.cuh"
#include "sm90/dds_weight_float.cuh"

#define TS_INSTANCE(name, kernel, op, math, token_ranks, row_ranks, tile_tokens)                           \
    namespace ts::sm90 {                                                                                   \
    const Kernel& name() {                                                                                 \
        static constexpr Kernel kRow =                                                                     \
            Dds<Op::op, math, token_ranks, row_ranks, tile_tokens, FloatWeight<Op::op, math>>::row(#name); \
        return kRow;                                                                                       \
    }                                                                                                      \
    }
