// dds in parts: where tiles are few, the sums over k are cut, and a second kernel adds them.
#pragma once

#include "sm90/dds_epilogue.cuh"
#include "sm90/dds_traits.cuh"
#include "tma/launch.cuh"
#include "tma/partial_sums.cuh"

namespace ts::sm90 {

// A CTA computes a chunk of the tokens of what a warpgroup of the dds kernel does of one tile.
template <class Traits>
struct ReduceTraits : Traits {
    static constexpr int kAllChunks = 1;
    static constexpr int kChunks = 1;
    static constexpr int kSums = Traits::kSums / Traits::kAllChunks;
};

template <class Traits>
struct ReduceShared {
    alignas(1024) typename DdsEpilogue<Traits>::Buffers output;
    typename DdsEpilogue<Traits>::Arrived residual;
};

// Adds the partial sums of each tile, always in the same order, and makes results of them. It is launched
// while the dds kernel still runs.
template <class Traits>
__global__ void __launch_bounds__(128) dds_reduce(const __grid_constant__ DdsArguments arguments) {
    using Chunk = ReduceTraits<Traits>;
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<ReduceShared<Chunk>*>(memory);
    if (threadIdx.x == 0) {
        for (const Barrier& arrived : shared.residual) arrived.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    const DdsPlan plan(arguments.plan, arguments.plan_key);
    if (!plan.is_own) return cudaGridDependencySynchronize();  // no sums: the dds kernel has said so
    const int chunk = blockIdx.x % Traits::kAllChunks, share = blockIdx.x / Traits::kAllChunks;
    const int warpgroup = share % Traits::kWarpgroups, cta = share / Traits::kWarpgroups;
    const int rank = cta % Traits::kRanks, item = cta / Traits::kRanks;
    const Work work{item / arguments.spans, item % arguments.spans, 0, 0, 0};
    DdsEpilogue<Chunk> epilogue(arguments, shared.output, shared.residual, warpgroup);
    epilogue.prepare(Traits::rows_of(plan, work.tile, rank));
    epilogue.read_bias();
    epilogue.begin(Traits::first_token(work, rank) + chunk * Traits::kChunkTokens);
    const float4* const partial =
        partial_sums<Traits::kSums>(arguments.partial,
                                    partial_place<Traits>(arguments, work, rank, warpgroup)) +
        chunk * (Chunk::kSums / 4 * 128);
    constexpr int64_t kDistance = Traits::kRanks * Traits::kWarpgroups * (Traits::kSums / 4 * 128);
    cudaGridDependencySynchronize();
    typename Chunk::Accumulator sums[Chunk::kSums] = {};
    add_parts(partial, kDistance, arguments.schedule.by_parts.divisor, sums);
    epilogue.store(sums);
    epilogue.finish_stores();
}

// Bytes of the partial sums of that many tiles of a cluster.
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
    return launch_early<dds_reduce<Traits>, sizeof(ReduceShared<ReduceTraits<Traits>>)>(
        arguments, items * Traits::kRanks * Traits::kWarpgroups * Traits::kAllChunks, 128, stream);
}

}  // namespace ts::sm90
