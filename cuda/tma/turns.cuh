// Work in turn, for tiles that take less time than Schedule needs to hand out a round.
#pragma once

#include "tma/schedule.cuh"

namespace ts::tma {

// Clusters take the items of a round forth, and those of the next one back: those of a band are in order,
// longest first. For `Places` and `Costs` see Schedule.
template <class Places, class Costs>
class Turns {
  public:
    using Work = typename Places::Work;
    using Queue = WorkQueue<Work>;
    static constexpr int kMaxClusters = Schedule<Places, Costs>::kMaxClusters;
    static constexpr int kQueue = Queue::kPlaces;

    static int64_t most_spans(int64_t tiles, int64_t steps, int multiprocessors) {
        return Schedule<Places, Costs>::most_spans(tiles, steps, multiprocessors);
    }

    // `readers`: warps that take work.
    __device__ void init(int readers) { queue_.init(readers); }

    // See Schedule.
    __device__ void run(const typename Places::Arguments& arguments, const Costs& costs, bool is_own,
                        int cluster, int clusters, int lane) {
        const Places places{arguments};
        typename Queue::Position position;
        bool back = false;
        for (int first = 0; is_own && first < places.size(); first += clusters, back = !back) {
            const int item = first + (back ? clusters - 1 - cluster : cluster);
            if (item >= places.size()) continue;
            Work work = places.place_at(item);
            places.set_steps(work, __ldg(costs.tiles + work.tile));
            queue_.push(work, position, lane);
        }
        queue_.push(no_more<Work>(), position, lane);
    }

    __device__ Work pop(typename Queue::Position& position, int lane) { return queue_.pop(position, lane); }

  private:
    Queue queue_;
};

}  // namespace ts::tma
