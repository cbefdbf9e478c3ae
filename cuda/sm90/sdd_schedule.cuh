// Which tiles and tokens a CTA of an sdd kernel sums up. CTAs stay on their multiprocessors.
//
// All walk the tokens at the same pace, so that what one reads from memory the others find in L2. Tiles
// are dealt out in rounds of one for each CTA; those of the last, partial round are split over the tokens, all
// tiles of one split before the next, and a second kernel adds the partial sums.
#pragma once

#include <cstdint>


namespace ts::sm90 {

struct SddWork {
    int tile;
    int first_step;  // 64 tokens each
    int last_step;
    int partial;  // where its partial sums go, -1 if it is not split
};

struct SddSchedule {
    static constexpr int kMaxRounds = 2;  // of splits
    static constexpr int kMinSteps = 4;   // of a split

    int steps;
    int whole;   // tiles that are not split, the first ones
    int split;   // tiles that are
    int splits;  // of each

    __device__ SddSchedule(int tiles, int steps, int ctas) : steps(steps) {
        whole = tiles / ctas * ctas;
        split = tiles - whole;
        splits = best_splits(ctas);
    }

    __device__ int size() const { return whole + split * splits; }

    __device__ SddWork work(int index) const {
        if (index < whole) return {index, 0, steps, -1};
        const int part = index - whole, place = part / split;
        return {whole + part % split, place * steps / splits, (place + 1) * steps / splits,
                splits > 1 ? part : -1};
    }

    // Upper bound of the tiles whose partial sums are stored.
    static int max_partials(int steps, int ctas) { return steps < 2 * kMinSteps ? 0 : kMaxRounds * ctas; }

  private:
    // The number with the least estimated time. Units: a sixteenth of a step. Fitted on an H200.
    __device__ int best_splits(int ctas) const {
        constexpr int kStep = 16, kTile = 3 * kStep;  // storing the sums
        constexpr int kReduction = 5 * kStep;         // starting the second kernel
        int best = 1, least = 0;
        for (int count = 1; count == 1 || (count * kMinSteps <= steps && split * count <= kMaxRounds * ctas);
             ++count) {
            const int rounds = (split * count + ctas - 1) / ctas;
            const int reduction = count == 1 ? 0 : kReduction + split * count;
            const int time = rounds * (kStep * steps / count + kTile) + reduction;
            if (count == 1 || time < least) best = count, least = time;
        }
        return best;
    }
};

// Keeps CTAs at the same pace. A CTA tells the others when it begins 16 steps, and waits for those that have
// not begun the 16 before. Not for long, since nothing but speed depends on it: CTAs need not all be resident.
struct Pace {
    static constexpr int kSteps = 16;
    static constexpr int kCounters = 64;  // used in turn
    static constexpr int kMaxPolls = 64;

    int* counters;  // zero at first
    int ctas;

    // Called by one thread; `group`: how many have begun before.
    __device__ void begin(int group) const {
        atomicAdd(counters + group % kCounters, 1);
        if (group == 0) return;
        const int before = group - 1;
        const volatile int* const counter = counters + before % kCounters;
        const int all = (before / kCounters + 1) * ctas;
        for (int poll = 0; poll < kMaxPolls && *counter < all; ++poll) __nanosleep(200);
    }
};

}  // namespace ts::sm90
