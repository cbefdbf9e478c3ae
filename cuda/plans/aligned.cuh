// Plans of dds by aligned steps, as common/plan.h describes them.
#pragma once

#include <algorithm>

#include "plans/groups.cuh"

namespace ts::plans {

struct AlignedShape {
    int group_rows;  // block rows of a tile
    int rank_rows;   // and of a rank
    int ranks;
    int step;            // of k
    int columns;         // of a step, or 1
    int column_steps;    // of a column, or 1
    int side;            // of a square
    int across;          // squares of a block along the rows,
    int along;           // along k
    int column_squares;  // and of these in a step
    int tiles;
    int most_steps;

    // The steps in which there is one of 32 columns, as their first columns.
    __device__ unsigned steps_of(unsigned bits) const {
        for (int distance = 1; distance < columns; distance *= 2) bits |= bits >> distance;
        constexpr unsigned kFirsts[] = {~0u, 0x55555555, 0x11111111, 0x01010101};
        return bits & kFirsts[31 - __clz(columns)];
    }
};

// Steps as wide as the plan's shape says, or half of it: which of both is known once `fill` is measured.
struct AlignedShapes {
    AlignedShape wide, narrow;
    StepFill* fill;  // of wide steps

    __device__ int places() const {
        return wide.rank_rows * wide.across * wide.columns * wide.column_squares;
    }
    __device__ AlignedShape chosen() const { return fill->crowds(places(), wide.ranks) ? narrow : wide; }
};

// Calls visit(entry, column in the step) for each block of a block row in the step that begins at a k.
template <class Visit>
__device__ inline void each_block(const View& view, const AlignedShape& shape, int row, int step,
                                  Visit visit) {
    const int first = step / view.col_block, end = __ldg(view.blocks.ptr + row + 1);
    for (int e = find_entry(view, row, first); e < end; ++e) {
        const int column = __ldg(view.blocks.idx + e) - first;
        if (column >= shape.columns) break;
        visit(e, column);
    }
}

// Counts squares in wide steps, from zero on. One block for each tile.
static __global__ void __launch_bounds__(1024)
    measure_fill(View view, AlignedShapes shapes, const int* rows) {
    const AlignedShape& shape = shapes.wide;
    const int lane = threadIdx.x % 32, steps = (view.cols * view.col_block - 1) / shape.step + 1;
    StepFill own;
    for (int i = threadIdx.x / 32; i < steps * shape.ranks; i += blockDim.x / 32) {
        const int* const rank_rows = rows + blockIdx.x * shape.group_rows + i % shape.ranks * shape.rank_rows;
        const int row = lane < shape.rank_rows ? rank_rows[lane] : -1;
        int squares = 0;
        if (row >= 0)
            each_block(view, shape, row, i / shape.ranks * shape.step,
                       [&](int, int) { squares += shape.across * shape.column_squares; });
        own.add(warp_scan(squares, lane));
    }
    if (lane < 31) return;  // which has all of them
    auto* const sums = reinterpret_cast<unsigned long long*>(shapes.fill);
    atomicAdd(sums, own.all);
    atomicAdd(sums + 1, own.steps);
    atomicAdd(sums + 2, own.squares);
    atomicAdd(sums + 3, own.neighbours);
}

// The steps of each tile, and its blocks. One thread for each.
static __global__ void count_aligned_steps(View view, Sets sets, const int* rows, AlignedShapes shapes,
                                           int2* costs) {
    const AlignedShape shape = shapes.chosen();
    const int tile = blockIdx.x * blockDim.x + threadIdx.x;
    if (tile >= shape.tiles) return;
    int steps = 0, blocks = 0;
    for (int w = 0; w < sets.width; ++w)
        steps += __popc(shape.steps_of(sets.word(tile, w))) * shape.column_steps;
    for (int i = 0; i < shape.group_rows; ++i) {
        const int row = rows[tile * shape.group_rows + i];
        if (row >= 0) blocks += __ldg(view.blocks.ptr + row + 1) - __ldg(view.blocks.ptr + row);
    }
    costs[tile] = make_int2(steps, blocks);
}

// The squares of a rank's block rows in the step that begins at a k. Called by a warp, of which each lane has
// one row.
__device__ inline void write_masks(const View& view, const AlignedShape& shape, const int* rows, int step,
                                   int2* masks, int* count) {
    const int lane = threadIdx.x % 32, strips = view.row_block / 16, strip = lane * strips;
    const int row = lane < shape.rank_rows ? rows[lane] : -1;
    unsigned mask = 0;
    int own = 0;  // squares of each `side` features
    if (row >= 0) {
        const int width = shape.column_squares * shape.side;
        const unsigned features = strips == 1 ? 0x11111111u : strips == 2 ? 0x33333333u : ~0u;
        const unsigned block = features >> (32 - width / 4);
        each_block(view, shape, row, step, [&](int, int column) {
            mask |= block << (column * view.col_block / 4 + strip % 4);
            own += shape.column_squares;
        });
    }
    const int last = warp_scan(own * shape.across, lane);
    if (lane == 31) *count = last;
    const unsigned first = last - own * shape.across;
    const auto firsts_from = [&](int begin) {
        unsigned firsts = 0;
        for (int i = begin; i < min(begin + 4, strips); ++i)
            firsts |= first + 16 * i / shape.side * own << 8 * ((strip + i) % 4);
        return firsts;
    };
    unsigned firsts = firsts_from(0);
    for (int distance = 4 / strips / 2; distance > 0; distance /= 2) {
        mask |= __shfl_xor_sync(~0u, mask, distance);
        firsts |= __shfl_xor_sync(~0u, firsts, distance);
    }
    if (lane >= shape.rank_rows || strip % 4 != 0) return;
    masks[strip / 4] = make_int2(static_cast<int>(mask), static_cast<int>(firsts));
    if (strips == 8)
        masks[strip / 4 + 1] = make_int2(static_cast<int>(mask), static_cast<int>(firsts_from(4)));
}

// One block for each tile, whose columns are a set and whose block rows are given. Starts are counts, as yet.
static __global__ void __launch_bounds__(1024)
    write_aligned_tiles(View view, AlignedShapes shapes, Sets sets, const int* rows, const int2* costs,
                        Sections plan) {
    const AlignedShape shape = shapes.chosen();
    const int tile = blockIdx.x, own_steps = shape.tiles == 0 ? 0 : costs[tile].x;
    if (tile == 0) {
        int all = 0;
        for (int i = threadIdx.x; i < shape.tiles; i += blockDim.x) all += costs[i].x;
        plan.header.steps = block_sum(all);
        plan.header.step = shape.step;
        plan.header.fill = shapes.fill->percent(shapes.places());
        if (threadIdx.x == 0) *reinterpret_cast<PlanHeader*>(plan.words) = plan.header;
    }
    if (shape.tiles == 0) return;
    const int2 own_costs = costs[tile];
    const auto earlier = [&](int2 other, int i) {
        return other.x != own_costs.x   ? other.x > own_costs.x
               : other.y != own_costs.y ? other.y > own_costs.y
                                        : i < tile;
    };
    const int2 at = place_of_tile(costs, shape.tiles, earlier);
    const int place = at.x, first = at.y, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        plan.tiles()[2 * place] = first;
        plan.tiles()[2 * place + 1] = own_steps;
    }
    const int* const own_rows = rows + tile * shape.group_rows;
    for (int i = threadIdx.x; i < shape.group_rows; i += blockDim.x)
        plan.rows()[place * shape.group_rows + i] = own_rows[i];
    int* const k = plan.k() + first;
    if (threadIdx.x < 32) {
        int before = 0;
        for (int w = 0; w < sets.width; ++w) {
            const unsigned bits = shape.steps_of(sets.word(tile, w)), own = 1u << lane;
            const int place = (before + __popc(bits & (own - 1))) * shape.column_steps;
            for (int i = 0; bits & own && i < shape.column_steps; ++i)
                k[place + i] = (32 * w + lane) * view.col_block + i * shape.step;
            before += __popc(bits);
        }
    }
    __syncthreads();
    const int words = shape.rank_rows * view.row_block / 64;
    for (int i = threadIdx.x / 32; i < own_steps * shape.ranks; i += blockDim.x / 32) {
        const int index = first * shape.ranks + i;
        write_masks(view, shape, own_rows + i % shape.ranks * shape.rank_rows, k[i / shape.ranks],
                    reinterpret_cast<int2*>(plan.masks()) + index * words, plan.starts() + index);
    }
}

