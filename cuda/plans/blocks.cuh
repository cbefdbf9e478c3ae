// Plans of sdd for blocks of 128 x 128, as common/strip_plan.h describes them. A tile is two blocks of a
// line: of a row, or of a column where x is wider than y. As on the host, lines give some blocks to those
// that cross them, so that nearly all have an even number, and tiles of one line come two by two. The
// columns of several weights are those of a diagonal of them, so that lines cross in one weight alone; their
// tiles are sorted by weight and not two by two.
#pragma once

#include <climits>

#include "common/strip_plan.h"
#include "plans/strips.cuh"
#include "plans/transpose.cuh"

namespace ts::plans {

struct BlockTile {
    int line;       // from which the strips are cut
    int blocks[2];  // crossing lines; the second may be -1
    int swapped;    // whether the line is a column

    __device__ uint64_t order(bool wide) const {
        return static_cast<uint64_t>(blocks[1] < 0) << 32 |
               static_cast<uint32_t>(wide == swapped ? line : blocks[0]);
    }
};

// Going from crossing line to crossing line, lines give their last block if they have an odd number; if these
// are odd too, a line that could give another block later gives this one. rest: blocks of each line still to
// come, and whether it has an odd number. One block.
static __global__ void __launch_bounds__(1024)
    give_blocks(Sets lines, const int* counts, int2* rest, Sets given) {
    __shared__ int spares[2];  // used in turn: one is reset while the other is in use
    if (threadIdx.x == 0) spares[0] = INT_MAX;
    for (int line = threadIdx.x; line < lines.count; line += blockDim.x)
        rest[line] = make_int2(counts[line], counts[line] % 2);
    for (int at = 0; at < given.count; ++at) {
        const uint32_t bit = 1u << at % 32;
        int& spare = spares[at % 2];
        int count = 0;
        __syncthreads();
        if (threadIdx.x == 0) spares[(at + 1) % 2] = INT_MAX;
        for (int first = 0; first < lines.count; first += blockDim.x) {
            const int line = first + threadIdx.x;
            bool gives = false;
            if (line < lines.count && (lines.word(line, at / 32) & bit) != 0) {
                const int later = --rest[line].x, odd = rest[line].y;
                gives = later == 0 && odd;
                if (gives) lines.word(line, at / 32) &= ~bit;
                if (later > 0) atomicMin(&spare, odd ? line : line + lines.count);
            }
            const uint32_t all = __ballot_sync(~0u, gives);
            if (line % 32 == 0 && line < lines.count) given.word(at, line / 32) = all;
            count += __syncthreads_count(gives);
        }
        if (threadIdx.x == 0 && count % 2 != 0 && spare != INT_MAX) {
            const int line = spare % lines.count;
            lines.word(line, at / 32) &= ~bit;
            given.word(at, line / 32) |= 1u << line % 32;
            rest[line].y ^= 1;
        }
    }
}

// Counts for each line the pairs of the lines before it, and the tiles beside these. One thread block.
static __global__ void __launch_bounds__(1024) number_tiles(const int* counts, int lists, int2* starts) {
    int2 before = make_int2(0, 0);
    for (int first = 0; first < lists; first += blockDim.x) {
        const int list = first + threadIdx.x, tiles = list < lists ? (counts[list] + 1) / 2 : 0;
        const int2 pairs = block_scan(tiles / 2), singles = block_scan(tiles % 2);
        if (list < lists) starts[list] = make_int2(before.x + pairs.x, before.y + singles.x);
        before.x += pairs.y;
        before.y += singles.y;
    }
    if (threadIdx.x == 0) starts[lists] = before;
}

// One thread for each list: the crossing lines', of what they were given, and then the lines'.
static __global__ void list_tiles(Sets given, Sets lines, const int2* starts, bool by_column,
                                  BlockTile* tiles, BlockTile* singles) {
    const int list = blockIdx.x * blockDim.x + threadIdx.x;
    if (list >= given.count + lines.count) return;
    const bool crosses = list < given.count;
    const Sets& sets = crosses ? given : lines;
    const int line = crosses ? list : list - given.count;
    const int2 start = starts[list];
    const int paired = 2 * (starts[list + 1].x - start.x);
    BlockTile tile{line, {-1, -1}, crosses != by_column};
    int found = 0;
    const auto add = [&] {
        (found < paired ? tiles[2 * start.x + found] : singles[start.y]) = tile;
        tile.blocks[0] = tile.blocks[1] = -1;
        ++found;
    };
    for (int w = 0; w < sets.width; ++w)
        for (uint32_t bits = sets.word(line, w); bits != 0; bits &= bits - 1) {
            tile.blocks[tile.blocks[0] >= 0] = 32 * w + __ffs(bits) - 1;
            if (tile.blocks[1] >= 0) add();
        }
    if (tile.blocks[0] >= 0) add();
}

// One thread for each tile beside the pairs: sorted, they become pairs.
static __global__ void pair_singles(const BlockTile* singles, const int2* totals, bool wide,
                                    BlockTile* tiles) {
    const int own = blockIdx.x * blockDim.x + threadIdx.x;
    if (own >= totals->y) return;
    const uint64_t order = singles[own].order(wide);
    int place = 0;
    for (int i = 0; i < totals->y; ++i) {
        const uint64_t other = singles[i].order(wide);
        place += other < order || (other == order && i < own);
    }
    tiles[2 * totals->x + place] = singles[own];
}

// The place of a tile among all. Called by a warp.
__device__ inline int place_of_block_tile(const View& view, const BlockTile* tiles, int count, bool wide,
                                          int own) {
    const int step = view.weights > 1 ? 1 : 2, first = own / step * step, lane = threadIdx.x % 32;
    if (first + step > count) return own;
    const auto order_of = [&](const BlockTile& tile) {
        const int row = tile.swapped ? tile.blocks[0] : tile.line;
        const auto weight = static_cast<uint64_t>(row / view.weight_rows());
        return weight << StripTile::kWeightBits | tile.order(wide);
    };
    const uint64_t order = order_of(tiles[first]);
    int place = 0;
    for (int i = step * lane; i + step <= count; i += step * 32) {
        const uint64_t other = order_of(tiles[i]);
        place += other < order || (other == order && i < first);
    }
    return step * __reduce_add_sync(~0u, place) + own % step;
}

// One warp for each tile there could be. Pairs are sorted by their first tiles.
static __global__ void write_block_tiles(View view, const BlockTile* tiles, const int2* totals, bool wide,
                                         Sections plan) {
    constexpr int kUnits = 2 * kStripWindow / kStripFeatures;
    const int own = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int count = 2 * totals->x + totals->y;
    if (own == 0 && lane == 0) {
        plan.header.tiles = count;
        *reinterpret_cast<PlanHeader*>(plan.words) = plan.header;
    }
    if (own >= count) return;
    const int place = place_of_block_tile(view, tiles, count, wide, own);
    const BlockTile tile = tiles[own];
    const int unit = lane % kUnits, width = kStripFeatures;
    // Columns are numbered in each weight.
    const int line = tile.swapped ? tile.line % view.weight_cols() : tile.line;
    if (lane == 0)
        *reinterpret_cast<int4*>(plan.tiles() + 4 * place) = make_int4(
            2 * width * line, 2 * width * line + width, tile.blocks[1] < 0 ? 2 : 4, tile.swapped ? -1 : 0);
    if (lane >= kUnits) return;
    const int of_unit = unit < 4 ? tile.blocks[unit / 2] : -1;
    const int crossing = tile.swapped || of_unit < 0 ? of_unit : of_unit % view.weight_cols();
    plan.k()[place * kUnits + unit] = crossing < 0 ? -1 : (2 * crossing + unit % 2) * width;
    // Both halves, of kUnits / 2 units each, have the same blocks.
    const int block = tile.blocks[unit / 2 % 2];
    plan.slots()[place * kUnits + unit] =
        block < 0 ? -1 : find_slot(view, tile.swapped ? block : tile.line, tile.swapped ? tile.line : block);
}

class BlockBuilder {
  public:
    BlockBuilder(Arena& arena, const View& view, const Pattern& pattern, int32_t key)
        : view_(view),
          by_column_(pattern.group_out_features() < pattern.in_features),
          rows_{nullptr, view.rows, (view.cols + 31) / 32},
          columns_{nullptr, view.cols, (view.rows + 31) / 32} {
        for (Sets* sets : {&rows_, &columns_}) sets->words = arena.take<uint32_t>(sets->size());
        lines_ = by_column_ ? columns_ : rows_;
        given_ = by_column_ ? rows_ : columns_;
        lists_ = view.rows + view.cols;
        const int64_t most = (view.nnz + std::min<int64_t>(lists_, view.nnz)) / 2 + 1;
        most_tiles_ = static_cast<int>(most);
        counts_ = arena.take<int>(lists_);
        rest_ = arena.take<int2>(lines_.count);
        starts_ = arena.take<int2>(lists_ + 1);
        tiles_ = arena.take<BlockTile>(most);
        singles_ = arena.take<BlockTile>(lists_);
        const int units = 2 * kStripWindow / kStripFeatures;
        header_ = lay_out(key, {4 * most, 0, 0, most * units, most * units, starts_of(view)});
        header_.unit_blocks = 1;
        header_.units = units;
    }

