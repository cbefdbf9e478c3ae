// How kernels see a plan in device memory. What its arrays hold is in common/plan.h.
#pragma once

#include "common/plan.h"

namespace ts {

// The header's numbers and where its arrays are. A kernel reads from memory only the members it uses.
struct PlanView {
    int tile_count, group_rows, pieces;
    const int *tiles, *rows, *masks, *k, *slots;

    // Ends the kernel with an error unless the plan is the one of this launch.
    __device__ PlanView(const PlanHeader* header, int key)
        : tile_count(header->tiles), group_rows(header->group_rows), pieces(header->pieces) {
        if (header->key != key) __trap();
        const int* words = reinterpret_cast<const int*>(header);
        tiles = words + header->tiles_at;
        rows = words + header->rows_at;
        masks = words + header->masks_at;
        k = words + header->k_at;
        slots = words + header->slots_at;
    }

    // The entry of a tile, as many words as `Tile` has.
    template <class Tile>
    __device__ Tile tile(int index) const {
        return __ldg(reinterpret_cast<const Tile*>(tiles) + index);
    }
};

}  // namespace ts
