// Wgrad: the gradient of the block-sparse weight (sm_90, wgmma SS).
//   W[n,k] (+)= sum over tokens t of Y[t,n] * X[t,k], for the kept blocks only, in their slots.
// Operands: Y and X row- or column-major, bf16 or fp16, through TMA; W in their dtype or float32.
//   stage   [strips and then units of a tile], each row-major [64 tokens][width], else [width][64 tokens]
// CTA: a tile of two halves, one for each of two warpgroups: a strip of 64 features of Y, the rows of
// wgmma, by 256 gathered features of X, in units of 32 or 64. The plan chose halves that have many units
// in common, so that few bytes are loaded for what is multiplied (common/strip_plan.h). Blocks smaller
// than a strip by a unit are rounded up to it; sums that belong to no block are not stored. A tile of
// blocks of 128 x 128 is two of them; for two of a column Y and X change places in the tile, whose sums
// are then transposed.
// Cluster: 1 CTA, or 2 for blocks of 128 x 128, which load strips that both need once.
// Warps: 1 loads, 3 sum up Y for the gradient of the bias (Decision::sums_y), 8 multiply and store.
// Loop over tokens: steps of 64, in a ring of 3 stages of large tiles or 4 of small ones.
// Split: tiles of the last round are cut over the tokens (tma/sdd_schedule.cuh); a second kernel adds
// the sums.
// Chosen where its estimate is least.
//
// A small batch leaves little time to begin and to end: what is read one thing after another is fetched
// ahead, and TMA stores the results of one tile while the next is computed.
#pragma once

#include "sm90/sdd_launch.cuh"

#define TS_INSTANCE(name, kernel, math) TS_SM90_ROW(name, Sdd<math>)