    int64_t words() const { return header_.words; }

    void build(void* plan, Stream& stream) {
        launch(fill_sets, rows_.size(), 256, stream, view_, rows_, Elements{});
        if (by_column_)
            launch(transpose_sets, int64_t{32} * rows_.width * columns_.width, 256, stream, rows_, columns_);
        int* const line_counts = counts_ + given_.count;
        launch(count_elements, lines_.count, 128, stream, lines_, line_counts);
        launch(give_blocks, 0, 1024, stream, lines_, line_counts, rest_, given_);
        launch(count_elements, given_.count, 128, stream, given_, counts_);
        launch(count_elements, lines_.count, 128, stream, lines_, line_counts);
        launch(number_tiles, 0, 1024, stream, counts_, lists_, starts_);
        launch(list_tiles, lists_, 64, stream, given_, lines_, starts_, by_column_, tiles_, singles_);
        const int2* const totals = starts_ + lists_;
        launch(pair_singles, lists_, 64, stream, singles_, totals, by_column_, tiles_);
        launch(write_block_tiles, int64_t{32} * most_tiles_, 128, stream, view_, tiles_, totals, by_column_,
               Sections{header_, static_cast<int*>(plan)});
        list_starts(view_, header_, plan, stream);
    }

  private:
    View view_;
    bool by_column_;
    Sets rows_;
    Sets columns_;
    Sets lines_;
    Sets given_;  // of each crossing line: the lines that gave it a block
    int lists_;
    int most_tiles_;
    int* counts_;
    int2* rest_;
    int2* starts_;
    BlockTile* tiles_;
    BlockTile* singles_;
    PlanHeader header_;
};

}  // namespace ts::plans
