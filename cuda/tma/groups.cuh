// The work of grouped products: groups of tokens that lie one after another, each with a weight of its own.
//
// A kernel that runs before counts their spans of tokens (elementwise/groups.h); from these counts every
// cluster finds its work as it does for one weight.
#pragma once

#include "elementwise/groups.h"
#include "tma/work.cuh"

namespace ts::tma {

struct GroupArguments {
    groups::Groups groups;
    int tiles;        // of each group's weight
    int span_tokens;  // that a cluster computes
    int band_spans;   // spans of a band, see Bands
};

struct GroupWork {
    int tile;   // of the plan; -1: no more
    int group;  // of the tile
    int token;  // first
    int end;    // of the group's tokens
    int step;   // first step
    int steps;  // number of steps

    template <class Visit>
    __device__ void each(Visit visit) {
        visit(tile), visit(group), visit(token), visit(end), visit(step), visit(steps);
    }
};

// Group by group; in each by bands of tokens, as of one weight.
class GroupSpans {
  public:
    using Work = GroupWork;
    using Arguments = GroupArguments;
    static constexpr bool kMayLack = true;

    __device__ explicit GroupSpans(const Arguments& arguments)
        : arguments_(arguments),
          size_(__ldg(arguments.groups.spans_before + arguments.groups.count) * arguments.tiles) {}

    __device__ int size() const { return size_; }
    __device__ Work place_at(int item) const {
        const int group = group_of(item / arguments_.tiles);
        const int before = __ldg(arguments_.groups.spans_before + group);
        const int spans = __ldg(arguments_.groups.spans_before + group + 1) - before;
        const int within = item - before * arguments_.tiles;
        const int band = within / (arguments_.tiles * arguments_.band_spans);
        const int first = band * arguments_.band_spans, of_band = min(arguments_.band_spans, spans - first);
        const int in_band = within - first * arguments_.tiles, tile = in_band / of_band;
        Work work{};
        work.tile = group * arguments_.tiles + tile;
        work.group = group;
        work.token =
            arguments_.groups.begin(group) + (first + in_band - tile * of_band) * arguments_.span_tokens;
        work.end = arguments_.groups.begin(group + 1);
        return work;
    }
    __device__ void set_steps(Work& work, int2 steps) const { work.step = steps.x, work.steps = steps.y; }

  private:
    // The last group that has not more spans before it.
    __device__ int group_of(int span) const {
        int low = 0, high = arguments_.groups.count;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (__ldg(arguments_.groups.spans_before + middle) <= span ? low : high) = middle;
        }
        return low;
    }

    const Arguments& arguments_;
    int size_;
};

}  // namespace ts::tma
