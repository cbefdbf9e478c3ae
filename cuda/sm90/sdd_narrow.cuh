// Wgrad for blocks of 16 x 16 (sm_90, mma.sync).
//   W[n,k] (+)= sum over tokens t of Y[t,n] * X[t,k], for the kept blocks only, in their slots.
// wgmma multiplies 64 features of Y at least, in which nearly every 16 of X have a block where a quarter
// is kept. mma.sync multiplies 16 by 8, at 62 % of its rate, and so nothing but the blocks.
// Operands: Y and X row- or column-major, bf16 or fp16, or row-major float32 (TF32, or three products of it
// with float32's error), through TMA; W in their dtype or float32.
//   stage   [18 units], each row-major [32 tokens][64 features], else [64 features][32 tokens]; of float32
//           [2][16 tokens][32 features]
// CTA: up to 128 blocks that lie in up to 18 units of 64 features of Y and of X (common/list_plan.h). No
// clusters.
// Warps: 1 loads, 16 multiply a list of up to 8 blocks each and keep their sums in registers.
// Loop over tokens: stages of 32, or 16 of float32. ldmatrix, or a load of each word, brings the features of
// X of one block after another, and those of Y where they change: shared memory is the limit, at 512 bytes
// for each block and 16 tokens, or 8.
// Split: tiles of the last round are cut over the tokens (tma/sdd_schedule.cuh); a second kernel adds
// the sums.
// Chosen where its estimate is least, where few blocks are kept.
#pragma once

#include "sm90/sdd_narrow_launch.cuh"

#define TS_INSTANCE(name, kernel, math) TS_SM90_ROW(name, SddNarrow<math>)
