// Which tiles a cluster computes. Clusters stay on their multiprocessors and take one tile after another.
//
// Tiles are numbered by bands of tokens small enough that the band's activations stay in L2 while all
// features are computed from them; inside a band as the plan has them, longest first. In every round each
// cluster gets one tile: the clusters with the least work so far get the tiles that cost most. The tiles of
// the last rounds are handed out a second time, knowing what each cluster gets in the others: otherwise a
// long tile in the last round would end late, up to a fifth of all time with rows of unequal length. (Bands
// in which all clusters would have as much work as the longest tile takes are balanced as well, but too
// large for L2.) Each cluster finds that out for itself, in a warp that has nothing else to do, so that no
// memory needs to be prepared for a launch and every run gives the same schedule. That has to take less time
// than a tile: sorting by counting took longer. To hand out takes 7 us the first time, so the second round is
// taken in turn, as the first one is: where one band has both, which are in order then, or where tiles cost
// less than a third of what hides a round.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "tma/work.cuh"
#include "tma/work_queue.cuh"

namespace ts::tma {

// The cost of tiles, for Schedule: in units of its own, at most kMostOfStep for each step.
//     kTile: a tile's beginning and end
//     kRound: so much hides that a round is handed out again
//     tiles: of the plan
//     of(first, steps): so many steps of a tile
//
// `Places`: how work is numbered, see work.cuh.
template <class Places, class Costs>
class Schedule {
    static constexpr int kMostRounds = 5;  // handed out twice; shared memory has no room for more

  public:
    using Work = typename Places::Work;
    using Queue = WorkQueue<Work>;
    static constexpr int kMaxClusters = 128;
    static constexpr int kQueue = Queue::kPlaces;

    // So many spans that the numbers of all work, and of what a cluster's steps cost, fit into 32 bits.
    static int64_t most_spans(int64_t tiles, int64_t steps, int multiprocessors) {
        const int64_t clusters = std::max(multiprocessors / 4, 1);  // there are at least so many
        const int64_t cost = steps * Costs::kMostOfStep + Costs::kTile;
        const int64_t rounds = cost < kMostCost ? (kLast / kPlaces - 1) / cost : 0;
        return std::min((int64_t{1} << 30) - 1, rounds * clusters - 1) / std::max<int64_t>(tiles, 1);
    }

    // `readers`: warps that take work.
    __device__ void init(int readers) { queue_.init(readers); }

    // Called by one warp after set_up(): fills the queue for this cluster, of at most as many as there is
    // work; of none if `is_own` is false: then the tiles are not of the plan that the launch is for.
    __device__ void run(const typename Places::Arguments& arguments, const Costs& costs, bool is_own,
                        int cluster, int clusters, int lane) {
        const Items items{Places{arguments}, costs, clusters, lane};
        typename Queue::Position position;
        // Nothing waits for the first round to be sorted: it is in order but for the end of a band of
        // tokens.
        const bool lacks = kMayLack && cluster >= items.places.size();
        Work first_work = lacks ? no_more<Work>() : items.work_at(cluster);
        cute::cluster_wait();
        if (!is_own) first_work.tile = -1;
        queue_.push(first_work, position, lane);
        // A branch before which the compiler does not move what follows.
        if (first_work.tile < 0) return;
        const int size = items.places.size(), rounds = (size + clusters - 1) / clusters;
        const bool in_order = items.places.in_order(2 * clusters);
        const auto push_second = [&] {
            if (const int item = 2 * clusters - 1 - cluster; item < size)
                queue_.push(items.work_at(item), position, lane);
        };
        if (in_order) push_second();
        if (rounds <= 1 + in_order) return queue_.push(no_more<Work>(), position, lane);
        Keys round, next, loads = {};  // of each cluster, in the order of clusters
        items.keys_of_round(round, 0);
        items.keys_of_round(next, 1);
        add(loads, round);
        const uint32_t all = sum(loads);
        const bool in_turn = in_order || all < uint32_t(Costs::kRound / 3 * clusters);
        if (in_turn) {
            if (!in_order) push_second();
            turn(given_[0], next, clusters, lane);
            add(loads, next);
            items.keys_of_round(next, 2);
        }
        const int first = in_turn ? 2 : 1;  // that is handed out
        const int twice = rounds_twice(rounds, first, all, clusters), once = rounds - twice;
        for (int i = first; i < rounds + twice; ++i) {
            const bool again = i >= rounds;
            const int r = again ? i - twice : i;
            uint32_t* const given = given_[max(r - once, 0)];
            if (again) {
                take_back(given, round, loads, lane);
            } else {
                copy(round, next);
                items.keys_of_round(next, r + 1);  // which will have arrived when it is needed
            }
            hand_out(given, round, loads, clusters, lane);
            add(loads, round);
            const uint32_t key = given[cluster];
            if ((again || r < once) && key < kLast)
                queue_.push(items.work_at(r * clusters + static_cast<int>(key % kPlaces)), position, lane);
        }
        queue_.push(no_more<Work>(), position, lane);
    }

    __device__ Work pop(typename Queue::Position& position, int lane) { return queue_.pop(position, lane); }

