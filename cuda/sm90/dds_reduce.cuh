// dds in parts: where tiles are few, the sums over k are cut, and a second kernel adds them.
#pragma once

#include "sm90/dds_epilogue.cuh"
#include "sm90/dds_traits.cuh"
#include "sm90/launch.cuh"
#include "sm90/partial.cuh"

namespace ts::sm90 {

template <class Traits>
struct ReduceShared {
    alignas(1024) typename DdsEpilogue<Traits>::Buffers output;
    typename DdsEpilogue<Traits>::Arrived residual;
};

// Adds the partial sums of each tile, always in the same order, and makes results of them. A CTA computes
// what a warpgroup of the dds kernel does of one tile. It is launched while that kernel still runs.
template <class Traits>
__global__ void __launch_bounds__(128) dds_reduce(const __grid_constant__ DdsArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<ReduceShared<Traits>*>(memory);
    if (threadIdx.x == 0) {
        for (const Barrier& arrived : shared.residual) arrived.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    const DdsPlan plan(arguments.plan, arguments.plan_key);
    if (!plan.is_own) __trap();
    const int warpgroup = blockIdx.x % Traits::kWarpgroups, cta = blockIdx.x / Traits::kWarpgroups;
    const int rank = cta % Traits::kRanks, item = cta / Traits::kRanks;
    Work work{item / arguments.spans, item % arguments.spans, 0, 0, 0};
    DdsEpilogue<Traits> epilogue(arguments, shared.output, shared.residual, warpgroup);
    epilogue.prepare(Traits::rows_of(plan, work.tile, rank));
    epilogue.read_bias();
    epilogue.begin(Traits::first_token(work, rank));
    cudaGridDependencySynchronize();
    float sums[Traits::kSums] = {};
    for (; work.part < arguments.schedule.by_parts.divisor; ++work.part)
        add_sums(partial_sums<Traits::kSums>(arguments.partial,
                                             partial_place<Traits>(arguments, work, rank, warpgroup)),
                 sums);
    epilogue.store(sums);
    epilogue.finish_stores();
}

// Of the partial sums of so many tiles of a cluster.
template <class Traits>
int64_t partial_bytes(int64_t items, int64_t parts) {
    constexpr int64_t kBytes = sizeof(float) * Traits::kRanks * Traits::kTileTokens * Traits::kTileFeatures;
    return parts == 1 ? 0 : parts * items * kBytes;
}

// For the kernel that computes the parts.
inline DdsArguments without_epilogue(DdsArguments arguments) {
    arguments.bias = nullptr;
    arguments.has_residual = false;
    return arguments;
}

template <class Traits>
cudaError_t reduce_parts(const DdsArguments& arguments, int64_t items, void* stream) {
    return launch_early<dds_reduce<Traits>, sizeof(ReduceShared<Traits>)>(
        arguments, items * Traits::kRanks * Traits::kWarpgroups, 128, stream);
}

}  // namespace ts::sm90
