// Which tiles a cluster computes. Clusters stay on their multiprocessors and take one tile after another.
//
// Tiles are numbered by groups of tokens small enough that the group's activations stay in L2 while all
// features are computed from them; inside a group by their steps, longest first. In every round each
// cluster gets one tile: the clusters with the least work so far get the tiles with most steps. Each
// cluster finds that out for itself, in a warp that has nothing else to do, so that no memory needs to be
// prepared for a launch and every run gives the same schedule.
#pragma once

#include <cstdint>

#include "sm90/pipeline.cuh"

namespace ts::sm90 {

struct Work {
    int tile;   // of the plan; -1: no more
    int unit;   // tokens: a cluster's share, counted from 0
    int step;   // first step of the tile
    int steps;  // number of steps
};

struct ScheduleArguments {
    int tiles;        // of the plan
    int units;        // of tokens
    int group_units;  // of a group of tokens
};

struct Schedule {
    static constexpr int kMaxClusters = 96;
    static constexpr int kQueue = 4;
    static constexpr int kTileCost = 3;  // of a tile's beginning and end, in steps

    Ring<kQueue> ring;
    Work queue[kQueue];
    int loads[kMaxClusters];
    int costs[kMaxClusters];
    uint8_t by_cost[kMaxClusters];

    // `readers`: warps that take work.
    __device__ void init(int readers) { ring.init(readers); }

    // Called by one warp: fills the queue for this cluster.
    __device__ void run(const ScheduleArguments& arguments, const int2* tiles, int cluster, int clusters,
                        int lane) {
        const int size = arguments.tiles * arguments.units;
        Ring<kQueue>::Position position;
        int item = cluster;
        for (int round = 0; round * clusters < size; ++round) {
            const int first = round * clusters;
            if (round == 0) {
                if (item < size) push(work_at(arguments, tiles, item), position, lane);
                for (int c = lane; c < clusters; c += 32)
                    loads[c] = c < size ? cost(work_at(arguments, tiles, c)) : 0;
                __syncwarp();
                continue;
            }
            const int count = min(clusters, size - first);
            for (int c = lane; c < clusters; c += 32)
                costs[c] = c < count ? cost(work_at(arguments, tiles, first + c)) : -1;
            __syncwarp();
            for (int c = lane; c < clusters; c += 32) by_cost[rank(costs, clusters, c, -1)] = static_cast<uint8_t>(c);
            __syncwarp();
            item = by_cost[rank(loads, clusters, cluster, 1)];
            if (item < count) push(work_at(arguments, tiles, first + item), position, lane);
            add_costs(clusters, lane);
        }
        push({-1, 0, 0, 0}, position, lane);
    }

    // Called by every lane of a reading warp.
    __device__ Work pop(Ring<kQueue>::Position& position, int lane) {
        wait(ring.full[position.stage], position.parity);
        Work work = queue[position.stage];
        // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
        work.tile = __shfl_sync(~0u, work.tile, 0);
        work.steps = __shfl_sync(~0u, work.steps, 0);
        if (lane == 0) ring.empty[position.stage].arrive();
        position.advance();
        return work;
    }

  private:
    __device__ static Work work_at(const ScheduleArguments& arguments, const int2* tiles, int item) {
        const int group = item / (arguments.tiles * arguments.group_units);
        const int first_unit = group * arguments.group_units;
        const int units = min(arguments.group_units, arguments.units - first_unit);
        const int within = item - first_unit * arguments.tiles;
        const int tile = within / units;
        const int2 steps = __ldg(tiles + tile);
        return {tile, first_unit + within % units, steps.x, steps.y};
    }

    __device__ static int cost(const Work& work) { return work.steps + kTileCost; }

    // The place of entry `which` in ascending (1) or descending (-1) order.
    __device__ static int rank(const int* values, int count, int which, int order) {
        const int mine = order * values[which];
        int before = 0;
        for (int i = 0; i < count; ++i) {
            const int other = order * values[i];
            before += other < mine || (other == mine && i < which);
        }
        return before;
    }

    __device__ void add_costs(int clusters, int lane) {
        int sums[kMaxClusters / 32];
#pragma unroll
        for (int i = 0; i < kMaxClusters / 32; ++i) {
            const int c = lane + 32 * i;
            if (c < clusters) sums[i] = loads[c] + max(0, costs[by_cost[rank(loads, clusters, c, 1)]]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kMaxClusters / 32; ++i)
            if (lane + 32 * i < clusters) loads[lane + 32 * i] = sums[i];
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
};

}  // namespace ts::sm90
