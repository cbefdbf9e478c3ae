// Barriers in shared memory, rings of stages guarded by them, and copies that complete on them.
#pragma once

#include <cstdint>

#include <cudaTypedefs.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

namespace ts::tma {

constexpr int kRangeRows = 1 << 30;  // see encode_ranges

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// Waits for a phase. CUTLASS's wait lets the compiler move memory accesses across it.
__device__ inline void wait(const Barrier& barrier, uint32_t parity) {
    barrier.wait(parity);
    asm volatile("" ::: "memory");
}

// A position in a ring of stages and the parity of its current round.
template <int kStages>
struct RingPosition {
    int stage = 0;
    uint32_t parity = 0;

    // `stages`: of those there are, if not all are used.
    __device__ void advance(int stages = kStages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    // By some steps, in a ring of so many.
    template <int kUsed = kStages>
    __device__ void skip(int steps) {
        const int all = stage + steps;
        stage = all % kUsed;
        parity ^= all / kUsed & 1;
    }
};

// Full and empty barriers of a ring of stages, in shared memory.
template <int kStages>
struct Ring {
    using Position = RingPosition<kStages>;
    Barrier full[kStages];
    Barrier empty[kStages];

    // `releases`: arrivals that make a stage empty. One makes it full, beside the bytes.
    __device__ void init(int releases) {
        for (int stage = 0; stage < kStages; ++stage) {
            full[stage].init(1);
            empty[stage].init(releases);
        }
    }
    __device__ void wait_full(Position at) const { wait(full[at.stage], at.parity); }
    __device__ void wait_empty(Position at) const { wait(empty[at.stage], at.parity ^ 1); }

    // Waits until all are empty, from the stage on that would be filled next, of so many: before a CTA ends
    // nobody in its cluster may still have to release one.
    __device__ void wait_all_empty(Position at, int stages = kStages) const {
        for (int i = 0; i < stages; ++i, at.advance(stages)) wait_empty(at);
    }
};

// Begins a kernel: one thread sets barriers up by `init`, for all of the cluster, which may arrive at them
// after cute::cluster_wait(). Nothing else is waited for: a barrier that releases what was written takes half
// a microsecond.
template <class Init>
__device__ void set_up(Init init) {
    if (threadIdx.x == 0) {
        init();
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_arrive_relaxed();
}

// Which CTAs of a cluster receive a copy.
struct Multicast {
    uint16_t mask;
    __device__ bool many() const { return (mask & (mask - 1)) != 0; }
};

constexpr uint64_t kNormalPriority = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

// Asks for what a copy needs to know, which lies in memory before the first of a launch.
__device__ inline void prefetch(const CUtensorMap* map) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(map));
}

__device__ inline void load_box(const void* map, const Barrier& barrier, Multicast to, void* target, int x,
                                int y) {
    auto* const signal = reinterpret_cast<uint64_t*>(const_cast<Barrier*>(&barrier));
    if (to.many())
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(map, signal, to.mask, kNormalPriority, target, x, y);
    else
        cute::SM90_TMA_LOAD_2D::copy(map, signal, kNormalPriority, target, x, y);
}

__device__ inline void load_box(const void* map, const Barrier& barrier, Multicast to, void* target, int x,
                                int y, int z) {
    auto* const signal = reinterpret_cast<uint64_t*>(const_cast<Barrier*>(&barrier));
    if (to.many())
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, signal, to.mask, kNormalPriority, target, x, y, z);
    else
        cute::SM90_TMA_LOAD_3D::copy(map, signal, kNormalPriority, target, x, y, z);
}

// Loads by a map of encode_ranges() the box of rows from `row` on, of which the range has `rows` more.
__device__ inline void load_range_box(const void* map, const Barrier& barrier, void* target, int x, int row,
                                      int rows) {
    auto* const signal = reinterpret_cast<uint64_t*>(const_cast<Barrier*>(&barrier));
    const int all = kRangeRows;
    cute::SM90_TMA_LOAD_4D::copy(map, signal, kNormalPriority, target, x, all - rows, row + rows, all);
}
__device__ inline void store_range_box(const void* map, const void* source, int x, int row, int rows) {
    const int all = kRangeRows;
    cute::SM90_TMA_STORE_4D::copy(map, source, x, all - rows, row + rows, all);
}

// Bytes that lie one after another, in multiples of 16.
__device__ inline void load_bytes(const void* from, const Barrier& barrier, Multicast to, void* target,
                                  int bytes) {
    if (to.many())
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1], %2, [%3], %4;" ::"r"(cute::cast_smem_ptr_to_uint(target)),
            "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(&barrier)), "h"(to.mask)
            : "memory");
    else
        cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(const_cast<Barrier*>(&barrier)),
                                       target, bytes);
}

}  // namespace ts::tma
