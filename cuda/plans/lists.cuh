// Plans of sdd by lists, as common/list_plan.h describes them; the same as those of the host.
#pragma once

#include <algorithm>

#include "common/list_plan.h"
#include "plans/sets.cuh"

namespace ts::plans {

constexpr int kUnitBlocks = kListUnit / 16;  // block rows or columns of a unit

struct ListShape {
    int group_units;  // units of y of a group
    int group_rows;
    int groups;
    int units;       // of x
    int most_tiles;  // of a group

    __host__ __device__ int tile_units() const { return kListUnits - group_units; }  // of x
};

// The blocks of a group that a tile has: from one of those of its first unit on, to one of those of its last.
struct ListTile {
    int first_unit;
    int skipped;  // blocks of the first unit
    int last_unit;
    int taken;  // blocks of the last unit that are not after the tile's, the skipped ones too
};

// The blocks of each group in each unit of x, [groups][units], from zero on. One warp for each block row.
static __global__ void count_listed(View view, ListShape shape, int* counts) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= view.rows) return;
    int* const of_group = counts + static_cast<size_t>(row / shape.group_rows) * shape.units;
    const int end = __ldg(view.blocks.ptr + row + 1);
    for (int e = __ldg(view.blocks.ptr + row) + threadIdx.x % 32; e < end; e += 32)
        atomicAdd(of_group + __ldg(view.blocks.idx + e) / kUnitBlocks, 1);
}

// One warp for each group.
static __global__ void __launch_bounds__(32)
    find_list_tiles(ListShape shape, const int* counts, ListTile* tiles, int* tile_counts) {
    const int lane = threadIdx.x;
    const int* const of_group = counts + static_cast<size_t>(blockIdx.x) * shape.units;
    ListTile* const found = tiles + static_cast<size_t>(blockIdx.x) * shape.most_tiles;
    ListTile tile{-1, 0, -1, 0};
    int count = 0, blocks = 0, units = 0;
    const auto finish = [&] {
        if (lane == 0 && units > 0) found[count] = tile;
        count += units > 0;
        blocks = units = 0;
    };
    for (int first = 0; first < shape.units; first += 32) {
        const int own = first + lane < shape.units ? of_group[first + lane] : 0;
        for (unsigned left = __ballot_sync(~0u, own > 0); left != 0; left &= left - 1) {
            const int from = __ffs(left) - 1, all = __shfl_sync(~0u, own, from);
            for (int taken = 0; taken < all;) {
                if (blocks == kListTileBlocks || units == shape.tile_units()) finish();
                if (units == 0) tile.first_unit = first + from, tile.skipped = taken;
                const int next = min(all - taken, kListTileBlocks - blocks);
                taken += next;
                blocks += next;
                ++units;
                tile.last_unit = first + from;
                tile.taken = taken;
            }
        }
    }
    finish();
    if (lane == 0) tile_counts[blockIdx.x] = count;
}

// A thread's view of its block row.
struct ListRow {
    int begin;  // entries of the pattern that the tile has
    int end;
    int first;  // of these, among all of the tile's
};

// Called by a block, each thread for one row of the group, or for none if it is negative.
__device__ inline ListRow row_in_tile(const View& view, const ListShape& shape, const ListTile& tile,
                                      int row) {
    const auto entry = [&](int unit) { return row < 0 ? 0 : find_entry(view, row, unit * kUnitBlocks); };
    const int begin = entry(tile.first_unit), end = entry(tile.last_unit + 1);
    const int of_first = entry(tile.first_unit + 1) - begin, before_last = entry(tile.last_unit);
    const int skipped = min(max(tile.skipped - block_scan(of_first).x, 0), of_first);
    const int taken = min(max(tile.taken - block_scan(end - before_last).x, 0), end - before_last);
    ListRow result{begin + skipped, before_last + taken, 0};
    result.first = block_scan(result.end - result.begin).x;
    return result;
}

