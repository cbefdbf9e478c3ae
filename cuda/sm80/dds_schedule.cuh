// Which tiles and steps a CTA of a dds kernel walks.
#pragma once

#include "common/plan_view.cuh"
#include "common/token_groups.h"
#include "sm80/dds_arguments.cuh"

namespace ts::sm80 {

// Tiles in the order CTAs take them: tokens in bands whose input stays in L2 while the rows of W pass. These
// come with the most steps first, and last in every other band, so that no CTA has the longest tiles of all
// bands.
class DdsTiles {
  public:
    struct Place {
        int row_tile;
        int token_tile;
    };

    __device__ DdsTiles(int tile_tokens, int token_tiles, int row_tiles)
        : token_tiles_(token_tiles), row_tiles_(row_tiles), width_(kBandTokens / tile_tokens) {}

    __device__ int size() const { return token_tiles_ * row_tiles_; }
    __device__ Place at(int index) const {
        const int band = index / (width_ * row_tiles_), within = index % (width_ * row_tiles_);
        const int width = min(width_, token_tiles_ - band * width_);
        const int row = within / width;
        return {band % 2 == 0 ? row : row_tiles_ - 1 - row, band * width_ + within % width};
    }

  private:
    static constexpr int kBandTokens = 1024;

    int token_tiles_, row_tiles_;
    int width_;  // of a band, in tiles
};

// Schedule of a product with one weight. `kTokens`: of a tile.
template <int kTokens>
class DdsSchedule {
  public:
    struct Work {
        int row_tile;
        int first_token;
    };

    __device__ static void begin(const DdsArguments&, int*) {}

    __device__ DdsSchedule(const DdsArguments& arguments, const int*)
        : tiles_(kTokens, (arguments.tokens + kTokens - 1) / kTokens, arguments.row_tiles) {}

    __device__ int size() const { return tiles_.size(); }
    __device__ Work at(int index) const {
        const auto place = tiles_.at(index);
        return {place.row_tile, place.token_tile * kTokens};
    }

    // The arguments as they are for the results of a tile.
    template <class Result>
    __device__ static const DdsArguments& of_results(const DdsArguments& arguments, const Work&) {
        return arguments;
    }

  private:
    DdsTiles tiles_;
};

// Schedule of a grouped product: no tile has tokens of two groups. Tiles of the same features and one group's
// tokens follow one another, as they do with one weight; those of different groups share nothing.
template <int kTokens>
class GroupedDdsSchedule {
  public:
    struct Work {
        int row_tile;
        int first_token;
        int last_token;
        int group;
    };

    // Counts the tiles of tokens before each group's first: [groups + 1] in shared memory, which the first
    // warp writes, each lane for some groups.
    __device__ static void begin(const DdsArguments& arguments, int* tiles_before) {
        if (threadIdx.x >= 32) return;
        const int lane = threadIdx.x, most = arguments.most_token_tiles;
        const TileCount count{groups_of(arguments), kTokens, most};
        const int own = (arguments.groups + 31) / 32;
        const int first = min(lane * own, arguments.groups), last = min(first + own, arguments.groups);
        int sum = count.add(0, first, last, nullptr);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum = min(sum + other, most);
        }
        const int before = __shfl_up_sync(~0u, sum, 1);
        if (lane == 0) tiles_before[0] = 0;
        count.add(lane == 0 ? 0 : before, first, last, tiles_before);
    }

    __device__ GroupedDdsSchedule(const DdsArguments& arguments, const int* tiles_before)
        : arguments_(arguments),
          tiles_before_(tiles_before),
          tiles_(kTokens, tiles_before[arguments.groups], arguments.row_tiles) {}

    __device__ int size() const { return tiles_.size(); }
    __device__ Work at(int index) const {
        const auto place = tiles_.at(index);
        const int group = group_of_tile(tiles_before_, arguments_.groups, place.token_tile);
        const TokenSpan span = groups_of(arguments_).span(group);
        return {group * arguments_.row_tiles + place.row_tile,
                span.first + (place.token_tile - tiles_before_[group]) * kTokens, span.last, group};
    }

    // The arguments as they are for the results of a tile: its tokens end where the group does. Features are
    // numbered over all groups in plan and bias, and results lie as far before as the group's first one.
    template <class Result>
    __device__ static DdsArguments of_results(const DdsArguments& arguments, const Work& work) {
        DdsArguments own = arguments;
        const int64_t before = int64_t{work.group} * arguments.group_features;
        own.tokens = work.last_token;
        own.output_layout = Layout::row_major;
        own.output = static_cast<Result*>(arguments.output) - before;
        if (arguments.residual != nullptr)
            own.residual = static_cast<const Result*>(arguments.residual) - before;
        return own;
    }

  private:
    __device__ static TokenGroups groups_of(const DdsArguments& arguments) {
        return {arguments.offsets, arguments.groups, arguments.tokens};
    }

    const DdsArguments& arguments_;
    const int* tiles_before_;
    DdsTiles tiles_;
};

// Walks the steps of all tiles of this CTA.
template <class Schedule>
class DdsCursor {
  public:
    __device__ DdsCursor(const Schedule& schedule, const PlanView& plan)
        : schedule_(schedule), plan_(plan), index_(blockIdx.x) {
        find_step();
    }
    __device__ bool done() const { return step_ >= last_; }
    __device__ int step() const { return step_; }
    __device__ int first_token() const { return first_token_; }
    __device__ void next() {
        if (++step_ < last_) return;
        index_ += gridDim.x;
        find_step();
    }

  private:
    // The first step from the tile `index_` on; tiles without blocks have none.
    __device__ void find_step() {
        step_ = last_ = 0;
        for (; index_ < schedule_.size(); index_ += gridDim.x) {
            const auto work = schedule_.at(index_);
            const int2 steps = plan_.tile<int2>(work.row_tile);
            step_ = steps.x;
            last_ = steps.x + steps.y;
            first_token_ = work.first_token;
            if (steps.y > 0) return;
        }
    }

    const Schedule& schedule_;
    const PlanView& plan_;
    int index_, step_, last_, first_token_;
};

}  // namespace ts::sm80
