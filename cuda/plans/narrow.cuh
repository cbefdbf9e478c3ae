// Plans of dds for narrow blocks, as cpp/src/narrow_plan.h describes them.
#pragma once

#include <algorithm>

#include "plans/groups.cuh"

namespace ts::plans {

struct NarrowShape {
    static constexpr int kRowFeatures = 32;
    static constexpr int kGroups = 2;  // warpgroups
    static constexpr int kWords = 8;
    static constexpr int kTilesAtOnce = 8;
    static constexpr int kDealThreads = 512;
    // In units of 32 x 32, as on the host.
    static constexpr int kStageCost = 2;
    static constexpr int kTileCost = 12;

    int block;
    int parts;       // block rows of a row
    int group_rows;  // rows of a warpgroup
    int ranks;
    int columns;  // of a stage
    int stages;
    int padded_stages;
    int rows;
    int tiles;

    __host__ __device__ int lists() const { return ranks * kGroups; }
    // Of the rows, sorted by length, that tiles before this one take.
    __host__ __device__ int first_row(int tile) const {
        return static_cast<int>(int64_t{tile} * rows / tiles);
    }
};

// The units of a row in a stage, one bit for each column.
__device__ inline unsigned units_of(const Sets& rows, const NarrowShape& shape, int row, int stage) {
    const int column = stage * shape.columns;
    return column >= 32 * rows.width
               ? 0
               : rows.word(row, column / 32) >> column % 32 & ((1u << shape.columns) - 1);
}

// Deals the longest rows out to the warpgroups of some tiles, tile by tile, to each in turn the row out of
// the longest ones left that makes its stages most even: warpgroups wait for one another now and then. One
// block for each kTilesAtOnce tiles. dealt: [tiles][lists][group_rows]; sums: [blocks][lists][stages].
static __global__ void __launch_bounds__(NarrowShape::kDealThreads)
    deal_rows(NarrowShape shape, Sets rows, const int* counts, const int* order, int* all_sums, int* dealt,
              int2* costs) {
    constexpr int kWarps = NarrowShape::kDealThreads / 32, kCandidates = 64;
    constexpr int kThreads = NarrowShape::kDealThreads / kCandidates;  // of a candidate
    constexpr int kMaxLists = 8;
    __shared__ int candidates[kCandidates];
    __shared__ int lengths[kMaxLists];
    __shared__ long long best_of_warp[kWarps];
    const int lists = shape.lists(), thread = threadIdx.x, own = thread / kThreads;
    const int first_tile = blockIdx.x * NarrowShape::kTilesAtOnce;
    const int last_tile = min(first_tile + NarrowShape::kTilesAtOnce, shape.tiles);
    const int end = shape.first_row(last_tile);
    int next = shape.first_row(first_tile);
    int* const sums = all_sums + static_cast<size_t>(blockIdx.x) * lists * shape.stages;
    if (thread < kCandidates) candidates[thread] = next + thread < end ? order[next + thread] : -1;
    next += kCandidates;
    for (int tile = first_tile; tile < last_tile; ++tile) {
        for (int i = thread; i < lists * shape.stages; i += blockDim.x) sums[i] = 0;
        for (int i = thread; i < lists * shape.group_rows; i += blockDim.x)
            dealt[tile * lists * shape.group_rows + i] = -1;
        if (thread < lists) lengths[thread] = 0;
        __syncthreads();
        const int count = shape.first_row(tile + 1) - shape.first_row(tile);
        for (int i = 0; i < count; ++i) {
            const int list = i % lists;
            int* const list_sums = sums + list * shape.stages;
            const int row = candidates[own];
            long long sum = 0, squares = 0;
            for (int stage = thread % kThreads; row >= 0 && stage < shape.stages; stage += kThreads) {
                const int units = list_sums[stage] + __popc(units_of(rows, shape, row, stage));
                sum += units;
                squares += units * units;
            }
            for (int distance = 1; distance < kThreads; distance *= 2) {
                sum += __shfl_xor_sync(~0u, sum, distance);
                squares += __shfl_xor_sync(~0u, squares, distance);
            }
            // The variance, times the square of the number of stages.
            long long best = row < 0 ? INT64_MAX : (squares * shape.stages - sum * sum) * kCandidates + own;
            for (int distance = kThreads; distance < 32; distance *= 2)
                best = min(best, __shfl_xor_sync(~0u, best, distance));
            if (thread % 32 == 0) best_of_warp[thread / 32] = best;
            __syncthreads();
            for (int warp = 0; warp < kWarps; ++warp) best = min(best, best_of_warp[warp]);
            const int place = static_cast<int>(best % kCandidates), chosen = candidates[place];
            const int follower = thread >= kCandidates      ? -1
                                 : thread < place           ? candidates[thread]
                                 : thread < kCandidates - 1 ? candidates[thread + 1]
                                 : next < end               ? order[next]
                                                            : -1;
            for (int stage = thread; stage < shape.stages; stage += blockDim.x)
                list_sums[stage] += __popc(units_of(rows, shape, chosen, stage));
            if (thread == 0) {
                dealt[(tile * lists + list) * shape.group_rows + i / lists] = chosen;
                lengths[list] += counts[chosen];
            }
            ++next;
            __syncthreads();
            if (thread < kCandidates) candidates[thread] = follower;
            __syncthreads();
        }
        if (thread == 0) {
            int most = 0;
            for (int list = 0; list < lists; ++list) most = max(most, lengths[list]);
            costs[tile] = make_int2(0, NarrowShape::kTileCost + NarrowShape::kStageCost * shape.stages +
                                           most * shape.block / NarrowShape::kRowFeatures);
        }
        __syncthreads();
    }
}

// The units of each stage of a rank of a tile. One thread for each.
static __global__ void count_units(NarrowShape shape, Sets rows, const int* dealt, int* counts) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= shape.tiles * shape.ranks * shape.stages) return;
    const int of_rank = NarrowShape::kGroups * shape.group_rows;
    const int* const dealt_rows = dealt + index / shape.stages * of_rank;
    int units = 0;
    for (int i = 0; i < of_rank; ++i)
        if (dealt_rows[i] >= 0) units += __popc(units_of(rows, shape, dealt_rows[i], index % shape.stages));
    counts[index] = units;
}

