// The dds kernel: which warps load, schedule and multiply.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/dds_consumer.cuh"
#include "sm90/dds_producer.cuh"
#include "sm90/dds_split.cuh"

namespace ts::sm90 {

template <class Traits, bool kRowMajorInput>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    dds_kernel(const __grid_constant__ DdsArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const auto rank = static_cast<int>(cute::block_rank_in_cluster());
    // All of it is in memory at first: what will be read is asked for while the barriers are set up.
    const DdsPlan plan(arguments.plan, arguments.plan_key);
    if (threadIdx.x == 32) {
        if (arguments.value_rows > 0)
            for (const CUtensorMap* map : {&arguments.values, &arguments.input}) prefetch(map);
        prefetch(&arguments.output);
    }
    if (threadIdx.x == 0) {
        shared.input_ring.init(4 * Traits::kWarpgroups * Traits::kRowRanks);
        for (auto& ring : shared.weight_ring) ring.init(Traits::kTokenRanks);
        for (auto& chunks : shared.residual)
            for (const Barrier& arrived : chunks) arrived.init(1);
        shared.schedule.init(1 + Traits::kWarpgroups + 4 * (Traits::kWarpgroups + Traits::kSplitsInput));
        if constexpr (Traits::kSplitsInput)
            for (const Barrier& split : shared.split) split.init(4);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_sync();
    if (Traits::kSplits && arguments.partial != nullptr)
        cudaTriggerProgrammaticLaunchCompletion();  // see dds_reduce

    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        const DdsProducer<Traits> producer{arguments, shared, plan, rank, lane, cute::elect_one_sync() != 0};
        if (warp == 0) {
            producer.template load_input<kRowMajorInput>();
        } else if (warp <= Traits::kWarpgroups) {
            producer.load_weight(warp - 1);
        } else {
            shared.schedule.run(Traits::schedule_of(arguments), typename Traits::Costs(plan), plan.is_own,
                                blockIdx.x / Traits::kRanks, gridDim.x / Traits::kRanks, lane);
            if (!plan.is_own) report_stale(arguments.plan_report);
        }
    } else if (warp >= 4 * (1 + Traits::kWarpgroups)) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        split_input<Traits, 128>(shared, shared.input_ring, threadIdx.x % 128);
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::kComputerRegisters>();
        DdsConsumer<Traits, kRowMajorInput>(arguments, shared, plan, rank, warp / 4 - 1).run();
    }
    cute::cluster_sync();  // the other CTA may still write here
}

}  // namespace ts::sm90
