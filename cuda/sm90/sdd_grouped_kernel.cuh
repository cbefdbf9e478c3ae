// The sdd kernel of grouped products: which warps load and multiply.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/sdd_consumer.cuh"
#include "sm90/sdd_producer.cuh"

namespace ts::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_grouped_kernel(const __grid_constant__ SddArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 128) prefetch_plan(arguments);
    if (threadIdx.x == 0) {
        for (auto& ring : shared.rings) ring.init(Traits::kHalves);
        shared.queue.init(4 * Traits::kHalves);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    const StripPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (warp == 0) SddProducer<Traits, true, true>(arguments, shared, 0).run_groups(plan);
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        SddConsumer<Traits, true, true>(arguments, shared, 0, warp / 4 - 1).run_groups(plan);
    }
}

}  // namespace ts::sm90
