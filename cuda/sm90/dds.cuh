// dds, the product of dense activations and the block-sparse weight, in both directions:
//   nt: y[t, f] = sum over k of x[t, k] W[f, k]      nn: x[t, f] = sum over k of y[t, k] W[k, f]
// with "features" f of the result and k summed over, whichever of out and in features they are.
//
// CTAs come in clusters of two and stay on their multiprocessors. A CTA computes tiles of 256, 128 or 64
// tokens x 128 features, 64 features in each of two warpgroups: features are the rows of wgmma, so that a
// warpgroup skips the steps in which its features have no block. It walks the steps of k in which one of the
// tile's block rows has a block (see common/plan.h). Three warps load through TMA: the activations, and the
// weight of each warpgroup in a ring of its own, so that neither waits for steps that only the other needs.
// What the two CTAs have in common is loaded once, by multicast: the weight if their tiles differ in tokens,
// the activations of the columns they share if they differ in block rows.
//
// Where tiles are few, those of 128 or 64 tokens are cut into parts along k, and a second kernel adds the
// sums.
#pragma once

#include "sm90/dds_launch.cuh"

#define TS_INSTANCE(name, kernel, op, math, token_ranks, row_ranks, tile_tokens)                           \
    namespace ts::sm90 {                                                                                   \
    const Kernel& name() {                                                                                 \
        static constexpr Kernel kRow = Dds<Op::op, math, token_ranks, row_ranks, tile_tokens>::row(#name); \
        return kRow;                                                                                       \
    }                                                                                                      \
    }
