// dds_nt of values that are 2:4 inside their blocks: the kernel of dds.cuh with their weight format. The
// gradient of x is such a product, too, of the transposed pattern with values compressed along their columns.
#pragma once

#include "sm90/dds_launch.cuh"
#include "sm90/dds_weight_2_4.cuh"

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks, tile_tokens)                                \
    namespace ts::sm90 {                                                                                    \
    const Kernel& name() {                                                                                  \
        static constexpr Kernel kRow =                                                                      \
            Dds<Op::dds_nt, math, token_ranks, row_ranks, tile_tokens, CompressedWeight<math>>::row(#name); \
        return kRow;                                                                                        \
    }                                                                                                       \
    }
