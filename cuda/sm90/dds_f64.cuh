// dds in float64: dense activations times the block-sparse weight (sm_90, mma.sync).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Operands: activations and results row-major or column-major, values [nnz, bn, bk]; all float64, as sums.
// CTA: tiles of 128 tokens x 128 features, one after another, in bands of 1024 tokens, which stay in L2.
// Warps: 1 loads, 8 multiply 16 features by all tokens of the tile. No other warp needs their weight, which
// goes from memory to registers while the step before is multiplied.
// K loop: the plan's steps of 16, those in which a block row of the tile has a block, through a ring of as
// many stages as shared memory holds (TMA). A warp visits those in which its own features have one: nothing
// but blocks is multiplied, and warps may be a whole ring apart.
// Grouped products: a tile has tokens and features of one group, see sm80/dds.cuh.
// Chosen where its estimate is least among the kernels that compute the product.
#pragma once

#include <algorithm>

#include "sm80/launch.cuh"
#include "sm90/dds_f64_kernel.cuh"
#include "sm90/launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// One row of the registry.
template <Op kOp>
struct DdsFloat64 {
    using Tile = Float64Tile;
    static constexpr PlanShape kPlan = {Tile::kFeatures, Tile::kStep};

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, 0, 1)) return reason;
        if (stages(problem, device) < kMinStages) return "the device has too little shared memory";
        if (row_tiles(problem) * token_tiles(problem) > kMost || problem.tokens > kMost)
            return "so much work is out of its reach";
        return nullptr;
    }

    static size_t workspace_size(const Problem&, const Device&, const Decision&) { return 0; }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void*,
                          void* stream) {
        const Matrix &input = problem.input(), &output = problem.output();
        const int64_t tiles = row_tiles(problem) * token_tiles(problem);
        if (tiles == 0) return cudaSuccess;
        Float64Arguments arguments{};
        sm80::DdsArguments& own = arguments.dds;
        own.output = output.data;
        own.output_ld = output.ld;
        own.values = problem.values.data;
        own.bias = problem.bias;
        own.residual = problem.residual.data;
        own.residual_ld = problem.residual.ld;
        own.plan = static_cast<const PlanHeader*>(problem.plan);
        own.output_layout = output.layout;
        own.activation = problem.activation;
        own.gate_activation = problem.gate_activation;
        own.gated = problem.gated;
        own.tokens = static_cast<int>(problem.tokens);
        own.row_tiles = static_cast<int>(row_tiles(problem));
        own.row_shift = log2_of_block(problem.row_block());
        own.k_shift = log2_of_block(problem.k_block());
        own.stages = stages(problem, device);
        own.plan_key = plan_key(problem.pattern, problem.op, kPlan);
        own.offsets = problem.offsets;
        own.groups = problem.pattern.groups;
        own.group_features = static_cast<int>(problem.features());
        own.most_token_tiles = static_cast<int>(token_tiles(problem));
        own.plan_report = problem.plan_report;
        if (const cudaError_t error = map(arguments.input, input, problem.tokens, problem.k_size()))
            return error;
        const auto start = problem.grouped()                   ? start_for<true, Grouped>
                           : input.layout == Layout::row_major ? start_for<true, Single>
                                                               : start_for<false, Single>;
        const int bytes = own.stages * Tile::kStageBytes + other_bytes(problem);
        return start(arguments, static_cast<int>(std::min<int64_t>(tiles, device.multiprocessors)),
                     Tile::kThreads, bytes, device.shared_memory, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = sm90::make_row<DdsFloat64>(name, "sm80_dds");  // estimated as those are
        row.instructions = Instructions::mma_sync;
        row.ops = bits_of(kOp);
        row.input_dtypes = bits_of(DType::float64);
        row.grouped = bits_of(0, 1);
        row.precision = Precision::highest;
        row.tile_tokens = Tile::kTokens;
        row.tile_features = Tile::kFeatures;
        row.storages = bits_of(Storage::dense);
        row.united_features = Tile::kWarpFeatures;
        return row;
    }

  private:
    static constexpr int kMinStages = 4;
    static constexpr int64_t kMost = 1 << 29;  // tiles and pairs of float32, numbered in 32 bits

    using Single = sm80::DdsSchedule<Tile::kTokens>;
    using Grouped = sm80::GroupedDdsSchedule<Tile::kTokens>;

    template <bool kRowMajorInput, class Schedule>
    static constexpr auto start_for =
        &sm80::launch<dds_f64_kernel<kOp, kRowMajorInput, Schedule>, Float64Arguments>;

    // Float64 is copied as pairs of float32, bit by bit.
    static cudaError_t map(CUtensorMap& map, const Matrix& input, int64_t tokens, int64_t k) {
        constexpr int kWords = Tile::kLineBytes / 4;
        if (input.layout == Layout::row_major)
            return tma::encode(map, DType::float32, input.data,
                               {{2 * k, 1, kWords}, {tokens, 2 * input.ld, Tile::kTokens}});
        return tma::encode(map, DType::float32, input.data,
                           {{2 * tokens, 1, kWords}, {k, 2 * input.ld, Tile::kStep}});
    }

    static int other_bytes(const Problem& problem) {
        const int numbers = problem.grouped() ? problem.pattern.groups + 1 : 0;
        return static_cast<int>(sizeof(Float64Progress)) + numbers * static_cast<int>(sizeof(int));
    }
    static int stages(const Problem& problem, const Device& device) {
        return std::min((device.shared_memory - other_bytes(problem)) / Tile::kStageBytes, Tile::kMaxStages);
    }

    // Tiles along the block rows of each group.
    static int64_t row_tiles(const Problem& problem) {
        const int group_rows = Tile::kFeatures / problem.row_block();
        return (problem.features() / problem.row_block() + group_rows - 1) / group_rows;
    }
    // Tiles along the tokens of all groups, at most.
    static int64_t token_tiles(const Problem& problem) {
        if (problem.grouped()) return most_token_tiles(problem.tokens, problem.pattern.groups, Tile::kTokens);
        return (problem.tokens + Tile::kTokens - 1) / Tile::kTokens;
    }
};

}  // namespace ts::sm90

#undef TS_INSTANCE
#define TS_INSTANCE(name, kernel, op) TS_SM90_ROW(name, DdsFloat64<Op::op>)
