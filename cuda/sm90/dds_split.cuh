// float32 in two parts of TF32, for kernels that multiply it with its own error.
//
// wgmma reads the upper 19 bits of a word in shared memory. So an activation as it is serves as its first
// part, cut off; the second, what is missing, lies beside it, as much of it as TF32 holds. Of the weight,
// which is split in registers, the first part is rounded: what the two second parts would give, which is left
// out, is below 2^-21 of the product, and as often too small as too large.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

#include "common/tf32.cuh"
#include "sm90/dds_traits.cuh"

namespace ts::sm90 {

// The rest that TF32 cuts off, rounded.
__device__ inline uint32_t cut_off(uint32_t value) {
    constexpr uint32_t kRead = ~0u << 13;
    return round_to_tf32(__uint_as_float(value) - __uint_as_float(value & kRead));
}

// Splits an operand in registers, without conversions, which are slow. The first part is rounded, so that the
// rest, of which products read what TF32 holds, is as often cut off above as below zero. A NaN stays one in
// the rest.
__device__ inline void split_operand(uint32_t (&operand)[4], uint32_t (&rest)[4]) {
    constexpr uint32_t kCut = 1u << 13;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float value = __uint_as_float(operand[i]);
        operand[i] = operand[i] + kCut / 2 & ~(kCut - 1);
        rest[i] = __float_as_uint(value - __uint_as_float(operand[i]));
    }
}

// Some warps, of so many threads: write the second parts of the activations behind the first, stage by stage.
template <class Traits, int kThreads, int kStages>
__device__ void split_input(typename Traits::Shared& shared, const Ring<kStages>& ring, int thread) {
    if constexpr (Traits::kSplitsInput) {
        const int lane = thread % 32;
        typename Ring<Traits::Schedule::kQueue>::Position next;
        typename Ring<kStages>::Position position;
        while (true) {
            const auto work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            for (int step = 0; step < work.steps; ++step) {
                ring.wait_full(position);
                const auto* const from =
                    reinterpret_cast<const uint4*>(shared.input[position.stage]) + thread;
                auto* const to =
                    reinterpret_cast<uint4*>(shared.input[position.stage] + Traits::kInputBytes) + thread;
#pragma unroll 4
                for (int i = 0; i < Traits::kInputBytes / 16; i += kThreads) {
                    const uint4 words = from[i];
                    to[i] = {cut_off(words.x), cut_off(words.y), cut_off(words.z), cut_off(words.w)};
                }
                cutlass::arch::fence_view_async_shared();
                __syncwarp();
                if (lane == 0) shared.split[position.stage].arrive();
                position.advance();
            }
        }
    }
}

}  // namespace ts::sm90