// One block for each tile of the plan.
static __global__ void __launch_bounds__(1024)
    write_aligned_slots(View view, AlignedShapes shapes, Sections plan) {
    const AlignedShape shape = shapes.chosen();
    const int first = plan.tiles()[2 * blockIdx.x];
    const int steps = plan.tiles()[2 * blockIdx.x + 1];
    const int strips = view.row_block / 16, words = shape.rank_rows * strips / 4;
    for (int i = threadIdx.x; i < steps * shape.group_rows; i += blockDim.x) {
        const int row = plan.rows()[blockIdx.x * shape.group_rows + i % shape.group_rows];
        if (row < 0) continue;
        const int step = first + i / shape.group_rows, place = i % shape.group_rows;
        const int index = step * shape.ranks + place / shape.rank_rows;
        const int strip = place % shape.rank_rows * strips;
        const unsigned firsts = plan.masks()[(index * words + strip / 4) * 2 + 1];
        int* slot = plan.slots() + plan.starts()[index] + (firsts >> 8 * (strip % 4) & 0xff);
        const int k = plan.k()[step], first_square = k % view.col_block / shape.side;
        for (int of_row = 0; of_row < shape.across; ++of_row)
            each_block(view, shape, row, k, [&](int e, int) {
                const int square =
                    __ldg(view.blocks.slot + e) * (shape.across * shape.along) + first_square + of_row;
                for (int j = 0; j < shape.column_squares; ++j) *slot++ = square + j;
            });
    }
}

