// Wgrad in float64 for blocks of 16 x 16 (sm_90, mma.sync).
//   W[n,k] (+)= sum over tokens t of Y[t,n] * X[t,k], for the kept blocks only, in their slots.
// Operands: Y and X row-major, through TMA.
// CTA: half of the blocks of a tile of common/list_plan.h, up to 64, and the units of 64 features of Y and of
// X in which they lie.
// Warps: 1 loads, 8 multiply a list of up to 8 blocks each and keep their sums in registers.
// Loop over tokens: steps of 8 through a ring of 6 stages, or of 3 where there are more than 9 units.
// Features of X are read for each block, and those of Y where they change.
// Split: tiles of the last round are cut over the tokens; a second kernel adds the sums in a fixed order.
// Chosen where its estimate is least.
#pragma once

#include "sm80/launch.cuh"
#include "sm90/launch.cuh"
#include "sm90/sdd_f64_lists_kernel.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// One row of the registry.
struct SddFloat64Lists {
    using Tile = Float64ListTile;
    static constexpr PlanShape kPlan = kListPlan;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Tile::kSharedBytes, 1)) return reason;
        if (!are_listed_blocks(problem.pattern)) return "its blocks are 16 x 16";
        if (problem.y.layout != Layout::row_major || problem.x.layout != Layout::row_major)
            return "it reads row-major y and x only";
        return problem.tokens > kMostTokens ? "so many tokens are out of its reach" : nullptr;
    }

    static size_t workspace_size(const Problem& problem, const Device& device, const Decision&) {
        if (problem.pattern.nnz == 0) return 0;
        constexpr size_t kPartial = size_t{Tile::kSums} * Tile::kComputers * sizeof(double);
        return Tile::kMostRounds * device.multiprocessors * kPartial;
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void* workspace,
                          void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        Float64ListArguments arguments{};
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.values = static_cast<double*>(problem.values.data);
        arguments.partial = static_cast<double2*>(workspace);
        arguments.steps = static_cast<int>((problem.tokens + Tile::kStep - 1) / Tile::kStep);
        arguments.ctas = device.multiprocessors;
        arguments.accumulate = problem.accumulate;
        arguments.plan_key = plan_key(problem.pattern, problem.op, kPlan);
        arguments.plan_report = problem.plan_report;
        if (problem.tokens > 0) {
            const Pattern& pattern = problem.pattern;
            if (const cudaError_t error = map(arguments.y, problem.y, problem.tokens, pattern.out_features))
                return error;
            if (const cudaError_t error = map(arguments.x, problem.x, problem.tokens, pattern.in_features))
                return error;
        }
        if (const cudaError_t error = sm80::launch<sdd_f64_lists_kernel>(
                arguments, arguments.ctas, Tile::kThreads, Tile::kSharedBytes, Tile::kSharedBytes, stream))
            return error;
        return sm80::launch<sdd_f64_lists_reduce>(arguments, 2 * arguments.ctas, 256, 0, 0, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<SddFloat64Lists>(name, "sm90_sdd_narrow");
        row.instructions = Instructions::mma_sync;
        row.ops = bits_of(Op::sdd_tn);
        row.input_dtypes = bits_of(DType::float64);
        row.result_dtypes = bits_of(DType::float64);
        row.precision = Precision::highest;
        row.tile_features = kListUnit;
        row.tile_values = kListTileBlocks / 2 * 16 * 16;
        return row;
    }

  private:
    static constexpr int64_t kMostTokens = 1 << 30;

    // Float64 is copied as pairs of float32, bit by bit, in strips of 16 features.
    static cudaError_t map(CUtensorMap& map, const Matrix& matrix, int64_t tokens, int64_t features) {
        return tma::encode(
            map, DType::float32, matrix.data,
            {{32, 1, 32}, {tokens, 2 * matrix.ld, Tile::kStep}, {features / 16, 32, kListUnit / 16}});
    }
};

}  // namespace ts::sm90

#undef TS_INSTANCE
#define TS_INSTANCE(name, kernel) TS_SM90_ROW(name, SddFloat64Lists)
