// Forward and dgrad of 16-bit types (sm_90, wgmma SS).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// The result's columns are "features" here and what is summed over is "k", in either direction.
// Operands: activations row- or column-major, results too, bf16 or fp16; W as stored, [nnz * bn, bk].
//   input   [pieces][tokens][k of a piece], column-major [pieces][tokens / 64][k of a piece][64]
//   weight  [2 warpgroups][pieces][64][k of a piece], of NN [2][block rows][64][features of a block]
//   All go to shared memory through TMA, swizzled over the width of their rows (32 to 128 bytes).
// CTA: 128 features x 256, 128 or 64 tokens. Features are the rows of wgmma, 64 in each of two
// warpgroups, so that a warpgroup skips the steps in which its features have no block.
// Cluster of 2: different tokens, which share the weight by multicast (tiles of 512 or 256 x 128), or
// different block rows, which share the activations of the columns that both walk (256, 128 or 64 x 256).
// Warps: 1 loads activations, 2 load the weight, 1 schedules, 8 multiply and store. CTAs are persistent.
// K loop: the plan's steps of 64 k in which one of the tile's block rows has a block (common/plan.h).
// Activations have one ring of stages and the weight of each warpgroup another, so that neither waits
// for steps that only the other needs.
// Split-K: where tiles are few, those of 128 or 64 tokens are cut along k; a second kernel adds the sums
// in a fixed order (dds_reduce.cuh).
// Chosen where its estimate is least: blocks of 64 and 128, blocks with more features
// than k, which dds_narrow does not take, and batches that are too large for decode.
#pragma once

#include "sm90/dds_launch.cuh"

#define TS_INSTANCE(name, kernel, op, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::op, math, token_ranks, row_ranks, tile_tokens>)