struct NarrowSections {
    PlanHeader header;
    int* words;
};

// One thread for each place of a rank and padded stage, of which a warpgroup has as many as words.
static __global__ void write_units(View view, NarrowShape shape, Sets rows, const int* members,
                                   const int* dealt, NarrowSections plan) {
    constexpr int kWords = NarrowShape::kWords;
    const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    const int* const starts = plan.words + plan.header.k_at;
    if (index == 0) {
        plan.header.reserved[0] = starts[shape.tiles * shape.ranks * shape.stages];
        *reinterpret_cast<PlanHeader*>(plan.words) = plan.header;
    }
    if (index >= int64_t{shape.tiles} * shape.lists() * shape.padded_stages * kWords) return;
    const int place = static_cast<int>(index % kWords);
    const int stage = static_cast<int>(index / kWords % shape.padded_stages);
    const int list = static_cast<int>(index / kWords / shape.padded_stages);  // of all tiles
    const int* const list_rows = dealt + list * shape.group_rows;
    const auto units_at = [&](int row) { return row < 0 ? 0 : units_of(rows, shape, row, stage); };
    int before = 0;
    for (int i = list % NarrowShape::kGroups == 0 ? 0 : -shape.group_rows; i < min(place, shape.group_rows);
         ++i)
        before += __popc(units_at(list_rows[i]));
    unsigned word = 0;
    if (stage < shape.stages && place == shape.group_rows) {
        for (int i = 0; i < shape.group_rows; ++i) before -= __popc(units_at(list_rows[i]));
        word = before;
    } else if (stage < shape.stages && place < shape.group_rows) {
        const int row = list_rows[place];
        int unit = starts[list / NarrowShape::kGroups * shape.stages + stage] + before, shift = 0;
        for (unsigned bits = units_at(row); bits != 0; bits &= bits - 1, shift += 4, ++unit) {
            const int within = __ffs(bits) - 1;
            word |= (2u * (within * shape.block / 16) + 1) << shift;
            for (int part = 0; part < shape.parts; ++part) {
                const int block_row = members == nullptr ? row : members[row * shape.parts + part];
                plan.words[plan.header.slots_at + unit * shape.parts + part] =
                    block_row < 0 ? -1 : find_slot(view, block_row, stage * shape.columns + within);
            }
        }
    }
    plan.words[plan.header.masks_at + index] = static_cast<int>(word);
}

