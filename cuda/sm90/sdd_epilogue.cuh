// Where the sums of an sdd kernel go: into the blocks of values, or as partial sums into the workspace.
#pragma once

#include <cute/arch/copy_sm75.hpp>

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
        swapped_ = tile.is_swapped();
    }

    // `first`: column of the window at which these sums begin.
    template <int kCount>
    __device__ void store(const float (&sums)[kCount], int first) const {
        if (swapped_)
            store_swapped(sums, first);
        else
            store_straight(sums, first);
    }

  private:
    template <int kCount>
    __device__ void store_straight(const float (&sums)[kCount], int first) const {
#pragma unroll
        for (int i = 0; i < kCount / 16; ++i) {
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                asm volatile("" ::: "memory");
                store_line(sums + 16 * i + 2 * below, line_ + 8 * below, first + 32 * i);
            }
        }
    }

    // Lines are features of x, columns are features of y.
    template <int kCount>
    __device__ void store_swapped(const float (&sums)[kCount], int first) const {
#pragma unroll
        for (int i = 0; i < kCount / 8; ++i) {
            asm volatile("" ::: "memory");
            store_columns(sums + 8 * i, first + 16 * i);
        }
    }

    // 16 columns of 16 lines that a warp holds, eight by eight. Transposed they are like lines of 32 columns.
    __device__ void store_columns(const float* sums, int column) const {
        const int line = line_ - threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
        uint32_t words[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            float2 sum = make_float2(sums[2 * q], sums[2 * q + 1]);
            if (arguments_.accumulate) {
                const int x = line_ + 8 * (q % 2), y = column + 8 * (q / 2) + 2 * lane;
                add_stored(sum, swapped_target(x, y), swapped_target(x, y + 1));
            }
            const auto rounded = Math::round(sum.x, sum.y);
            words[q] = transpose(reinterpret_cast<const uint32_t&>(rounded));
        }
        exchange(words);
        store_chunk(swapped_target(line + 8 * (lane % 2), column + 8 * (lane / 2) + threadIdx.x % 32 / 4),
                    words);
    }

    // 32 columns of a line that four lanes hold. Each of them stores eight neighbours, which it gets from the
    // others.
    __device__ void store_line(const float* sums, int line, int column) const {
        const int lane = threadIdx.x % 4;
        uint32_t words[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            float2 sum = make_float2(sums[4 * q], sums[4 * q + 1]);
            if (arguments_.accumulate) {
                const Element* const pair = target(line, column + 8 * q + 2 * lane);
                add_stored(sum, pair, pair + 1);
            }
            const auto rounded = Math::round(sum.x, sum.y);
            words[q] = reinterpret_cast<const uint32_t&>(rounded);
        }
        exchange(words);
        store_chunk(target(line, column + 8 * lane), words);
    }

    __device__ static void store_chunk(Element* to, const uint32_t (&words)[4]) {
        if (to != nullptr) *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ static void add_stored(float2& sum, const Element* x, const Element* y) {
        if (x == nullptr) return;
        sum.x += to_float(*x);
        sum.y += to_float(*y);
    }

    // Transposes 8 x 8 elements of which each lane of a warp holds two neighbours of a line.
    __device__ static uint32_t transpose(uint32_t pair) {
        uint32_t result;
        cute::SM75_U32x1_MOVM_T::copy(pair, result);
        return result;
    }

    // Transposes 4 x 4 words of four lanes.
    __device__ static void exchange(uint32_t (&words)[4]) {
        exchange(words[0], words[1], 1);
        exchange(words[2], words[3], 1);
        exchange(words[0], words[2], 2);
        exchange(words[1], words[3], 2);
    }

    // Transposes 2 x 2 words over lanes whose numbers differ in one bit.
    __device__ static void exchange(uint32_t& low, uint32_t& high, int bit) {
        const bool upper = threadIdx.x & bit;
        const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, bit);
        (upper ? low : high) = other;
    }

    // The element at some line and column of this half, and those of the block right of it; nullptr if there
    // is none.
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

    // The same where lines are of x. Blocks are larger than strips and units.
    __device__ Element* swapped_target(int line, int column) const {
        const int row_shift = arguments_.row_shift, col_shift = arguments_.col_shift;
        const int unit = column >> arguments_.unit_shift, within = column & (1 << arguments_.unit_shift) - 1;
        const int slot = slots_[unit];
        if (slot < 0) return nullptr;
        const int block_line = (units_[unit] + within) & (1 << row_shift) - 1;
        const int block_column = (feature_ + line) & (1 << col_shift) - 1;
        return static_cast<Element*>(arguments_.values) + (int64_t{slot} << row_shift + col_shift) +
               (block_line << col_shift) + block_column;
    }

    const SddArguments& arguments_;
    const SddPlan& plan_;
    const int* units_;
    const int* slots_;
    int feature_;
    int line_;
    bool swapped_;
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
    cudaGridDependencySynchronize();
    for (int index = blockIdx.x; index < 2 * kParts * schedule.split_tiles(); index += gridDim.x) {
        const int part = index % kParts, half = index / kParts % 2;
        const int place = index / kParts / 2, count = schedule.count(place);
        float sums[kColumns / 2] = {};
#pragma unroll 4
        for (int number = 0; number < count; ++number) {
            const float4* const from =
                partial_sums<Traits>(arguments, schedule.partial(place, number), half) + part * kPieces * 128;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const float4 next = __ldcs(from + 128 * i);
                sums[4 * i] += next.x;
                sums[4 * i + 1] += next.y;
                sums[4 * i + 2] += next.z;
                sums[4 * i + 3] += next.w;
            }
        }
        SddEpilogue<Traits>(arguments, plan, schedule.tile(place), half).store(sums, kColumns * part);
    }
}

}  // namespace ts::sm90
