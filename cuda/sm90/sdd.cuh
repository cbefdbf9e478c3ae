// sdd, the gradient of the block-sparse weight: W[n, k] = sum over tokens t of y[t, n] x[t, k], for the kept
// blocks only, written (or added) to their slots in values.
//
// A CTA computes tiles of two halves, one for each of two warpgroups: 64 features of y, the rows of wgmma, by
// 256 gathered features of x. One warp loads the tokens in steps of 64 through TMA: the strips of y and the
// units of x that the halves need, which the plan chose to have many units in common (see
// common/strip_plan.h), so that few bytes are loaded for what is multiplied. Blocks smaller than a strip by a
// unit are rounded up to it; sums that belong to no block are not stored. sdd_schedule.cuh says which CTA
// computes what. A tile of blocks of 128 x 128 is two of them. For two of a column, y and x change places in
// the tile, whose sums are then transposed. Such tiles are computed by teams of two CTAs, which load strips
// that both need once.
//
// Few tokens leave little time to begin and to end: what is read one thing after another is fetched ahead,
// and TMA stores the results of one tile while the next is computed.
#pragma once

#include "sm90/sdd_launch.cuh"

#define TS_INSTANCE(name, kernel, math)                       \
    namespace ts::sm90 {                                      \
    const Kernel& name() {                                    \
        static constexpr Kernel kRow = Sdd<math>::row(#name); \
        return kRow;                                          \
    }                                                         \
    }
