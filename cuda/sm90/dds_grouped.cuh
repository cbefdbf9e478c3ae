// Grouped forward and dgrad of 16-bit types, and forward of 8 bits (sm_90): dds.cuh and dds_8bit.cuh for
// groups of tokens, each of which meets a weight of its own. A tile has tokens of one group and block rows of
// its weight; scales of features are numbered over all weights, as biases are. Where groups begin is known on
// the GPU alone: a kernel before this one counts spans of tokens (tma/groups.cuh), from which the schedule
// finds its work. The last tile of a group loads tokens of the next, which meet the wrong weight, and does
// not store them (encode_ranges). Chosen where its estimate is least.
#pragma once

#include "sm90/dds_launch.cuh"
#include "sm90/dds_weight_8bit.cuh"

namespace ts::sm90 {

template <Op kOp, class Math>
using GroupedWeight =
    std::conditional_t<is_quantized(Math::kInput), ByteWeight<Math>, DenseWeight<kOp, Math>>;

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, op, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name,                                                            \
                Dds<Op::op, math, token_ranks, row_ranks, tile_tokens, GroupedWeight<Op::op, math>, true>)
