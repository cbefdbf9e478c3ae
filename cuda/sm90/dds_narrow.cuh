// Forward and dgrad for blocks of 16 or 32 features by as many k or more (sm_90, wgmma RS).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// The result's columns are "features" here and what is summed over is "k". A long block counts as
// several square ones.
// Operands: activations row- or column-major, bf16 or fp16, through TMA; W packed in the order of its
// products, [blocks][features][k], transposed where need be, so that the blocks of a step are one copy.
// The caller packs once, or each call packs. A small batch may take less time than packing: then blocks
// that need not be transposed are copied one by one from values (Decision::reads_blocks).
//   input   [k / 64][128 tokens][64], column-major [128 tokens / 64][k][64], 128-byte swizzle
//   weight  [blocks][features of a block][k of a block], swizzled over its rows
// CTA: 256 features x 128 tokens. Features are the rows of wgmma. Of its 64 rows each warp has 16, whose
// weight it gives from registers, zeros where its block row has no block: two block rows of 32 or four
// of 16 share their products, chosen to have as many columns as possible in common.
// Cluster of 2: 512 features x 128 tokens, sharing the activations, or 256 x 256, sharing the weight.
// Warps: 1 loads, 1 schedules, 16 multiply and store. Four warpgroups take turns: while one reads its
// weight the others multiply. CTAs are persistent.
// K loop: whole steps of 128 k, or of 64 where blocks crowd, as the plan says: only its builder sees how
// many blocks share a step. A ring of activations, and the rest of shared memory for blocks
// (NarrowKinds).
// Split-K: where tiles are few a cluster has two CTAs for each of up to 4 parts, which add their sums
// through distributed shared memory.
// Chosen where its estimate is least, for such blocks.
#pragma once

#include "sm90/dds_narrow_launch.cuh"

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks) \
    TS_SM90_ROW(name, DdsNarrow<math, token_ranks, row_ranks>)
