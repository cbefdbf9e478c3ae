// CTAs that read the same data at the same time.
#pragma once

#include <cstddef>

namespace ts::tma {

// Keeps CTAs at the same pace. Each counts when it begins 16 steps, and waits for those that have not begun
// the 16 before. Nothing but speed depends on it: where other work keeps some CTAs from starting, the
// others wait once and no more.
class Pace {
  public:
    static constexpr int kSteps = 16;
    static constexpr int kCounters = 64;  // used in turn
    static constexpr size_t kBytes = kCounters * sizeof(int);

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

    // Called by one thread of a CTA that has no more steps while others may have: nobody waits from now on.
    __device__ static void end(int* counters) {
        constexpr int kEnough = 1 << 22;  // more than CTAs begin; all of them together fit into 32 bits
        for (int i = 0; i < kCounters; ++i) atomicAdd(counters + i, kEnough);
    }

  private:
    static constexpr int kMaxPolls = 64;

    int begun_ = 0;
    bool gave_up_ = false;
};

}  // namespace ts::tma
