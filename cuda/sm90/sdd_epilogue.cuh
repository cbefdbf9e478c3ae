// Where the sums of an sdd kernel go: into the blocks of values, or as partial sums into the workspace.
#pragma once

#include "common/epilogue.cuh"
#include "sm90/sdd_traits.cuh"

namespace ts::sm90 {

// Stores what one thread of a warpgroup holds of its half of a tile. Sums lie as wgmma leaves them: four for
// each 8 columns, two neighbours in each of two lines that are 8 apart.
template <class Traits>
class SddEpilogue {
    using Element = typename Traits::Element;
    using Math = typename Traits::Math;

  public:
    __device__ SddEpilogue(const SddArguments& arguments, const SddPlan& plan, int index, int half)
        : arguments_(arguments), plan_(plan) {
        const SddTile tile = plan.tile(index);
        const int window = Traits::kWindow >> arguments.unit_shift;
        units_ = plan.units + 2 * window * index + tile.window(half);
        slots_ = plan.slots + (2 * index + half) * window * plan.parts;
        feature_ = tile.strip(half);
        line_ = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    }

    // `first`: column of the window at which these sums begin.
    template <int kCount>
    __device__ void store(const float (&sums)[kCount], int first) const {
#pragma unroll
        for (int i = 0; i < kCount / 16; ++i) {
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                asm volatile("" ::: "memory");
                store_line(sums + 16 * i + 2 * below, line_ + 8 * below, first + 32 * i);
            }
        }
    }

  private:
    // 32 columns of a line that four lanes hold. Each of them stores eight neighbours, which it gets from the
    // others.
    __device__ void store_line(const float* sums, int line, int column) const {
        const int lane = threadIdx.x % 4;
        uint32_t words[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            float2 sum = make_float2(sums[4 * q], sums[4 * q + 1]);
            if (arguments_.accumulate) add_stored(sum, target(line, column + 8 * q), 2 * lane);
            const auto rounded = Math::round(sum.x, sum.y);
            words[q] = reinterpret_cast<const uint32_t&>(rounded);
        }
        exchange(words[0], words[1], 1);
        exchange(words[2], words[3], 1);
        exchange(words[0], words[2], 2);
        exchange(words[1], words[3], 2);
        Element* const to = target(line, column + 8 * lane);
        if (to != nullptr) *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ static void add_stored(float2& sum, const Element* chunk, int offset) {
        if (chunk == nullptr) return;
        sum.x += to_float(chunk[offset]);
        sum.y += to_float(chunk[offset + 1]);
    }

    // Transposes 2 x 2 words over lanes whose numbers differ in one bit.
    __device__ static void exchange(uint32_t& low, uint32_t& high, int bit) {
        const bool upper = threadIdx.x & bit;
        const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, bit);
        (upper ? low : high) = other;
    }

    // Eight elements of the block at some line and column of this half, nullptr if there is none.
    __device__ Element* target(int line, int column) const {
        const int unit_shift = arguments_.unit_shift, row_shift = arguments_.row_shift,
                  col_shift = arguments_.col_shift;
        const int unit = column >> unit_shift, within = column & (1 << unit_shift) - 1;
        const int part = (line >> row_shift) * max(1, 1 << unit_shift >> col_shift) + (within >> col_shift);
        const int slot = slots_[unit * plan_.parts + part];
        if (slot < 0) return nullptr;
        const int block_line = (feature_ + line) & (1 << row_shift) - 1;
        const int block_column = (units_[unit] + within) & (1 << col_shift) - 1;
        return static_cast<Element*>(arguments_.values) + (int64_t{slot} << row_shift + col_shift) +
               (block_line << col_shift) + block_column;
    }

    const SddArguments& arguments_;
    const SddPlan& plan_;
    const int* units_;
    const int* slots_;
    int feature_;
    int line_;
};

// Partial sums: each thread's in pieces of 16 bytes, those of a warpgroup side by side.
template <class Traits>
__device__ inline float4* partial_sums(const SddArguments& arguments, int partial, int half) {
    return arguments.partial + (2 * int64_t{partial} + half) * (kSums / 4 * 128) + threadIdx.x % 128;
}

template <class Traits>
__device__ inline void store_partial(float4* to, const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i)
        to[128 * i] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
}

// Adds the partial sums of the tiles that were split, always in the same order. A CTA is a warpgroup for 32
// columns of half a tile.
template <class Traits>
__global__ void __launch_bounds__(128) sdd_reduce(const __grid_constant__ SddArguments arguments) {
    constexpr int kColumns = 32, kPieces = kColumns / 8, kParts = Traits::kWindow / kColumns;
    const SddPlan plan(arguments.plan);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.ctas);
    for (int index = blockIdx.x; index < 2 * kParts * schedule.split_tiles(); index += gridDim.x) {
        const int part = index % kParts, half = index / kParts % 2;
        const int4 partials = schedule.partials(index / kParts / 2);
        float sums[kColumns / 2] = {};
#pragma unroll 4
        for (int split = 0; split < partials.w; ++split) {
            const float4* const from =
                partial_sums<Traits>(arguments, partials.y + split * partials.z, half) + part * kPieces * 128;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const float4 next = __ldcs(from + 128 * i);
                sums[4 * i] += next.x;
                sums[4 * i + 1] += next.y;
                sums[4 * i + 2] += next.z;
                sums[4 * i + 3] += next.w;
            }
        }
        SddEpilogue<Traits>(arguments, plan, partials.x, half).store(sums, kColumns * part);
    }
}

}  // namespace ts::sm90
