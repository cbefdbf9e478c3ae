// Which tiles and tokens a CTA of an sdd kernel sums up. CTAs stay on their multiprocessors.
//
// All walk the tokens at the same pace, so that what one reads from memory the others find in L2. Tiles are
// dealt out in rounds of one for each CTA. Those of the last, partial round are shared by all CTAs: each tile
// is cut into pieces as long as a CTA's share, at the same tokens in every tile. What is left over of the
// tiles goes to the CTAs that are left over, end to end, cut again where a share ends. A second kernel adds
// the partial sums.
#pragma once

#include <cstdint>

namespace ts::sm90 {

struct SddWork {
    int tile;        // -1: nothing to do
    int first_step;  // 64 tokens each
    int last_step;
    int partial;  // where its partial sums go, -1 if it is not split
};

class SddSchedule {
  public:
    __device__ SddSchedule(int tiles, int steps, int ctas)
        : ctas_(ctas), steps_(steps), whole_(tiles / ctas * ctas), rest_(tiles - whole_) {
        share_ = steps;
        pieces_ = 1;
        left_ = 0;
        if (rest_ > 0 && steps >= 2 * kMinSteps) divide();
    }

    // Pieces of work are numbered so that a CTA's are a number of CTAs apart. Some are empty.
    __device__ int size() const {
        const int most = left_ > 0 ? share_ / place_size() + 2 : 1;
        return whole_ + (rest_ > 0 ? most * ctas_ : 0);
    }
    __device__ bool is_whole(int index) const { return index < whole_; }

    __device__ SddWork work(int index) const {
        if (index < whole_) return {index, 0, steps_, -1};
        const int cta = (index - whole_) % ctas_, turn = (index - whole_) / ctas_;
        if (cta >= rest_ * pieces_) return work_left(cta - rest_ * pieces_, turn);
        if (turn > 0) return kNothing;
        const int first = cta / rest_ * share_;
        return {whole_ + cta % rest_, first, min(first + share_, steps_), is_split() ? cta : -1};
    }

    // Tiles that have partial sums, the last ones.
    __device__ int split_tiles() const { return is_split() ? rest_ : 0; }
    __device__ int tile(int place) const { return whole_ + place; }
    // How many partial sums such a tile has, and where they are.
    __device__ int count(int place) const {
        return pieces_ + (left_ > 0 ? 1 + last_share(place) - first_share(place) : 0);
    }
    __device__ int partial(int place, int number) const {
        if (number < pieces_) return number * rest_ + place;
        return partial_left(place, first_share(place) + number - pieces_);
    }

    // Upper bound of the tiles whose partial sums are stored.
    static int max_partials(int steps, int ctas) { return steps < 2 * kMinSteps ? 0 : 2 * ctas; }

  private:
    static constexpr int kMinSteps = 4;  // of a share
    static constexpr int kStoring = 3;   // steps in the time of which sums are stored

    static constexpr SddWork kNothing = {-1, 0, 0, -1};

    __device__ bool is_split() const { return share_ < steps_; }

    // Chooses the least of the estimated times, in sixteenths of a step. Fitted on an H200.
    __device__ void divide() {
        constexpr int kStep = 16, kReduction = 5 * kStep, kPartial = 1;
        const int share = max((rest_ * (steps_ + kStoring) + ctas_ - 1) / ctas_, kMinSteps);
        if (share >= steps_) return;
        const int pieces = steps_ / share, left = steps_ - pieces * share;
        const int even = (steps_ + pieces - 1) / pieces;
        const int uneven_time = kStep * share + kReduction + kPartial * (ctas_ + rest_);
        const int even_time =
            pieces == 1 ? kStep * steps_ : kStep * even + kReduction + kPartial * rest_ * pieces;
        if (even_time <= uneven_time || left == 0) {
            share_ = even;
            pieces_ = (steps_ + even - 1) / even;
        } else {
            share_ = share;
            pieces_ = pieces;
            left_ = left;
        }
    }

    // What is left over of a tile has a place in the line of what the CTAs left over share.
    __device__ int place_size() const { return left_ + kStoring; }
    __device__ int first_share(int place) const { return place * place_size() / share_; }
    __device__ int last_share(int place) const { return (place * place_size() + left_ - 1) / share_; }

    __device__ SddWork work_left(int share, int turn) const {
        if (left_ == 0) return kNothing;
        const int place = share * share_ / place_size() + turn;
        const int at = place * place_size();
        const int first = max(share * share_ - at, 0), last = min((share + 1) * share_ - at, left_);
        if (place >= rest_ || first >= last) return kNothing;
        const int before = pieces_ * share_;
        return {whole_ + place, before + first, before + last, partial_left(place, share)};
    }

    // At most one in a share began in the share before.
    __device__ int partial_left(int place, int share) const {
        const int first = rest_ * pieces_;
        return share == first_share(place) ? first + place : first + rest_ + share;
    }

    int ctas_;
    int steps_;
    int whole_;   // tiles that are not split, the first ones
    int rest_;    // all others
    int share_;   // steps of a CTA's share of these
    int pieces_;  // of a tile that are a share each
    int left_;    // steps of a tile that are left over
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
