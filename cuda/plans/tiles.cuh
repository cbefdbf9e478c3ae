// Plans of macro-tiles, as common/plan.h describes them: of dds by one or two ranks, and of sdd.
#pragma once

#include <algorithm>

#include "plans/groups.cuh"

namespace ts::plans {

struct TileShape {
    int group_rows;  // block rows of a rank
    int pieces;
    int column_steps;
    int ranks;
    int step;

    __host__ __device__ int rows() const { return group_rows * ranks; }
};

// The steps of each tile, as many as its longer half needs. One thread for each.
static __global__ void count_steps(Groups ranks, const int2* pairs, TileShape shape, int tiles, int* steps) {
    const int tile = blockIdx.x * blockDim.x + threadIdx.x;
    if (tile >= tiles) return;
    const int2 pair = shape.ranks == 2 ? pairs[tile] : make_int2(tile, -1);
    const int longest = max(ranks.counts[pair.x], pair.y < 0 ? 0 : ranks.counts[pair.y]);
    steps[tile] = (longest + shape.pieces - 1) / shape.pieces * shape.column_steps;
}

// Writes one rank's columns in the order in which they are walked: first those that the other rank has, too,
// as many as fill whole steps. Called by a warp.
__device__ inline void write_columns(const Sets& sets, int own, int other, const View& view,
                                     const TileShape& shape, int rank, int first_step, int* k) {
    const int lane = threadIdx.x % 32;
    int shared = 0;
    for (int w = lane; other >= 0 && w < sets.width; w += 32)
        shared += __popc(sets.word(own, w) & sets.word(other, w));
    shared = __reduce_add_sync(~0u, shared) / shape.pieces * shape.pieces;
    int before = 0, shared_before = 0;
    for (int first = 0; first < sets.width; first += 32) {
        const bool inside = first + lane < sets.width;
        const unsigned mine = inside ? sets.word(own, first + lane) : 0;
        const unsigned both = inside && other >= 0 ? mine & sets.word(other, first + lane) : 0;
        for (int w = 0; w < min(32, sets.width - first); ++w) {
            const unsigned columns = __shfl_sync(~0u, mine, w), common = __shfl_sync(~0u, both, w);
            const unsigned earlier = (1u << lane) - 1;
            const int place = before + __popc(columns & earlier);
            const int shared_place = shared_before + __popc(common & earlier);
            before += __popc(columns);
            shared_before += __popc(common);
            if (!(columns >> lane & 1)) continue;
            const bool goes_first = (common >> lane & 1) && shared_place < shared;
            const int at = goes_first ? shared_place : shared + place - min(shared_place, shared);
            const int column = 32 * (first + w) + lane;
            for (int i = 0; i < shape.column_steps; ++i) {
                const int step = first_step + at / shape.pieces * shape.column_steps + i;
                k[(step * shape.ranks + rank) * shape.pieces + at % shape.pieces] =
                    column * view.col_block + i * shape.step;
            }
        }
    }
}

// `in_group`: of a row in its group.
__device__ inline unsigned dds_mask(int piece, int in_group, const View& view, int pieces) {
    const int quarters = max(4 / pieces, 1), strips = view.row_block / 16;
    const unsigned columns = ((1u << quarters) - 1) << piece * 4 / pieces;
    unsigned mask = 0;
    for (int i = in_group * strips; i < (in_group + 1) * strips; ++i) mask |= columns << 4 * i;
    return mask;
}

__device__ inline void add_to_masks(const Sections& plan, const View& view, const TileShape& shape, bool sdd,
                                    int step, int piece, int in_group) {
    if (!sdd) {
        atomicOr(plan.masks() + step, dds_mask(piece, in_group, view, shape.pieces));
        return;
    }
    const int strips = view.row_block / 16, width = view.col_block / 16;
    for (int i = in_group * strips; i < (in_group + 1) * strips; ++i)
        atomicOr(plan.masks() + step * strips * shape.group_rows + i, ((1u << width) - 1) << piece * width);
}

// One block for each tile of dds, or for each group of rows of sdd, whose steps are its tiles. `sets` are the
// columns of a rank's rows, `rows` the block rows of all ranks.
template <bool kSdd>
__global__ void __launch_bounds__(256)
    write_tiles(View view, TileShape shape, Sets sets, const int2* pairs, const int* rows, const int* steps,
                int tiles, Sections plan) {
    const int tile = blockIdx.x, own_steps = tiles == 0 ? 0 : steps[tile];
    // Tiles of dds are sorted by their steps, in each weight, of which all have equally many.
    const int of_weight = max(tiles / view.weights, 1);
    const auto earlier = [&](int other, int i) {
        return !kSdd && i / of_weight == tile / of_weight && other != own_steps ? other > own_steps
                                                                                : i < tile;
    };
    const int2 at = tiles == 0 ? make_int2(0, 0) : place_of_tile(steps, tiles, earlier);
    const int place = at.x, first = at.y;
    if (tile == 0) {
        int all = 0;
        for (int i = threadIdx.x; i < tiles; i += blockDim.x) all += steps[i];
        all = block_sum(all);
        plan.header.tiles = kSdd ? all : tiles;
        plan.header.steps = kSdd ? 0 : all;
        if (threadIdx.x == 0) *reinterpret_cast<PlanHeader*>(plan.words) = plan.header;
    }
    if (tiles == 0) return;
    const auto row_of = [&](int i) { return rows == nullptr ? tile : rows[tile * shape.rows() + i]; };

    const int masks = kSdd ? shape.group_rows * view.row_block / 16 : shape.ranks,
              walked = own_steps * shape.ranks;
    for (int i = threadIdx.x; i < own_steps * masks; i += blockDim.x) plan.masks()[first * masks + i] = 0;
    for (int i = threadIdx.x; i < walked * shape.pieces; i += blockDim.x)
        plan.k()[first * shape.ranks * shape.pieces + i] = -1;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < 32 * shape.ranks) {
        const int rank = threadIdx.x / 32;
        const int2 pair = shape.ranks == 2 ? pairs[tile] : make_int2(tile, -1);
        const int own = rank == 0 ? pair.x : pair.y, other = rank == 0 ? pair.y : pair.x;
        if (own >= 0) write_columns(sets, own, other, view, shape, rank, first, plan.k());
    }
    const int row_lists = kSdd ? own_steps : 1, row_list = kSdd ? first : place;
    for (int i = threadIdx.x; i < row_lists * shape.rows(); i += blockDim.x)
        plan.rows()[row_list * shape.rows() + i] = row_of(i % shape.rows());
    int* const places = plan.tiles();
    if constexpr (kSdd) {
        int columns = 0;
        for (int w = threadIdx.x; w < sets.width; w += blockDim.x) columns += __popc(sets.word(tile, w));
        columns = block_sum(columns);
        for (int i = threadIdx.x; i < own_steps; i += blockDim.x)
            places[first + i] = min(shape.pieces, columns - i * shape.pieces);
    } else if (threadIdx.x == 0) {
        places[2 * place] = first;
        places[2 * place + 1] = own_steps;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < walked * shape.pieces * shape.group_rows; i += blockDim.x) {
        const int in_group = i % shape.group_rows, column = i / shape.group_rows,
                  piece = column % shape.pieces;
        const int step = first * shape.ranks + column / shape.pieces;  // of all ranks
        const int k = plan.k()[step * shape.pieces + piece];
        const int row = row_of(column / shape.pieces % shape.ranks * shape.group_rows + in_group);
        const int slot = k < 0 || row < 0 ? -1 : find_slot(view, row, k / view.col_block);
        plan.slots()[(step * shape.pieces + piece) * shape.group_rows + in_group] = slot;
        if (slot >= 0) add_to_masks(plan, view, shape, kSdd, step, piece, in_group);
    }
}

