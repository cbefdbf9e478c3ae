// The arguments of an sdd kernel and what follows from its tile.
#pragma once

#include "common/plan.h"
#include "sm80/async.cuh"
#include "sm80/math.cuh"
#include "sm80/tile.cuh"

namespace ts::sm80 {

struct SddArguments {
    const void* y;
    int64_t y_ld;
    const void* x;
    int64_t x_ld;
    void* values;
    void* partial;  // sums [parts, nnz, bn, bk] if there are several parts
    const PlanHeader* plan;
    int64_t value_count;  // nnz * bn * bk
    int tokens;
    int parts;
    int part_tokens;  // a multiple of a step
    int row_shift;    // log2 of bn
    int col_shift;    // log2 of bk
    int stages;
    int lookahead;  // steps whose copies are under way while one is multiplied
    bool accumulate;
    int plan_key;  // that the plan must have
    // Grouped products:
    const int32_t* offsets;
    int groups;
    int group_rows;  // block rows
    PlanReport plan_report;
};

// Values are stored as Math::Result, the type of the operands or float.
template <class Math_, int kTileRows_, int kTileColumns_, int kWarpRows_, int kWarpColumns_>
struct SddTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr int kTileRows = kTileRows_;
    static constexpr int kTileColumns = kTileColumns_;
    static constexpr int kWarpRows = kWarpRows_;
    static constexpr int kWarpColumns = kWarpColumns_;
    static constexpr int kRowWarps = kTileRows / kWarpRows;
    static constexpr int kWarps = kRowWarps * (kTileColumns / kWarpColumns);
    static constexpr int kThreads = 32 * kWarps;
    // CTAs on a multiprocessor: its registers hold 16 warps of 32 x 32 sums in float64. Tiles of one block
    // row of 32 are halves of what they could be.
    static constexpr int kResident =
        sizeof(Input) == 8 && kWarps == 8 && kTileRows == 32 && kWarpColumns <= 32 ? 2 : 1;
    static constexpr int kMTiles = kWarpRows / 16;
    static constexpr int kNTiles = kWarpColumns / 16;
    static constexpr int kStep = kLineBytes / sizeof(Input);
    static constexpr int kChunk = kChunkBytes / sizeof(Input);

    // In a row-major operand the tokens, which are summed over, are not contiguous.
    template <bool kRowMajor>
    using YTile = Tile<Input, kTileRows, !kRowMajor>;
    template <bool kRowMajor>
    using XTile = Tile<Input, kTileColumns, !kRowMajor>;

    // Both layouts of an operand take the same room.
    static constexpr int kYBytes = YTile<true>::kBytes;
    static constexpr int kStageBytes = kYBytes + XTile<true>::kBytes;
    static_assert(kYBytes == YTile<false>::kBytes && XTile<true>::kBytes == XTile<false>::kBytes);

    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 6;
    static constexpr int shared_bytes(int stages) { return stages * kStageBytes + Ring::bytes(stages); }
};

}  // namespace ts::sm80
