// sdd, the gradient of the block-sparse weight, of blocks of 16 x 16: W[n, k] = sum over tokens t
// of y[t, n] x[t, k], for the kept blocks only, written (or added) to their slots in values.
//
// wgmma multiplies 64 features of y at least, in which nearly every 16 of x have a block where a quarter is
// kept. mma.sync multiplies 16 by 8, at 62 % of its rate, and so nothing but the blocks. A CTA computes tiles
// of up to 128 blocks of 16 x 16 that lie in some units of 64 features of y and of x (see
// common/list_plan.h): one warp loads these units through TMA, in stages of 32 tokens, whichever blocks are
// in them. Each of 16 warps has a list of blocks, whose sums it keeps in registers: ldmatrix brings the
// features of x of one block after another, and those of y where they change. Shared memory limits that: 512
// bytes for each block and 16 tokens. sdd_schedule.cuh says which CTA computes what.
#pragma once

#include "sm90/sdd_narrow_launch.cuh"

#define TS_INSTANCE(name, kernel, math)                             \
    namespace ts::sm90 {                                            \
    const Kernel& name() {                                          \
        static constexpr Kernel kRow = SddNarrow<math>::row(#name); \
        return kRow;                                                \
    }                                                               \
    }
