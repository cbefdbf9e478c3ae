// The work of grouped products: groups of tokens that lie one after another, each with a weight of its own.
//
// A kernel that runs before lists their spans of tokens (elementwise/groups.h); from this list every cluster
// finds its work as it does for one weight.
#pragma once

#include "elementwise/groups.h"
#include "tma/work.cuh"

namespace ts::tma {

struct GroupArguments {
    groups::Groups groups;
    cutlass::FastDivmod by_tiles;  // of each group's weight
    int span_shift;                // log2 of the tokens that a cluster computes
    int band_spans;                // spans of a band, see Bands
    cutlass::FastDivmod by_band;   // tiles of a whole band
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
          size_(min(__ldg(arguments.groups.spans_before + arguments.groups.count),
                    arguments.groups.most_spans) *
                tiles()) {}

    __device__ int size() const { return size_; }
    __device__ bool in_order(int) const { return false; }  // weights of several groups
    // One load and no search: a round of tiles with few steps would wait for it.
    __device__ Work place_at(int item) const {
        const int4 own = __ldg(arguments_.groups.spans + arguments_.by_tiles.div(item));
        Work work{};
        work.group = own.x;
        work.end = own.w;
        const int spans = own.w - own.z + (1 << arguments_.span_shift) - 1 >> arguments_.span_shift;
        int band, in_band;
        arguments_.by_band(band, in_band, item - own.y * tiles());
        const int first = band * arguments_.band_spans, of_band = min(arguments_.band_spans, spans - first);
        const int tile = static_cast<uint32_t>(in_band) / static_cast<uint32_t>(of_band);
        work.tile = own.x * tiles() + tile;
        work.token = own.z + (first + in_band - tile * of_band << arguments_.span_shift);
        return work;
    }
    __device__ void set_steps(Work& work, int2 steps) const { work.step = steps.x, work.steps = steps.y; }

  private:
    __device__ int tiles() const { return arguments_.by_tiles.divisor; }

    const Arguments& arguments_;
    int size_;
};

}  // namespace ts::tma
