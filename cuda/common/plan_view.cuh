// How kernels see a plan in device memory. What its arrays hold is in common/plan.h, strip_plan.h and
// list_plan.h.
#pragma once

#include "common/plan.h"

namespace ts {

// The header's numbers and where its arrays are, which a kernel reads from memory if it uses them. A plan
// that is not the one of the launch must not be walked: each kind of plan says when that is known.
struct PlanView {
    int tile_count, group_rows, pieces, fill;
    const int *tiles, *rows, *masks, *k, *slots, *starts;

    // The entry of a tile, as many words as `Tile` has.
    template <class Tile>
    __device__ Tile tile(int index) const {
        return __ldg(reinterpret_cast<const Tile*>(tiles) + index);
    }

  protected:
    PlanView() = default;

    __device__ void read_numbers(const PlanHeader* header) {
        tile_count = header->tiles;
        group_rows = header->group_rows;
        pieces = header->pieces;
        fill = header->fill;
    }
    __device__ void read_places(const PlanHeader* header) {
        const int* words = reinterpret_cast<const int*>(header);
        tiles = words + header->tiles_at;
        rows = words + header->rows_at;
        masks = words + header->masks_at;
        k = words + header->k_at;
        slots = words + header->slots_at;
        starts = words + header->starts_at;
    }
};

// Ends the kernel with an error unless the plan is the one of the launch.
struct OwnPlan : PlanView {
    __device__ OwnPlan(const PlanHeader* header, int key) {
        read_numbers(header);
        if (header->key != key) __trap();
        read_places(header);
    }
};

}  // namespace ts