  private:
    static constexpr bool kMayLack = Places::kMayLack;
    static constexpr int kPerLane = kMaxClusters / 32;  // keys of a lane: those at places lane + 32 i
    static constexpr uint32_t kPlaces = 256;
    static constexpr uint32_t kMostCost = 1 << 22;
    static constexpr uint32_t kLast = 1u << 31;  // of what does not exist
    using Keys = uint32_t[kPerLane];

    // All work, numbered. A round has as many items as there are clusters. The key of an item sorts by cost,
    // greatest first; its last bits are its place in its round.
    struct Items {
        Places places;
        const Costs& costs;
        int clusters;
        int lane;

        __device__ Work work_at(int item) const {
            Work work = places.place_at(item);
            places.set_steps(work, __ldg(costs.tiles + work.tile));
            return work;
        }

        // All tiles are asked for before one is waited for, also where there are no more items.
        __device__ void keys_of_round(Keys& keys, int round) const {
            const int first = round * clusters;
            Work works[kPerLane];
            int2 steps[kPerLane];
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                works[i] = places.place_at(min(first + lane + 32 * i, places.size() - 1));
                steps[i] = __ldg(costs.tiles + works[i].tile);
            }
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) asm volatile("" : "+r"(steps[i].y));
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                const int place = lane + 32 * i;
                places.set_steps(works[i], steps[i]);
                const uint32_t cost = costs.of(works[i].step, works[i].steps) + Costs::kTile;
                const bool exists = place < clusters && first + place < places.size();
                keys[i] = exists ? (kMostCost - cost) * kPlaces + place : kLast + place;
            }
        }
    };

    // The last rounds, as many as can be handed out while the clusters have work from those before. `all`:
    // the costs of the first round.
    __device__ static int rounds_twice(int rounds, int first, uint32_t all, int clusters) {
        int twice = min(kMostRounds, rounds - first);
        while (twice > 0 && min(kQueue, rounds - twice) * all < uint32_t(Costs::kRound * twice * clusters))
            --twice;
        return twice;
    }

    __device__ static uint32_t sum(const Keys& loads) {
        uint32_t own = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) own += loads[i];
        return __reduce_add_sync(~0u, own);
    }
    __device__ static uint32_t cost_of(uint32_t key) { return key < kLast ? kMostCost - key / kPlaces : 0; }
    __device__ static void add(Keys& loads, const Keys& keys) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) loads[i] += cost_of(keys[i]);
    }

    __device__ static void take_back(const uint32_t* given, Keys& round, Keys& loads, int lane) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            round[i] = given[lane + 32 * i];
            loads[i] -= cost_of(round[i]);
        }
    }

    // Brings the keys of the second round, which is taken in turn, into the order of clusters.
    __device__ static void turn(uint32_t* given, Keys& round, int clusters, int lane) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int place = lane + 32 * i;
            given[place < clusters ? clusters - 1 - place : place] = round[i];
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) round[i] = given[lane + 32 * i];
        __syncwarp();
    }

    // Gives the items of a round to the clusters, those that cost most to those with the least load. `given`,
    // and afterwards `round`, have the clusters' keys in the order of clusters.
    __device__ static void hand_out(uint32_t* given, Keys& round, const Keys& loads, int clusters, int lane) {
        Keys order;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int place = lane + 32 * i;
            order[i] = place < clusters ? loads[i] * kPlaces + place : kLast + place;
        }
        // One code for both: what is executed for the first time comes from far away.
#pragma unroll 1
        for (int i = is_sorted(round, lane) ? 1 : 0; i < 2; ++i) {
            if (i == 1) swap(round, order);
            sort(round, lane);
        }
        swap(round, order);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) given[order[i] % kPlaces] = round[i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) round[i] = given[lane + 32 * i];
    }
    // As they are within a band of tokens, unless tiles of fewer steps cost more.
    __device__ static bool is_sorted(const Keys& keys, int lane) {
        bool sorted = true;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const uint32_t after = __shfl_down_sync(~0u, keys[i], 1);
            const uint32_t first = i + 1 < kPerLane ? __shfl_sync(~0u, keys[i + 1], 0) : ~0u;
            sorted &= keys[i] <= (lane == 31 ? first : after);
        }
        return __all_sync(~0u, sorted);
    }
    __device__ static void copy(Keys& to, const Keys& from) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) to[i] = from[i];
    }
    __device__ static void swap(Keys& a, Keys& b) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const uint32_t key = a[i];
            a[i] = b[i], b[i] = key;
        }
    }

    // Bitonic: afterwards the i-th key is in lane i % 32, at i / 32.
    __device__ static void sort(Keys& keys, int lane) {
#pragma unroll
        for (int size = 2; size <= kMaxClusters; size *= 2) {
#pragma unroll
            for (int distance = size / 2; distance > 0; distance /= 2) {
                Keys others;
#pragma unroll
                for (int i = 0; i < kPerLane; ++i)
                    others[i] =
                        distance < 32 ? __shfl_xor_sync(~0u, keys[i], distance) : keys[i ^ distance / 32];
#pragma unroll
                for (int i = 0; i < kPerLane; ++i) {
                    const int place = lane + 32 * i;
                    const bool ascending = (place & size) == 0, first = (place & distance) == 0;
                    keys[i] = ascending == first ? min(keys[i], others[i]) : max(keys[i], others[i]);
                }
            }
        }
    }

    Queue queue_;
    uint32_t given_[kMostRounds][kMaxClusters];  // keys of the items of a round, by cluster
};

}  // namespace ts::tma
