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
        const int size = places.size();
        Work next{};
        int2 steps{};
        const auto read = [&](int round) {
            const int item = round * clusters + (round % 2 == 0 ? cluster : clusters - 1 - cluster);
            if (item >= size) return false;
            next = places.place_at(item);
            steps = __ldg(costs.tiles + next.tile);
            return true;
        };
        // The steps of an item are asked for before the one before it is handed out.
        bool exists = read(0);
        cute::cluster_wait();
        exists &= is_own;
        for (int round = 1; exists; ++round) {
            Work work = next;
            const int2 of_work = steps;
            exists = read(round);
            places.set_steps(work, of_work);
            queue_.push(work, position, lane);
        }
        queue_.push(no_more<Work>(), position, lane);
    }

    __device__ Work pop(typename Queue::Position& position, int lane) { return queue_.pop(position, lane); }

  private:
    Queue queue_;
};

}  // namespace ts::tma
