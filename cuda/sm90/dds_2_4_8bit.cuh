// Forward of activations and values in 8 bits, the values 2:4 inside their blocks: dds_8bit.cuh with wgmma
// for sparse operands.
//   Y[M,N] = scale[M] * (X[M,K] * W[N,K]^T) * scale[N]
// Operands: X and Y as in dds_8bit.cuh, values [nnz * bn, bk / 2] and metadata, both in a stage of the weight
// (dds_weight_2_4_8bit.cuh); blocks of 64 columns and more. CTA, cluster, warps, steps and sums: as in
// dds_8bit.cuh. The two warps that load the weight copy the metadata of each box as well, in bulk.
// Chosen where its estimate is least, for compressed values.
#pragma once

#include "sm90/dds_launch.cuh"
#include "sm90/dds_weight_2_4_8bit.cuh"

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::dds_nt, math, token_ranks, row_ranks, tile_tokens, CompressedByteWeight<math>>)
