// Forward of activations and values in 8 bits, int8 or float8_e4m3fn: dds.cuh with wgmma for these types.
//   Y[M,N] = scale[M] * (X[M,K] * W[N,K]^T) * scale[N]
// Operands: as in dds.cuh, but X row-major alone: wgmma reads 8 bits along k only, as both lie. The scales
// stay outside of the sums, in the epilogue. Y in bf16, fp16 or fp32.
// CTA, cluster, warps: as in dds.cuh. K loop: steps of 128 k, which have the bytes of 64 k of 16 bits.
// Sums: int32, exact, of int8. Those of float8 are carried over now and then (CarriedSums), which the
// warpgroups do at different steps: meanwhile the other one multiplies.
// Chosen where its estimate is least.
#pragma once

#include "sm90/dds_launch.cuh"
#include "sm90/dds_weight_8bit.cuh"

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::dds_nt, math, token_ranks, row_ranks, tile_tokens, ByteWeight<math>>)
