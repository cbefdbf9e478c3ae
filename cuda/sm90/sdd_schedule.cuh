// Which tiles and tokens a CTA of an sdd kernel sums up. CTAs stay on their multiprocessors.
//
// All walk the tokens at the same pace, so that what one reads from memory the others find in L2. Tiles are
// dealt out in rounds of one for each CTA. Those of the last, partial round are split over the tokens into
// two more rounds: as many as fill one round with few splits, and the rest with more splits. A second kernel
// adds the partial sums.
#pragma once

#include <cstdint>

namespace ts::sm90 {

struct SddWork {
    int tile;
    int first_step;  // 64 tokens each
    int last_step;
    int partial;  // where its partial sums go, -1 if it is not split
};

class SddSchedule {
  public:
    static constexpr int kMaxSplits = 16;
    static constexpr int kMinSteps = 4;  // of a split

    // Called by whole warps, whose lanes try different numbers of splits.
    __device__ SddSchedule(int tiles, int steps, int ctas) : steps_(steps), whole_(tiles / ctas * ctas) {
        const int rest = tiles - whole_, lane = threadIdx.x % 32;
        divide(rest, lane + 1, ctas);
        const int time = cost(first_) + cost(second_);
        const bool allowed = lane == 0 || may_split(lane + 1);
        const unsigned best = __reduce_min_sync(~0u, allowed ? static_cast<unsigned>(time) * 32 + lane : ~0u);
        divide(rest, static_cast<int>(best % 32) + 1, ctas);
    }

    __device__ int size() const { return whole_ + first_.size() + second_.size(); }
    __device__ bool is_whole(int index) const { return index < whole_; }

    __device__ SddWork work(int index) const {
        if (index < whole_) return {index, 0, steps_, -1};
        const int part = index - whole_;
        return part < first_.size() ? work_of(first_, 0, 0, part)
                                    : work_of(second_, first_.tiles, first_.size(), part - first_.size());
    }

    // Tiles that have partial sums.
    __device__ int split_tiles() const {
        return (first_.splits > 1 ? first_.tiles : 0) + (second_.splits > 1 ? second_.tiles : 0);
    }
    // The tile, where the partial sums of its first split are, how far apart the next are, and how many.
    __device__ int4 partials(int place) const {
        if (first_.splits == 1) place += first_.tiles;
        if (place < first_.tiles) return make_int4(whole_ + place, place, first_.tiles, first_.splits);
        return make_int4(whole_ + place, first_.size() + place - first_.tiles, second_.tiles, second_.splits);
    }

    // Upper bound of the tiles whose partial sums are stored.
    static int max_partials(int steps, int ctas) { return steps < 2 * kMinSteps ? 0 : 2 * ctas; }

  private:
    // All tiles of one split come before the next.
    struct Round {
        int tiles;
        int splits;
        __device__ int size() const { return tiles * splits; }
    };

    __device__ SddWork work_of(const Round& round, int first_place, int first_part, int part) const {
        const int split = part / round.tiles, place = part % round.tiles;
        return {whole_ + first_place + place, split * steps_ / round.splits,
                (split + 1) * steps_ / round.splits, round.splits > 1 ? first_part + part : -1};
    }

    // As many tiles as fill a round are split that often, the others as often as they can.
    __device__ void divide(int tiles, int splits, int ctas) {
        first_ = {min(tiles, ctas / splits), splits};
        second_ = most_splits(tiles - first_.tiles, ctas);
    }

    __device__ bool may_split(int splits) const {
        return splits <= kMaxSplits && splits * kMinSteps <= steps_;
    }

    __device__ Round most_splits(int tiles, int ctas) const {
        if (tiles == 0) return {0, 1};
        const int splits = min(min(ctas / tiles, kMaxSplits), steps_ / kMinSteps);
        return {tiles, max(splits, 1)};
    }

    // Estimated time in sixteenths of a step. Fitted on an H200.
    __device__ int cost(const Round& round) const {
        constexpr int kStep = 16, kTile = 3 * kStep;  // storing the sums
        constexpr int kReduction = 5 * kStep, kPartial = 1;
        if (round.tiles == 0) return 0;
        const int reduction = round.splits == 1 ? 0 : kReduction + kPartial * round.size();
        return kStep * steps_ / round.splits + kTile + reduction;
    }

    int steps_;
    int whole_;  // tiles that are not split, the first ones
    Round first_, second_;
};

// Keeps CTAs at the same pace. Each counts when it begins 16 steps, and waits for those that have not begun
// the 16 before. Nothing but speed depends on it: where other work keeps some CTAs from starting, the
// others wait once and no more.
class Pace {
  public:
    static constexpr int kSteps = 16;
    static constexpr int kCounters = 64;  // used in turn

    // The counters are zero at first. Called by one thread.
    __device__ void begin(int* counters, int ctas) {
        atomicAdd(counters + begun_ % kCounters, 1);
        const int before = begun_++ - 1;
        if (before < 0 || gave_up_) return;
        const volatile int* const counter = counters + before % kCounters;
        const int all = (before / kCounters + 1) * ctas;
        int polls = 0;
        while (*counter < all && ++polls < kMaxPolls) __nanosleep(200);
        gave_up_ = polls == kMaxPolls;
    }

  private:
    static constexpr int kMaxPolls = 64;

    int begun_ = 0;
    bool gave_up_ = false;
};

}  // namespace ts::sm90
