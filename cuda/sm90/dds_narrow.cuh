// dds for blocks of 16 or 32 features of the result by as many k or more, in both directions:
//   nt: y[t, f] = sum over k of x[t, k] W[f, k]      nn: x[t, f] = sum over k of y[t, k] W[k, f]
// with "features" f of the result and k summed over, whichever of out and in features they are. A long block
// counts as several, which are square.
//
// Features are the rows of wgmma. Of its 64 rows each warp has 16 and gives their weight from registers,
// zeros where its block row has no block: so two block rows of 32 or four of 16 share their products, chosen
// so that they have as many columns as possible in common, and k in which none of them has a block cost
// nothing. Four warpgroups take turns: while one reads its weight the others multiply.
//
// Activations are walked in whole steps of k, with what there is of the weight. Its blocks are packed in the
// order in which they are multiplied, transposed where need be, so that those of a step are one copy: by the
// caller once for many calls, or by each call. With few tokens that may take as long as all else: then blocks
// that need not be transposed are copied one by one from where they are. The two CTAs of a cluster compute
// different features from the same activations, of which each loads one half for both; or the same features
// of different tokens, each loading half of the weight: tiles that may fit features and tokens better.
//
// The plan says how wide steps are, since only who builds it sees how many blocks share one; rings are made
// for either (see NarrowKinds).
//
// Where tiles are few, the steps of each are cut into parts, for which a cluster has two CTAs each. In the
// end the CTAs of one part add up the sums of a warpgroup, which the others put into their shared memory.
#pragma once

#include "sm90/dds_narrow_launch.cuh"

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks)                             \
    namespace ts::sm90 {                                                                    \
    const Kernel& name() {                                                                  \
        static constexpr Kernel kRow = DdsNarrow<math, token_ranks, row_ranks>::row(#name); \
        return kRow;                                                                        \
    }                                                                                       \
    }
