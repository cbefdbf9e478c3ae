// Work on its way from the warp that finds it to those that do it.
#pragma once

#include <climits>

#include "tma/ring.cuh"

namespace ts::tma {

// `Work`: see work.cuh. Without a tile it says that there is no more.
template <class Work>
__device__ Work no_more() {
    Work work{};
    work.tile = -1;
    return work;
}

template <class Work>
class WorkQueue {
  public:
    static constexpr int kPlaces = 4;
    using Position = typename Ring<kPlaces>::Position;

    // `readers`: warps that take work.
    __device__ void init(int readers) { ring_.init(readers); }

    // Called by one warp.
    __device__ void push(const Work& work, Position& position, int lane) {
        ring_.wait_empty(position);
        if (lane == 0) {
            queue_[position.stage] = work;
            ring_.full[position.stage].arrive();
        }
        __syncwarp();
        position.advance();
    }

    // Called by every lane of a reading warp.
    __device__ Work pop(Position& position, int lane) {
        ring_.wait_full(position);
        Work work = queue_[position.stage];
        // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
        work.each([](int& number) { number = __shfl_sync(~0u, number, 0); });
        // An arrival waits for no load under way. It waits for this comparison of all that was loaded, which
        // is always true.
        int loaded = 0;
        work.each([&](int number) { loaded |= number; });
        if (lane == 0 && loaded != INT_MIN) ring_.empty[position.stage].arrive();
        position.advance();
        return work;
    }

  private:
    Ring<kPlaces> ring_;
    Work queue_[kPlaces];
};

}  // namespace ts::tma
