// The work of clusters: tiles of a plan by spans of tokens, numbered. Schedule
// (schedule.cuh) hands it out, and takes how it is numbered as a parameter:
//     Work: what a cluster is given; each(visit) visits its numbers
//     Arguments: of a kernel
//     kMayLack: whether there may be less of it than clusters
//     size(), place_at(item): how much there is; an item, without the steps, of which the plan knows
//     in_order(items): whether so many come longest first
//     set_steps(work, int2): from the plan's first step and number of steps of the tile
#pragma once

#include <algorithm>

#include <cutlass/fast_math.h>

namespace ts::tma {

struct Work {
    int tile;   // of the plan; -1: no more
    int span;   // of tokens: as many as a cluster computes, counted from 0
    int part;   // which part of the tile's steps
    int step;   // first step
    int steps;  // number of steps

    template <class Visit>
    __device__ void each(Visit visit) {
        visit(tile), visit(span), visit(part), visit(step), visit(steps);
    }
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

// Work of one weight: by bands of tokens small enough that the band's activations stay in L2 while all
// features are computed from them; inside a band as the plan has the tiles. `kSplits`: whether tiles may be
// cut into parts.
template <bool kSplits>
struct Bands {
    using Work = tma::Work;
    using Arguments = ScheduleArguments;
    static constexpr bool kMayLack = false;

    const Arguments& arguments;

    __device__ int size() const { return arguments.size; }
    __device__ bool in_order(int items) const { return min(items, size()) <= arguments.by_band.divisor; }
    __device__ Work place_at(int item) const {
        int band, within;
        Work work{};
        arguments.by_band(band, within, item);
        (band < arguments.whole_bands ? arguments.by_spans : arguments.by_last_spans)(work.tile, work.span,
                                                                                      within);
        work.span += band * arguments.band_spans;
        if (kSplits) arguments.by_parts(work.span, work.part, work.span);
        return work;
    }
    __device__ void set_steps(Work& work, int2 steps) const {
        const int first = first_step(steps.y, work.part);
        work.step = steps.x + first;
        work.steps = first_step(steps.y, work.part + 1) - first;
    }

  private:
    // First step of a part in a tile of that many steps.
    __device__ int first_step(int steps, int part) const {
        return kSplits ? arguments.by_parts.div(steps * part) : steps * part;
    }
};

}  // namespace ts::tma
