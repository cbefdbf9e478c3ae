// Which tiles a cluster computes. Clusters stay on their multiprocessors and take one tile after another.
//
// Tiles are numbered by groups of tokens small enough that the group's activations stay in L2 while all
// features are computed from them; inside a group by their steps, longest first. In every round each
// cluster gets one tile: the clusters with the least work so far get the tiles with most steps. Each
// cluster finds that out for itself, in a warp that has nothing else to do, so that no memory needs to be
// prepared for a launch and every run gives the same schedule.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cutlass/fast_math.h>

#include "sm90/pipeline.cuh"

namespace ts::sm90 {

struct Work {
    int tile;   // of the plan; -1: no more
    int unit;   // tokens: a cluster's share, counted from 0
    int step;   // first step of the tile
    int steps;  // number of steps
};

struct ScheduleArguments {
    int size;         // tiles of the plan times units of tokens
    int tiles;        // of the plan
    int group_units;  // units of a group of tokens
    cutlass::FastDivmod by_group;       // tiles of a group
    cutlass::FastDivmod by_units;       // units of a group
    cutlass::FastDivmod by_last_units;  // units of the last group
    int whole_groups;
};

inline ScheduleArguments schedule_arguments(int tiles, int units, int group_units) {
    group_units = std::min(group_units, units);
    const int last = units % group_units;
    return {tiles * units,
            tiles,
            group_units,
            cutlass::FastDivmod(tiles * group_units),
            cutlass::FastDivmod(group_units),
            cutlass::FastDivmod(last == 0 ? group_units : last),
            units / group_units};
}

struct Schedule {
    static constexpr int kMaxClusters = 96;
    static constexpr int kQueue = 4;
    static constexpr int kTileCost = 3;  // of a tile's beginning and end, in steps

    Ring<kQueue> ring;
    Work queue[kQueue];
    uint2 keys[kMaxClusters];  // of the clusters by their work so far, of the round's tiles by their cost
    uint8_t by_load[kMaxClusters];  // the rank of a cluster
    uint8_t by_cost[kMaxClusters];  // the tile of a rank

    // `readers`: warps that take work.
    __device__ void init(int readers) { ring.init(readers); }

    // Called by one warp: fills the queue for this cluster.
    __device__ void run(const ScheduleArguments& arguments, const int2* tiles, int cluster, int clusters,
                        int lane) {
        Ring<kQueue>::Position position;
        uint32_t loads[kPerLane] = {};
        if (cluster < arguments.size) push(work_at(arguments, tiles, cluster), position, lane);
        for (int first = 0; first < arguments.size; first += clusters) {
            // The first round has been begun with tiles in order, which is nearly always what it gives.
            rank(loads, arguments, tiles, first, clusters, lane);
            const int item = first + by_cost[by_load[cluster]];
            if (first > 0 && item < arguments.size) push(work_at(arguments, tiles, item), position, lane);
        }
        push({-1, 0, 0, 0}, position, lane);
    }

    // Called by every lane of a reading warp.
    __device__ Work pop(Ring<kQueue>::Position& position, int lane) {
        wait(ring.full[position.stage], position.parity);
        Work work = queue[position.stage];
        // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
        work.tile = __shfl_sync(~0u, work.tile, 0);
        work.unit = __shfl_sync(~0u, work.unit, 0);
        work.step = __shfl_sync(~0u, work.step, 0);
        work.steps = __shfl_sync(~0u, work.steps, 0);
        if (lane == 0) ring.empty[position.stage].arrive();
        position.advance();
        return work;
    }

  private:
    static constexpr int kPerLane = kMaxClusters / 32;  // clusters, or tiles of a round, that a lane cares for

    __device__ static Work work_at(const ScheduleArguments& arguments, const int2* tiles, int item) {
        int group, within, tile, unit;
        arguments.by_group(group, within, item);
        (group < arguments.whole_groups ? arguments.by_units : arguments.by_last_units)(tile, unit, within);
        const int2 steps = __ldg(tiles + tile);
        return {tile, group * arguments.group_units + unit, steps.x, steps.y};
    }

    // Ranks the clusters by their work and the tiles of the round that begins with item `first` by theirs,
    // and adds to each cluster's load, of which lane l holds those of clusters l + 32 i, what it gets.
    __device__ void rank(uint32_t (&loads)[kPerLane], const ScheduleArguments& arguments, const int2* tiles,
                         int first, int clusters, int lane) {
        // Keys differ in their last bits, which are the place.
        uint2 mine[kPerLane];
        uint2 ranks[kPerLane] = {};
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const uint32_t place = lane + 32 * i;
            const int item = first + place;
            const int steps = item < arguments.size ? work_at(arguments, tiles, item).steps : -kTileCost;
            mine[i] = make_uint2(loads[i] * 128 + place, (kMostSteps - steps) * 128 + place);
            keys[place] = mine[i];
        }
        __syncwarp();
#pragma unroll 4
        for (int place = 0; place < clusters; ++place) {
            const uint2 other = keys[place];
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                ranks[i].x += other.x < mine[i].x;
                ranks[i].y += other.y < mine[i].y;
            }
        }
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int place = lane + 32 * i;
            if (place >= clusters) continue;
            by_load[place] = static_cast<uint8_t>(ranks[i].x);
            by_cost[ranks[i].y] = static_cast<uint8_t>(place);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            if (lane + 32 * i < clusters)
                loads[i] += kMostSteps - keys[by_cost[ranks[i].x]].y / 128 + kTileCost;
        __syncwarp();
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

    static constexpr uint32_t kMostSteps = 1 << 24;
};

}  // namespace ts::sm90
