// Forward and dgrad of float32: dds.cuh with the weight in registers (wgmma RS).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Operands: row-major float32 activations, blocks of 32 rows and columns at least. tf32 rounds both;
// tf32x3 takes two parts of each and leaves out the product of the second ones (dds_split.cuh).
// CTA: 128 features x 256 or 128 tokens; clusters of 2 share the weight. Steps of 32 k.
// Warps: as in dds.cuh; tf32x3 has 4 more, which write the second parts of activations beside the first.
// Chosen where its estimate is least.
#pragma once

#include "sm90/dds_launch.cuh"
#include "sm90/dds_weight_float.cuh"

#define TS_INSTANCE(name, kernel, op, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::op, math, token_ranks, row_ranks, tile_tokens, FloatWeight<Op::op, math>>)
