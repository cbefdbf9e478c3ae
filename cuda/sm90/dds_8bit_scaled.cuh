// Forward of float8_e4m3fn with scales inside of the sums: dds_8bit.cuh for blocks of 128 x 128.
//   Y[M,N] = sum over b of scale[M,b] * scale of block (N,b) * (X[M,b] * W[N,b]^T), b: 128 of K
// Operands: as in dds_8bit.cuh, and the scales of X [K / 128][M], those of W [nnz]. TMA brings those of a
// step's tokens into the stage of the activations; the warp that loads blocks reads theirs with the plan, 32
// at a time, and writes them beside the stages of the weight.
// Sums: those of a step, of tensor cores, are multiplied by both scales as they are added to others in
// float32. The warpgroups take turns: while one of them scales and adds, the other one multiplies.
// Chosen where its estimate is least.
#pragma once

#include "sm90/dds_launch.cuh"
#include "sm90/dds_weight_8bit.cuh"

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::dds_nt, math, token_ranks, row_ranks, tile_tokens, ScaledByteWeight<math>>)
