// Plans of sdd by strips, as common/strip_plan.h describes them. Tiles are found as on the host, but strips
// share tiles only with those of their neighbourhood, to the end: neighbourhoods know nothing of each other.
#pragma once

#include <algorithm>

#include "common/strip_plan.h"
#include "plans/sets.cuh"

namespace ts::plans {

// A row is a strip or, where blocks are taller, the strips of a block row.
struct StripShape {
    static constexpr int kNeighbours = 32;  // rows of a neighbourhood of strips, as many as a warp has lanes

    int unit;
    int window;  // in units
    int row_strips;
    int rows;
    int neighbours;      // rows of a neighbourhood
    int rows_per_strip;  // block rows of a strip, at least 1
    int cols_per_unit;   // block columns of a unit, at least 1
    int most_tiles;      // of a neighbourhood
    int weight_rows;     // rows of a weight, see Pattern::groups
    bool wide;           // whether x has more features than y

    // In a strip by a unit.
    __host__ __device__ int unit_blocks() const { return rows_per_strip * cols_per_unit; }
    __host__ __device__ int neighbourhoods() const { return (rows + neighbours - 1) / neighbours; }
    // Room beside two strips, in units.
    __device__ int room() const { return (kStripTileFeatures - 2 * kStripFeatures) / unit; }
};

struct StripTile {
    static constexpr int kMostUnits = 2 * kStripWindow / 32;
    static constexpr int kWeightBits = 48;  // of an order, up to the weight

    int strips[2];  // the second -1 if both halves use the first
    int count;
    int first_end;      // units before this one belong to the first half
    int second_begin;   // units from this one on belong to the second
    int second_window;  // where the second half's window begins
    int units[kMostUnits];

    // Tiles that run at a time take equally long, and lie close along the longer side of the weight.
    __device__ uint64_t order(const StripShape& shape) const {
        const int features = kStripFeatures * (strips[1] < 0 ? 1 : 2) + count * shape.unit;
        const int weight = strips[0] / shape.row_strips / shape.weight_rows;
        return static_cast<uint64_t>(weight) << kWeightBits |
               static_cast<uint64_t>(kStripTileFeatures - features) << 32 |
               static_cast<uint32_t>(shape.wide ? units[0] : strips[0]);
    }
};

// Finds the tiles of a neighbourhood. All lanes of a warp do the same, each for one row or some words.
class StripFinder {
  public:
    __device__ StripFinder(const StripShape& shape, const Sets& left, const int* counts, int neighbourhood,
                           StripTile* tiles)
        : shape_(shape),
          left_(left),
          tiles_(tiles),
          lane_(threadIdx.x % 32),
          first_(neighbourhood * shape.neighbours),
          rows_(min(shape.neighbours, shape.rows - first_)),
          size_(lane_ < rows_ ? counts[first_ + lane_] : 0) {}

    __device__ int run() {
        if (shape_.row_strips > 1)
            add_block_rows();
        else
            add_strips();
        return count_;
    }

  private:
    __device__ int size_of(int row) const { return __shfl_sync(~0u, size_, row); }
    __device__ uint32_t word(int row, int w) const { return left_.word(first_ + row, w); }

    // Both halves share all units.
    __device__ void add_block_rows() {
        for (int row = 0; row < rows_; ++row)
            while (size_of(row) > 0) {
                StripTile& tile = tiles_[count_];
                const int count = take(tile.units, shape_.window, [&](int w) { return word(row, w); });
                describe(2 * (first_ + row), 2 * (first_ + row) + 1, count, shape_.window, 0, 0);
                remove(row, tile.units, count);
                ++count_;
            }
    }

    __device__ void add_strips() {
        // Two strips cost less than one with twice the units if they share more units than fill a strip.
        for (int common = shape_.window; common > kStripFeatures / shape_.unit; --common)
            for (int strip = 0; strip < rows_; ++strip) add_pairs(strip, common);
        for (int strip = 0; strip < rows_; ++strip)
            while (size_of(strip) > shape_.window) add_tile(strip, -1, 2 * shape_.window, 0);
        add_rests();
    }

