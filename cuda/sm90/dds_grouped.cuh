// Grouped forward and dgrad of 16-bit types (sm_90): dds.cuh for groups of tokens, each of which meets a
// weight of its own. A tile has tokens of one group and block rows of its weight. Where groups begin is known
// on the GPU alone: a kernel before this one counts spans of tokens (tma/groups.cuh), from which the schedule
// finds its work. The last tile of a group loads tokens of the next, which meet the wrong weight, and does
// not store them (encode_ranges). Chosen where its estimate is least.
#pragma once

#include "sm90/dds_launch.cuh"

#define TS_INSTANCE(name, kernel, op, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::op, math, token_ranks, row_ranks, tile_tokens, DenseWeight<Op::op, math>, true>)
