// The sdd kernel: which warps load, multiply, and sum up y.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "elementwise/sums.cuh"
#include "sm90/sdd_consumer.cuh"
#include "sm90/sdd_producer.cuh"

namespace ts::sm90 {

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_kernel(const __grid_constant__ SddArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 128) prefetch_plan(arguments);
    if (threadIdx.x == 0) {
        if (arguments.steps > 0)
            for (const CUtensorMap* map : {&arguments.y, &arguments.x}) prefetch(map);
        for (auto& ring : shared.rings) ring.init(Traits::kHalves * arguments.team_size);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_arrive();
    const int rank = blockIdx.x % arguments.team_size;
    const StripPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.teams, arguments.team_size,
                               arguments.may_split);
    cute::cluster_wait();
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (warp == 0)
            SddProducer<Traits, kRowMajorY, kRowMajorX>(arguments, shared, rank).run(plan, schedule);
        else
            sums::sum_items<typename Traits::Input, Traits::kSumsAhead, true>(
                arguments.sums, (warp - 1) * gridDim.x + blockIdx.x, Traits::kSumWarps * gridDim.x,
                threadIdx.x % 32);
        cute::cluster_arrive();
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        SddConsumer<Traits, kRowMajorY, kRowMajorX>(arguments, shared, rank, warp / 4 - 1)
            .run(plan, schedule);
    }
    cute::cluster_wait();  // the other CTA may still arrive at barriers of this one
}

}  // namespace ts::sm90