// One thread for each block row of a plan.
static __global__ void write_narrow_rows(NarrowShape shape, const int* members, const int* dealt, int* to) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= shape.tiles * shape.lists() * shape.group_rows * shape.parts) return;
    const int row = dealt[index / shape.parts];
    to[index] = row < 0 ? -1 : members == nullptr ? row : members[row * shape.parts + index % shape.parts];
}

class NarrowBuilder {
  public:
    NarrowBuilder(Arena& arena, const View& view, PlanShape shape)
        : view_(view), shape_(shape_of(view, shape)), grouping_(arena, view, shape_.parts, false) {
        const size_t deals = (shape_.tiles + NarrowShape::kTilesAtOnce - 1) / NarrowShape::kTilesAtOnce;
        order_ = arena.take<int>(shape_.rows);
        sums_ = arena.take<int>(deals * shape_.lists() * shape_.stages);
        dealt_ = arena.take<int>(static_cast<size_t>(shape_.tiles) * shape_.lists() * shape_.group_rows);
        const int64_t tiles = shape_.tiles, lists = tiles * shape_.lists();
        header_ = lay_out({2 * tiles, lists * shape_.group_rows * shape_.parts,
                           lists * shape_.padded_stages * NarrowShape::kWords,
                           tiles * shape_.ranks * shape_.stages + 1, view.nnz * shape_.parts});
        header_.tiles = shape_.tiles;
        header_.steps = shape_.stages;
        header_.groups = shape_.group_rows * NarrowShape::kGroups * shape_.parts;
        header_.pieces = shape_.parts;
    }

    int64_t words() const { return header_.words; }

    void build(void* plan, void* stream) {
        grouping_.build(stream);
        const Groups& rows = grouping_.groups();
        int* const words = static_cast<int*>(plan);
        const int tiles = shape_.tiles, stages = tiles * shape_.ranks * shape_.stages;
        launch(sort_by_count, shape_.rows, 64, stream, rows.counts, shape_.rows, order_);
        const int64_t deals = (tiles + NarrowShape::kTilesAtOnce - 1) / NarrowShape::kTilesAtOnce;
        if (tiles > 0)
            launch(deal_rows, NarrowShape::kDealThreads * deals, NarrowShape::kDealThreads, stream, shape_,
                   rows.sets, rows.counts, order_, sums_, dealt_,
                   reinterpret_cast<int2*>(words + header_.tiles_at));
        launch(count_units, stages, 128, stream, shape_, rows.sets, dealt_, words + header_.k_at);
        launch(scan_counts, 0, 1024, stream, words + header_.k_at, stages);
        launch(write_narrow_rows, int64_t{tiles} * shape_.lists() * shape_.group_rows * shape_.parts, 128,
               stream, shape_, rows.rows, dealt_, words + header_.rows_at);
        launch(write_units, int64_t{tiles} * shape_.lists() * shape_.padded_stages * NarrowShape::kWords, 128,
               stream, view_, shape_, rows.sets, rows.rows, dealt_, NarrowSections{header_, words});
    }

  private:
    static NarrowShape shape_of(const View& view, PlanShape shape) {
        NarrowShape result{};
        result.block = view.row_block;
        result.parts = NarrowShape::kRowFeatures / view.row_block;
        result.group_rows = shape.tile / NarrowShape::kRowFeatures / NarrowShape::kGroups;
        result.ranks = shape.ranks;
        result.columns = shape.step / view.col_block;
        result.stages = (view.cols + result.columns - 1) / result.columns;
        result.padded_stages = (result.stages + 3) / 4 * 4;
        result.rows = Grouping::group_count(view.rows, result.parts);
        const int tile_rows = result.group_rows * result.lists();
        result.tiles = (result.rows + tile_rows - 1) / tile_rows;
        return result;
    }

    View view_;
    NarrowShape shape_;
    Grouping grouping_;
    int* order_;
    int* sums_;
    int* dealt_;
    PlanHeader header_;
};

}  // namespace ts::plans
