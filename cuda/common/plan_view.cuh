// How kernels see a plan in device memory. What its arrays hold is in common/plan.h, strip_plan.h and
// list_plan.h.
#pragma once

#include "common/plan.h"

namespace ts {

// Called where the plan is not the one of the launch; the next call of the library fails (check_plans).
__device__ inline void report_stale(const PlanReport& report) {
    *static_cast<volatile int32_t*>(report.at) = report.kernel;
}

// Asks for a header, for all that will read it.
__device__ inline void prefetch_header(const PlanHeader* header) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(header));
}

// The header's numbers and where its arrays are, which a kernel reads from memory if it uses them. A plan
// that is not the one of the launch must not be walked: each kind of plan says when that is known. All
// threads of a launch read the same header, so all of them leave the work undone.
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

// A kernel ends at once unless `is_own`.
struct OwnPlan : PlanView {
    bool is_own;  // the plan of this launch

    __device__ OwnPlan(const PlanHeader* header, int key, const PlanReport& report) {
        read_numbers(header);
        is_own = header->key == key;
        if (!is_own) report_stale(report);
        read_places(header);
    }
};

}  // namespace ts