// One block for each tile there could be.
static __global__ void __launch_bounds__(128)
    write_lists(View view, ListShape shape, const int* counts, const ListTile* tiles, const int* tile_counts,
                Sections plan) {
    __shared__ int units_of_x[kListUnits], units_of_y[kListUnits / 2], unit_counts[2];
    const int group = blockIdx.x / shape.most_tiles, number = blockIdx.x % shape.most_tiles;
    int before = 0, all = 0;
    for (int i = threadIdx.x; i < shape.groups; i += blockDim.x) {
        before += i < group ? tile_counts[i] : 0;
        all += tile_counts[i];
    }
    before = block_sum(before);
    all = block_sum(all);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        plan.header.tiles = all;
        *reinterpret_cast<PlanHeader*>(plan.words) = plan.header;
    }
    if (group >= shape.groups || number >= tile_counts[group]) return;
    const int place = before + number;
    const ListTile tile = tiles[blockIdx.x];

    const int in_group = threadIdx.x, row = group * shape.group_rows + in_group;
    const bool has_row = in_group < shape.group_rows && row < view.rows;
    const ListRow own = row_in_tile(view, shape, tile, has_row ? row : -1);
    const int size = own.end - own.begin, blocks = block_sum(size);
    const int of_warp = (blocks + kListWarps - 1) / kListWarps;
    if (threadIdx.x < kListUnits / 2) units_of_y[threadIdx.x] = 0;
    __syncthreads();
    if (size > 0) units_of_y[in_group / kUnitBlocks] = 1;
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        int count = 0;
        for (int first = tile.first_unit; first <= tile.last_unit; first += 32) {
            const int unit = first + lane;
            const bool present =
                unit <= tile.last_unit && counts[static_cast<size_t>(group) * shape.units + unit] > 0;
            const unsigned bits = __ballot_sync(~0u, present);
            if (present) units_of_x[count + __popc(bits & (1u << lane) - 1)] = unit;
            count += __popc(bits);
        }
        if (lane == 0) unit_counts[1] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int count = 0;
        for (int i = 0; i < shape.group_units; ++i)
            units_of_y[i] = units_of_y[i] != 0 ? count++ : -1;  // its place among those there are
        unit_counts[0] = count;
        *reinterpret_cast<int4*>(plan.tiles() + 4 * place) =
            make_int4(count, unit_counts[1], blocks, of_warp);
    }
    int* const slots = plan.slots() + place * kListTileBlocks;
    unsigned* const masks = plan.masks() + place * kListTileBlocks;
    for (int i = threadIdx.x; i < kListTileBlocks; i += blockDim.x) slots[i] = -1, masks[i] = 0;
    __syncthreads();

    const int of_y = unit_counts[0], of_x = unit_counts[1];
    int* const k = plan.k() + place * kListUnits;
    if (threadIdx.x < kListUnits && threadIdx.x >= of_y)
        k[threadIdx.x] =
            static_cast<int>(threadIdx.x) < of_y + of_x ? units_of_x[threadIdx.x - of_y] * kListUnit : -1;
    if (in_group < shape.group_units && units_of_y[in_group] >= 0)
        k[units_of_y[in_group]] = (group * shape.group_units + in_group) * kListUnit;
    if (size == 0) return;
    const unsigned of_row = kUnitBlocks * units_of_y[in_group / kUnitBlocks] + in_group % kUnitBlocks;
    for (int e = own.begin, at = own.first, u = 0; e < own.end; ++e, ++at) {
        const int column = __ldg(view.blocks.idx + e);
        while (units_of_x[u] < column / kUnitBlocks) ++u;
        const unsigned of_column = kUnitBlocks * (of_y + u) + column % kUnitBlocks;
        const bool is_new = e == own.begin || at % of_warp == 0;
        const int to = at / of_warp * kListBlocks + at % of_warp;
        slots[to] = __ldg(view.blocks.slot + e);
        masks[to] = of_column | of_row << 16 | static_cast<unsigned>(is_new) << 31;
    }
}

class ListBuilder {
  public:
    ListBuilder(Arena& arena, const View& view, const Pattern& pattern, int32_t key)
        : view_(view), shape_(shape_of(view, pattern)) {
        const int64_t places = int64_t{shape_.groups} * shape_.units;
        // A tile has all of its blocks, or all of its units, or is the last one of its group.
        const auto most = [&](int64_t blocks, int64_t groups, int64_t units) {
            return blocks / kListTileBlocks + units / shape_.tile_units() + groups;
        };
        const int64_t of_group = int64_t{shape_.group_rows} * view.cols;
        shape_.most_tiles = static_cast<int>(most(std::min(view.nnz, of_group), 1, shape_.units));
        counts_ = arena.take<int>(places);
        tiles_ = arena.take<ListTile>(static_cast<size_t>(shape_.groups) * shape_.most_tiles);
        tile_counts_ = arena.take<int>(shape_.groups);
        const int64_t tiles = std::min<int64_t>(
            most(view.nnz, std::min<int64_t>(shape_.groups, view.nnz), std::min(places, view.nnz)),
            int64_t{shape_.groups} * shape_.most_tiles);
        const int64_t lists = tiles * kListTileBlocks;
        header_ = lay_out(key, {4 * tiles, 0, lists, tiles * kListUnits, lists});
        header_.group_rows = shape_.group_rows;
    }

    int64_t words() const { return header_.words; }

    void build(void* plan, Stream& stream) {
        fill(counts_, 0, sizeof(int) * shape_.groups * shape_.units, stream);
        launch(count_listed, int64_t{32} * view_.rows, 128, stream, view_, shape_, counts_);
        if (shape_.groups > 0)
            launch(find_list_tiles, int64_t{32} * shape_.groups, 32, stream, shape_, counts_, tiles_,
                   tile_counts_);
        launch(write_lists, int64_t{128} * shape_.groups * shape_.most_tiles, 128, stream, view_, shape_,
               counts_, tiles_, tile_counts_, Sections{header_, static_cast<int*>(plan)});
    }

  private:
    static ListShape shape_of(const View& view, const Pattern& pattern) {
        ListShape shape{};
        shape.group_units = list_group(pattern);
        shape.group_rows = shape.group_units * kUnitBlocks;
        shape.groups = (view.rows + shape.group_rows - 1) / shape.group_rows;
        shape.units = (view.cols + kUnitBlocks - 1) / kUnitBlocks;
        return shape;
    }

    View view_;
    ListShape shape_;
    int* counts_;
    ListTile* tiles_;
    int* tile_counts_;
    PlanHeader header_;
};

}  // namespace ts::plans
