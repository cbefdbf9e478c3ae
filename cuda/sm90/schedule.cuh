// Which tiles a cluster computes. Clusters stay on their multiprocessors and take one tile after another.
//
// Tiles are numbered by bands of tokens small enough that the band's activations stay in L2 while all
// features are computed from them; inside a band by their steps, longest first. In every round each
// cluster gets one tile: the clusters with the least work so far get the tiles with most steps, which is
// within 2 % of handing tiles out one by one. Each cluster finds that out for itself, in a warp that has
// nothing else to do, so that no memory needs to be prepared for a launch and every run gives the same
// schedule. That has to take less time than a tile: sorting by counting took longer.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cutlass/fast_math.h>

#include "sm90/pipeline.cuh"

namespace ts::sm90 {

struct Work {
    int tile;   // of the plan; -1: no more
    int span;   // of tokens: as many as a cluster computes, counted from 0
    int part;   // which part of the tile's steps
    int step;   // first step
    int steps;  // number of steps
};

struct ScheduleArguments {
    int size;                           // tiles of the plan times spans of tokens times parts
    cutlass::FastDivmod by_parts;       // parts of a tile's steps; below, each counts as a span
    int band_spans;                     // spans of a band
    cutlass::FastDivmod by_band;        // tiles of a band
    cutlass::FastDivmod by_spans;       // spans of a band
    cutlass::FastDivmod by_last_spans;  // spans of the last band
    int whole_bands;
};

inline ScheduleArguments schedule_arguments(int tiles, int spans, int parts, int band_spans) {
    spans *= parts;
    band_spans = std::min(band_spans, spans);
    const int last = spans % band_spans;
    return {tiles * spans,
            cutlass::FastDivmod(parts),
            band_spans,
            cutlass::FastDivmod(tiles * band_spans),
            cutlass::FastDivmod(band_spans),
            cutlass::FastDivmod(last == 0 ? band_spans : last),
            spans / band_spans};
}

// `kSplits`: whether tiles may be cut into parts.
template <bool kSplits>
struct Schedule {
    static constexpr int kMaxClusters = 128;
    static constexpr int kQueue = 4;
    static constexpr int kTileCost = 3;  // of a tile's beginning and end, in steps

    // Whether the numbers of all work, and of a cluster's steps, fit into 32 bits.
    static bool can_hold(int64_t tiles, int64_t spans, int64_t steps, int multiprocessors) {
        const int64_t clusters = std::max(multiprocessors / 4, 1);  // there are at least so many
        return tiles * spans < int64_t{1} << 30 && steps < kMostSteps &&
               (tiles * spans / clusters + 1) * (steps + kTileCost) < kLast / kPlaces;
    }

    Ring<kQueue> ring;
    Work queue[kQueue];

    // `readers`: warps that take work.
    __device__ void init(int readers) { ring.init(readers); }