    // Tiles of this strip and others that have `common` or more units in common with it.
    __device__ void add_pairs(int strip, int common) {
        while (size_of(strip) >= shape_.window) {
            int shared = 0;
            if (lane_ < rows_ && lane_ != strip && size_ >= shape_.window)
                for (int w = 0; w < left_.width; ++w) shared += __popc(word(strip, w) & word(lane_, w));
            const unsigned best = __reduce_max_sync(~0u, shared * 32 + 31 - lane_);
            if (static_cast<int>(best / 32) < common) return;
            add_tile(strip, 31 - static_cast<int>(best % 32), common, shape_.window - common);
        }
    }

    // Strips with at most a window of units left, the longest with the shortest.
    __device__ void add_rests() {
        while (true) {
            const unsigned longest = __reduce_max_sync(~0u, size_ * 32 + 31 - lane_);
            if (longest < 32) return;
            const int first = 31 - static_cast<int>(longest % 32);
            const bool other = size_ > 0 && lane_ != first;
            const unsigned shortest = __reduce_min_sync(~0u, other ? size_ * 32 + 31 - lane_ : ~0u);
            const bool paired =
                shortest != ~0u && static_cast<int>(longest / 32 + shortest / 32) <= shape_.room();
            add_tile(first, paired ? 31 - static_cast<int>(shortest % 32) : -1, shape_.window, shape_.window);
        }
    }

    // Up to so many shared units of two strips, or of one, and of each strip alone. The shared units lie
    // between those of the first strip and those of the second.
    __device__ void add_tile(int first, int second, int most_shared, int most_alone) {
        StripTile& tile = tiles_[count_];
        const int window = shape_.window;
        if (second < 0) {
            const int count = take(tile.units, most_shared, [&](int w) { return word(first, w); });
            describe(first_ + first, -1, count, window, window, window);
            remove(first, tile.units, count);
        } else {
            int* const units = tile.units;
            const int begin =
                take(units, most_alone, [&](int w) { return word(first, w) & ~word(second, w); });
            const int end = begin + take(units + begin, most_shared,
                                         [&](int w) { return word(first, w) & word(second, w); });
            const int count =
                end + take(units + end, most_alone, [&](int w) { return word(second, w) & ~word(first, w); });
            describe(first_ + first, first_ + second, count, end, begin, min(begin, shape_.room() - window));
            remove(first, units, end);
            remove(second, units + begin, count - begin);
        }
        ++count_;
    }

    // The first elements of a set, at most so many.
    template <class Word>
    __device__ int take(int* to, int most, Word word) const {
        int taken = 0;
        for (int first = 0; first < left_.width && taken < most; first += 32) {
            uint32_t bits = first + lane_ < left_.width ? word(first + lane_) : 0;
            const int end = warp_scan(__popc(bits), lane_);
            for (int at = taken + end - __popc(bits); bits != 0 && at < most; bits &= bits - 1, ++at)
                to[at] = 32 * (first + lane_) + __ffs(bits) - 1;
            taken = min(most, taken + __shfl_sync(~0u, end, 31));
        }
        __syncwarp();
        return taken;
    }

    __device__ void remove(int row, const int* units, int count) {
        for (int w = lane_; w < left_.width; w += 32) {
            uint32_t gone = 0;
            for (int i = 0; i < count; ++i) gone |= units[i] / 32 == w ? 1u << units[i] % 32 : 0;
            left_.word(first_ + row, w) &= ~gone;
        }
        if (lane_ == row) size_ -= count;
        __syncwarp();
    }

    __device__ void describe(int first, int second, int count, int first_end, int second_begin,
                             int second_window) {
        if (lane_ != 0) return;
        StripTile& tile = tiles_[count_];
        tile.strips[0] = first;
        tile.strips[1] = second;
        tile.count = count;
        tile.first_end = first_end;
        tile.second_begin = second_begin;
        tile.second_window = second_window;
    }