class AlignedBuilder {
  public:
    AlignedBuilder(Arena& arena, const View& view, PlanShape shape, int32_t key)
        : view_(view),
          shapes_{shape_of(view, shape, shape.step), shape_of(view, shape, shape.step / 2),
                  arena.take<StepFill>(1)},
          grouping_(arena, view, shapes_.wide.group_rows, false),
          costs_(arena.take<int2>(tiles())) {
        const int64_t steps = most_steps(), starts = steps * shape.ranks;
        header_ = lay_out(key, {int64_t{2} * tiles(), int64_t{tiles()} * shapes_.wide.group_rows,
                                2 * steps * (shape.tile / 64), steps,
                                view.nnz * shapes_.wide.across * shapes_.wide.along, starts + 1});
        header_.tiles = tiles();
        header_.group_rows = shapes_.wide.group_rows;
    }

    int64_t words() const { return header_.words; }

    void build(void* plan, Stream& stream) {
        grouping_.build(stream);
        const Groups& groups = grouping_.groups();
        int* const words = static_cast<int*>(plan);
        int* const starts = words + header_.starts_at;
        const int most_starts = most_steps() * shapes_.wide.ranks;
        const Sections sections{header_, words};
        fill(shapes_.fill, 0, sizeof(StepFill), stream);
        if (tiles() > 0)
            launch(measure_fill, int64_t{1024} * tiles(), 1024, stream, view_, shapes_, groups.rows);
        // Steps that the plan has room for but does not have count as zeros.
        fill(starts, 0, most_starts * sizeof(int), stream);
        launch(count_aligned_steps, tiles(), 128, stream, view_, groups.sets, groups.rows, shapes_, costs_);
        launch(write_aligned_tiles, int64_t{1024} * tiles(), 1024, stream, view_, shapes_, groups.sets,
               groups.rows, costs_, sections);
        launch(scan_counts, 0, 1024, stream, starts, most_starts);
        if (tiles() > 0)
            launch(write_aligned_slots, int64_t{1024} * tiles(), 1024, stream, view_, shapes_, sections);
    }

  private:
    int tiles() const { return shapes_.wide.tiles; }
    int most_steps() const { return shapes_.narrow.most_steps; }

    static AlignedShape shape_of(const View& view, PlanShape shape, int step) {
        AlignedShape result{};
        result.group_rows = shape.tile / view.row_block;
        result.rank_rows = result.group_rows / shape.ranks;
        result.ranks = shape.ranks;
        result.step = step;
        result.columns = std::max(1, step / view.col_block);
        result.column_steps = std::max(1, view.col_block / step);
        result.side = std::min(view.row_block, view.col_block);
        result.across = view.row_block / result.side;
        result.along = view.col_block / result.side;
        result.column_squares = std::min(step, view.col_block) / result.side;
        result.tiles = Grouping::group_count(view, result.group_rows);
        const int64_t columns = (view.cols + result.columns - 1) / result.columns;
        const int64_t steps = std::min<int64_t>(view.nnz, result.tiles * columns) * result.column_steps;
        result.most_steps = static_cast<int>(std::min<int64_t>(steps, INT32_MAX));
        return result;
    }

    View view_;
    AlignedShapes shapes_;
    Grouping grouping_;
    int2* costs_;
    PlanHeader header_;
};

}  // namespace ts::plans
