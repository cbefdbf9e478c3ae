// The dds kernel for narrow blocks: which warps load, schedule and multiply.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/dds_narrow_consumer.cuh"
#include "sm90/dds_narrow_producer.cuh"
#include "sm90/dds_split.cuh"

namespace ts::sm90 {

// All that a CTA does.
template <class Traits, bool kRowMajorInput>
__device__ __forceinline__ void run_narrow(const DdsArguments& arguments, const DdsPlan& plan, char* memory) {
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const auto cluster_rank = static_cast<int>(cute::block_rank_in_cluster());
    const int rank = cluster_rank % Traits::kRanks, first_rank = Traits::kSplits ? cluster_rank - rank : 0;
    if (threadIdx.x == 32) {
        if (arguments.value_rows > 0) prefetch(&arguments.input);
        if (arguments.value_rows > 0 && arguments.packed == nullptr) prefetch(&arguments.values);
        prefetch(&arguments.output);
    }
    if (threadIdx.x == 0) {
        shared.ring.init(4 * Traits::kWarpgroups * Traits::kRanks);
        for (auto& chunks : shared.residual)
            for (const Barrier& arrived : chunks) arrived.init(1);
        shared.schedule.init(1 + Traits::kSplitWarps + 4 * Traits::kWarpgroups);
        if constexpr (Traits::kSplitsInput)
            for (const Barrier& split : shared.split) split.init(Traits::kSplitWarps);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_sync();

    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<32>();
        if (warp == 0) {
            NarrowProducer<Traits, kRowMajorInput>(arguments, shared, plan, rank, first_rank, lane).run();
        } else if (warp == 1) {
            shared.schedule.run(arguments.schedule, typename Traits::Costs(plan), plan.is_own,
                                blockIdx.x / Traits::kRanks, gridDim.x / Traits::kRanks, lane);
            if (!plan.is_own) report_stale(arguments.plan_report);
        } else {
            split_input<Traits, 32 * Traits::kSplitWarps>(shared, shared.ring, threadIdx.x - 64);
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<112>();
        NarrowConsumer<Traits, kRowMajorInput> consumer(arguments, shared, plan, rank, first_rank, warp - 4,
                                                        lane);
        if constexpr (Traits::kSplits)
            consumer.run_part();
        else
            consumer.run();
    }
    if (Traits::kSplits && warp < 4) {  // as the others do
        cute::cluster_sync();
        cute::cluster_sync();
    }
    cute::cluster_sync();  // the other CTA may still write here
}

template <class Kinds, bool kRowMajorInput>
__global__ void __launch_bounds__(Kinds::kThreads, 1)
    dds_narrow_kernel(const __grid_constant__ DdsArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    const DdsPlan plan(arguments.plan, arguments.plan_key);
    // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
    const int step = __shfl_sync(~0u, plan.step(), 0), fill = __shfl_sync(~0u, plan.fill, 0);
    if (step == Kinds::Crowded::kStep)
        return run_narrow<typename Kinds::Crowded, kRowMajorInput>(arguments, plan, memory);
    if constexpr (!std::is_same_v<typename Kinds::Common, typename Kinds::Thin>)
        if (fill > Kinds::kThinFill)
            return run_narrow<typename Kinds::Common, kRowMajorInput>(arguments, plan, memory);
    run_narrow<typename Kinds::Thin, kRowMajorInput>(arguments, plan, memory);
}

}  // namespace ts::sm90