    const StripShape& shape_;
    Sets left_;  // of each row: the units in no tile yet
    StripTile* tiles_;
    int lane_;
    int first_;
    int rows_;
    int size_;  // units left of this lane's row
    int count_ = 0;
};

// One warp for each neighbourhood.
static __global__ void __launch_bounds__(32)
    find_strip_tiles(StripShape shape, Sets left, const int* counts, StripTile* tiles, uint64_t* orders,
                     int* tile_counts) {
    const size_t base = static_cast<size_t>(blockIdx.x) * shape.most_tiles;
    const int count = StripFinder(shape, left, counts, blockIdx.x, tiles + base).run();
    __syncwarp();
    for (int i = threadIdx.x; i < count; i += 32) orders[base + i] = tiles[base + i].order(shape);
    if (threadIdx.x == 0) tile_counts[blockIdx.x] = count;
}

// One block for each tile there could be.
static __global__ void __launch_bounds__(128)
    write_strips(View view, StripShape shape, const StripTile* tiles, const uint64_t* orders,
                 const int* tile_counts, Sections plan) {
    const int own = blockIdx.x, neighbourhood = own / shape.most_tiles;
    if (own == 0) {
        int all = 0;
        for (int n = threadIdx.x; n < shape.neighbourhoods(); n += blockDim.x) all += tile_counts[n];
        plan.header.tiles = block_sum(all);
        if (threadIdx.x == 0) *reinterpret_cast<PlanHeader*>(plan.words) = plan.header;
    }
    if (own % shape.most_tiles >= tile_counts[neighbourhood]) return;
    const uint64_t order = orders[own];
    int place = 0;
    for (int n = threadIdx.x / 32; n < shape.neighbourhoods(); n += blockDim.x / 32)
        for (int i = threadIdx.x % 32; i < tile_counts[n]; i += 32) {
            const int other = n * shape.most_tiles + i;
            place += orders[other] < order || (orders[other] == order && other < own);
        }
    place = block_sum(place);

    const StripTile& tile = tiles[own];
    const int second = tile.strips[1], room = 2 * shape.window, blocks = shape.unit_blocks();
    if (threadIdx.x == 0)
        *reinterpret_cast<int4*>(plan.tiles() + 4 * place) =
            make_int4(tile.strips[0] * kStripFeatures, second < 0 ? -1 : second * kStripFeatures, tile.count,
                      tile.second_window);
    for (int i = threadIdx.x; i < room; i += blockDim.x)
        plan.k()[place * room + i] = i < tile.count ? tile.units[i] * shape.unit : -1;
    int* const slots = plan.slots() + place * room * blocks;
    for (int i = threadIdx.x; i < room * blocks; i += blockDim.x) {
        const int half = i / blocks / shape.window, block = i % blocks;
        const int at = i / blocks % shape.window + (half == 0 ? 0 : tile.second_window);
        const int begin = half == 0 ? 0 : tile.second_begin;
        const int end = half == 0 ? min(tile.first_end, tile.count) : tile.count;
        const int strip = half == 0 || second < 0 ? tile.strips[0] : second;
        const int row = strip / shape.row_strips * shape.rows_per_strip + block / shape.cols_per_unit;
        slots[i] = -1;
        if (begin <= at && at < end && row < view.rows)
            slots[i] = find_slot(view, row,
                                 tile.units[at] * shape.unit / view.col_block + block % shape.cols_per_unit);
    }
}

// The weight of a tile: of its first strip or, if these are of x, of its first unit.
__device__ inline int weight_of_tile(const View& view, const Sections& plan, int tile) {
    const int4 words = reinterpret_cast<const int4*>(plan.tiles())[tile];
    const int feature = words.w < 0 ? plan.k()[tile * plan.header.units] : words.x;
    return feature / (view.weight_rows() * view.row_block);
}

// The first tile of each weight, and the end of the last. One thread for each.
static __global__ void write_starts(View view, Sections plan) {
    const int weight = blockIdx.x * blockDim.x + threadIdx.x;
    if (weight > view.weights) return;
    int begin = 0, end = reinterpret_cast<const PlanHeader*>(plan.words)->tiles;
    while (begin < end) {
        const int middle = (begin + end) / 2;
        if (weight_of_tile(view, plan, middle) < weight)
            begin = middle + 1;
        else
            end = middle;
    }
    plan.starts()[weight] = begin;
}

// Room for the starts of several weights.
inline int64_t starts_of(const View& view) { return view.weights > 1 ? view.weights + 1 : 0; }

inline void list_starts(const View& view, const PlanHeader& header, void* plan, Stream& stream) {
    if (view.weights > 1)
        launch(write_starts, starts_of(view), 128, stream, view, Sections{header, static_cast<int*>(plan)});
}

class StripBuilder {
  public:
    StripBuilder(Arena& arena, const View& view, const Pattern& pattern, int32_t key)
        : view_(view), shape_(shape_of(view, pattern)) {
        const int64_t units = (int64_t{view.cols} * view.col_block - 1) / shape_.unit + 1;
        const int64_t in_row = units / (shape_.row_strips > 1 ? shape_.window : 2 * shape_.window) + 1;
        shape_.most_tiles = static_cast<int>(shape_.neighbours * in_row);
        const size_t slots = static_cast<size_t>(shape_.neighbourhoods()) * shape_.most_tiles;
        left_ = {nullptr, shape_.rows, static_cast<int>((units + 31) / 32)};
        left_.words = arena.take<uint32_t>(left_.size());
        counts_ = arena.take<int>(shape_.rows);
        tiles_ = arena.take<StripTile>(slots);
        orders_ = arena.take<uint64_t>(slots);
        tile_counts_ = arena.take<int>(shape_.neighbourhoods());

        const int64_t blocks = view.nnz * elements().per_column, all = std::min(blocks, shape_.rows * units);
        const int64_t full = all / (shape_.row_strips > 1 ? shape_.window : 2 * shape_.window);
        const int64_t most = full + std::min<int64_t>(shape_.rows, all), room = 2 * shape_.window;
        header_ =
            lay_out(key, {4 * most, 0, 0, most * room, most * room * shape_.unit_blocks(), starts_of(view)});
        header_.unit_blocks = shape_.unit_blocks();
        header_.units = 2 * shape_.window;
    }