    // Called by one warp: fills the queue for this cluster, of at most as many as there is work. `is_own`:
    // whether the tiles are of the plan that the launch is for. If not, the kernel ends with an error before
    // any warp has work.
    __device__ void run(const ScheduleArguments& arguments, const int2* tiles, bool is_own, int cluster,
                        int clusters, int lane) {
        Ring<kQueue>::Position position;
        // Nothing waits for the first round to be sorted: it is in order but for the end of a band of
        // tokens.
        const Work first_work = work_at(arguments, tiles, cluster);
        if (!is_own) __trap();
        push(first_work, position, lane);
        // Keys are sorted; their last bits are the cluster, or the place of the tile in its round.
        Keys loads;
        steps_of_round(loads, arguments, tiles, 0, lane);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int place = lane + 32 * i;
            loads[i] = place < clusters ? (loads[i] + kTileCost) * kPlaces + place : kLast + place;
        }
        for (int first = clusters; first < arguments.size; first += clusters) {
            Keys costs;
            costs_of_round(costs, arguments, tiles, first, clusters, lane);
            sort(loads, lane);
            int mine = -1;  // the item of this cluster, in one lane
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                const int item = first + static_cast<int>(costs[i] % kPlaces);
                if (loads[i] % kPlaces == cluster && loads[i] < kLast && item < arguments.size) mine = item;
                if (loads[i] < kLast && costs[i] < kLast)
                    loads[i] += (kMostSteps - costs[i] / kPlaces + kTileCost) * kPlaces;
            }
            mine = __reduce_max_sync(~0u, mine);
            if (mine >= 0) push(work_at(arguments, tiles, mine), position, lane);
        }
        push({-1, 0, 0, 0, 0}, position, lane);
    }

    // Called by every lane of a reading warp.
    __device__ Work pop(Ring<kQueue>::Position& position, int lane) {
        ring.wait_full(position);
        Work work = queue[position.stage];
        // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
        work.tile = __shfl_sync(~0u, work.tile, 0);
        work.span = __shfl_sync(~0u, work.span, 0);
        work.part = __shfl_sync(~0u, work.part, 0);
        work.step = __shfl_sync(~0u, work.step, 0);
        work.steps = __shfl_sync(~0u, work.steps, 0);
        if (lane == 0) ring.empty[position.stage].arrive();
        position.advance();
        return work;
    }

  private:
    static constexpr int kPerLane = kMaxClusters / 32;  // keys of a lane: those at places lane + 32 i
    static constexpr uint32_t kPlaces = 256;
    static constexpr uint32_t kMostSteps = 1 << 22;
    static constexpr uint32_t kLast = 1u << 31;  // of what does not exist
    using Keys = uint32_t[kPerLane];

    // Without the steps, of which the plan knows.
    __device__ static Work place_at(const ScheduleArguments& arguments, int item) {
        int band, within;
        Work work{};
        arguments.by_band(band, within, item);
        (band < arguments.whole_bands ? arguments.by_spans : arguments.by_last_spans)(work.tile, work.span,
                                                                                      within);
        work.span += band * arguments.band_spans;
        if (kSplits) arguments.by_parts(work.span, work.part, work.span);
        return work;
    }

    // Where a part begins in a tile of so many steps.
    __device__ static int first_step(const ScheduleArguments& arguments, int steps, int part) {
        return kSplits ? arguments.by_parts.div(steps * part) : steps * part;
    }

    __device__ static Work work_at(const ScheduleArguments& arguments, const int2* tiles, int item) {
        Work work = place_at(arguments, item);
        const int2 steps = __ldg(tiles + work.tile);
        const int first = first_step(arguments, steps.y, work.part);
        work.step = steps.x + first;
        work.steps = first_step(arguments, steps.y, work.part + 1) - first;
        return work;
    }

    // The steps of the lane's items from item `first` on. All are asked for before one is waited for, also
    // where there are no more items.
    __device__ static void steps_of_round(Keys& steps, const ScheduleArguments& arguments, const int2* tiles,
                                          int first, int lane) {
        int parts[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const Work work = place_at(arguments, min(first + lane + 32 * i, arguments.size - 1));
            parts[i] = work.part;
            steps[i] = __ldg(&tiles[work.tile].y);
        }
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) asm volatile("" : "+r"(steps[i]));
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            steps[i] =
                first_step(arguments, steps[i], parts[i] + 1) - first_step(arguments, steps[i], parts[i]);
    }

    // The tiles of the round that begins with item `first`, sorted by their steps, longest first.
    __device__ static void costs_of_round(Keys& costs, const ScheduleArguments& arguments, const int2* tiles,
                                          int first, int clusters, int lane) {
        steps_of_round(costs, arguments, tiles, first, lane);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int place = lane + 32 * i;
            costs[i] = place < clusters && first + place < arguments.size
                           ? (kMostSteps - costs[i]) * kPlaces + place
                           : kLast + place;
        }
        // Within a band of tokens they are in order.
        const int last = min(first + clusters, arguments.size) - 1;
        if (arguments.by_band.div(first) != arguments.by_band.div(last)) sort(costs, lane);
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

    __device__ void push(const Work& work, Ring<kQueue>::Position& position, int lane) {
        ring.wait_empty(position);
        if (lane == 0) {
            queue[position.stage] = work;
            ring.full[position.stage].arrive();
        }
        __syncwarp();
        position.advance();
    }
};

}  // namespace ts::sm90
