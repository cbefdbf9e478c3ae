// Forward and dgrad of values that are 2:4 inside their blocks: dds.cuh with wgmma for sparse operands.
//   Y[M,N] = X[M,K] * W[N,K]^T
// dgrad is the same product of the transposed pattern with values compressed along their columns.
// Operands: as in dds.cuh, but values [nnz * bn, bk / 2] and metadata, both in a stage of the weight
// (dds_weight_2_4.cuh). CTA, cluster, warps and K loop: as in dds.cuh. The two warps that load the
// weight copy the metadata of each box as well, in bulk.
// Chosen where its estimate is least, for compressed values.
#pragma once

#include "sm90/dds_launch.cuh"
#include "sm90/dds_weight_2_4.cuh"

#define TS_INSTANCE(name, kernel, math, token_ranks, row_ranks, tile_tokens) \
    TS_SM90_ROW(name, Dds<Op::dds_nt, math, token_ranks, row_ranks, tile_tokens, CompressedWeight<math>>)