    int64_t words() const { return header_.words; }

    void build(void* plan, Stream& stream) {
        launch(fill_sets, left_.size(), 256, stream, view_, left_, elements());
        launch(count_elements, shape_.rows, 128, stream, left_, counts_);
        const int64_t neighbourhoods = shape_.neighbourhoods();
        launch(find_strip_tiles, 32 * neighbourhoods, 32, stream, shape_, left_, counts_, tiles_, orders_,
               tile_counts_);
        launch(write_strips, 128 * neighbourhoods * shape_.most_tiles, 128, stream, view_, shape_, tiles_,
               orders_, tile_counts_, Sections{header_, static_cast<int*>(plan)});
        list_starts(view_, header_, plan, stream);
    }

  private:
    Elements elements() const {
        return {shape_.rows_per_strip, shape_.cols_per_unit, std::max(1, view_.col_block / shape_.unit)};
    }

    static StripShape shape_of(const View& view, const Pattern& pattern) {
        StripShape shape{};
        shape.unit = strip_unit(pattern);
        shape.window = kStripWindow / shape.unit;
        shape.row_strips = std::max(1, view.row_block / kStripFeatures);
        const int64_t features = int64_t{view.rows} * view.row_block;
        shape.rows = static_cast<int>((features - 1) / (shape.row_strips * kStripFeatures) + 1);
        // Each of several weights begins with a strip (see refuses_groups).
        shape.weight_rows = std::max(shape.rows / view.weights, 1);
        shape.neighbours = shape.row_strips > 1 ? 1 : neighbours_of(shape.weight_rows, view.weights);
        shape.rows_per_strip = std::max(1, kStripFeatures / view.row_block);
        shape.cols_per_unit = std::max(1, shape.unit / view.col_block);
        shape.wide = pattern.in_features > pattern.group_out_features();
        return shape;
    }

    // So many that no neighbourhood has rows of two weights.
    static int neighbours_of(int weight_rows, int weights) {
        int most = StripShape::kNeighbours;
        while (weights > 1 && weight_rows % most != 0) --most;
        return most;
    }

    View view_;
    StripShape shape_;
    Sets left_;
    int* counts_;
    StripTile* tiles_;
    uint64_t* orders_;
    int* tile_counts_;
    PlanHeader header_;
};

}  // namespace ts::plans
