// The sdd kernel for blocks of 16 x 16: which warps load and multiply.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/sdd_narrow_consumer.cuh"
#include "sm90/sdd_narrow_producer.cuh"

namespace ts::sm90 {

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_narrow_kernel(const __grid_constant__ SddNarrowArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    if (threadIdx.x == 0) {
        if (arguments.steps > 0)
            for (const CUtensorMap* map : {&arguments.y, &arguments.x}) prefetch(map);
        shared.ring.init(kListWarps);
        cutlass::arch::fence_barrier_init();
    }
    const SddPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.ctas, 1, arguments.may_split);
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<32>();
        if (warp == 0)
            SddNarrowProducer<Traits, kRowMajorY, kRowMajorX>(arguments, shared).run(plan, schedule);
    } else {
        cutlass::arch::warpgroup_reg_alloc<112>();
        SddNarrowConsumer<Traits, kRowMajorY, kRowMajorX>(arguments, shared).run(plan, schedule);
    }
}

}  // namespace ts::sm90
