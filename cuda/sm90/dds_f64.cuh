// dds in float64: see sm80/dds.cuh.
#pragma once

#include "sm80/dds.cuh"
#include "sm90/f64.cuh"

#undef TS_INSTANCE
#define TS_INSTANCE(name, kernel, op, math, tile_tokens, tile_features, warp_tokens, warp_features)     \
    TS_SM90_ROW(name, Float64Row<sm80::Dds<Op::op, math, sm80::DenseWeight, tile_tokens, tile_features, \
                                           warp_tokens, warp_features>>)