class TileBuilder {
  public:
    TileBuilder(Arena& arena, const View& view, PlanShape shape, bool sdd, int32_t key)
        : view_(view),
          sdd_(sdd),
          shape_{shape.tile / view.row_block, std::max(1, shape.step / view.col_block),
                 sdd ? 1 : std::max(1, view.col_block / shape.step), shape.ranks, shape.step},
          tiles_(Grouping::group_count(view, shape_.rows())),
          grouping_(arena, view, shape_.rows(), shape.ranks == 2),
          steps_(arena.take<int>(tiles_)),
          header_(lay_out(key, sections())) {
        header_.group_rows = shape_.group_rows;
        header_.pieces = shape_.pieces;
    }

    int64_t words() const { return header_.words; }

    void build(void* plan, Stream& stream) {
        grouping_.build(stream);
        const Groups& all = grouping_.groups();
        const Groups& ranks = shape_.ranks == 2 ? grouping_.halves() : all;
        launch(count_steps, tiles_, 128, stream, ranks, grouping_.pairs(), shape_, tiles_, steps_);
        launch(sdd_ ? write_tiles<true> : write_tiles<false>, int64_t{256} * tiles_, 256, stream, view_,
               shape_, ranks.sets, grouping_.pairs(), all.rows, steps_, tiles_,
               Sections{header_, static_cast<int*>(plan)});
    }

  private:
    // Columns are walked for the rows of a tile together: at most all of them, or one for each block.
    int64_t most_steps() const {
        const int64_t columns = std::min<int64_t>(view_.nnz, int64_t{tiles_} * view_.cols);
        const int64_t full = columns / shape_.pieces, partial = std::min<int64_t>(columns, tiles_);
        return (full + partial) * shape_.column_steps;
    }

    std::array<int64_t, 6> sections() const {
        const int64_t steps = most_steps(), walked = steps * shape_.ranks;
        if (sdd_)
            return {steps, steps * shape_.group_rows, steps * shape_.group_rows * view_.row_block / 16,
                    steps * shape_.pieces, steps * shape_.pieces * shape_.group_rows};
        return {int64_t{2} * tiles_, int64_t{tiles_} * shape_.rows(), walked, walked * shape_.pieces,
                walked * shape_.pieces * shape_.group_rows};
    }

    View view_;
    bool sdd_;
    TileShape shape_;
    int tiles_;
    Grouping grouping_;
    int* steps_;
    PlanHeader header_;
};

}  // namespace ts::plans
