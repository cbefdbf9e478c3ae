// How sdd kernels see a plan.
#pragma once

#include "common/plan_view.cuh"

namespace ts::sm90 {

// Has no tiles unless the plan is the one of the launch.
struct SddPlan : PlanView {
    __device__ SddPlan(const PlanHeader* header, int key, const PlanReport& report) {
        read_numbers(header);
        if (header->key != key) {
            report_stale(report);
            tile_count = 0;
        }
        // Lets the compiler see that all lanes have the same, without which it would serialise wgmma.
        tile_count = __shfl_sync(~0u, tile_count, 0);
        read_places(header);
    }
};

}  // namespace ts::sm90
