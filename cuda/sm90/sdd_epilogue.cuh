// Stores of an sdd kernel: sums go into the blocks of values, or as partial sums into the workspace.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "common/epilogue.cuh"
#include "sm90/exchange.cuh"
#include "sm90/sdd_traits.cuh"
#include "tma/partial_sums.cuh"

namespace ts::sm90 {

// Buffers of half a tile's results for TMA: a unit's address, and the distance to the next one's.
struct StagedResults {
    char* first;
    int distance;
    __device__ char* unit(int index) const { return first + index * distance; }
};

// Stores what one thread of a warpgroup holds of its half of a tile. Sums lie as wgmma leaves them: four for
// each 8 columns, two neighbours in each of two lines that are 8 apart.
template <class Traits>
class SddEpilogue {
    using Result = typename Traits::Result;

  public:
    __device__ SddEpilogue(const SddArguments& arguments, const StripPlan& plan, int index, int half)
        : arguments_(arguments), plan_(plan) {
        const SddTile tile = plan.tile(index);
        const int window = Traits::kWindow >> arguments.unit_shift;
        units_ = plan.units() + 2 * window * index + tile.window(half);
        slots_ = plan.slots + (2 * index + half) * window * plan.unit_blocks();
        feature_ = tile.strip(half);
        line_ = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        swapped_ = tile.is_swapped();
    }

    // `first`: column of the window at which these sums begin. They change where they are added to values.
    template <int kCount>
    __device__ void store(float (&sums)[kCount], int first) const {
        if constexpr (sizeof(Result) == sizeof(float)) {
            store_pairs(sums, first);
        } else {
            if (arguments_.accumulate) add_stored(sums, first);
            if (swapped_)
                store_columns(sums, first);
            else
                store_lines(sums, first);
        }
    }

    // The sums of a half of wide blocks, quarter by quarter of a block, which TMA stores from `place` while
    // the warpgroup goes on.
    __device__ void store_through(const StagedResults& place, const float (&sums)[kSums]) const {
        constexpr int kUnits = Traits::kWindow / kStripFeatures;
        const bool leads = threadIdx.x % 128 == 0;
        int slots[kUnits];
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) slots[unit] = slots_[unit];
        if (leads) cute::tma_store_wait<0>();  // the results before these have left
        wait_for_warpgroup();
        if (swapped_)
            put_all<true>(place, sums);
        else
            put_all<false>(place, sums);
        cute::tma_store_fence();
        wait_for_warpgroup();
        if (!leads) return;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int of_strip = feature_ % kWideBlock, of_unit = unit * kStripFeatures % kWideBlock;
            if (slots[unit] >= 0)
                cute::SM90_TMA_STORE_2D::copy(&arguments_.blocks, place.unit(unit),
                                              swapped_ ? of_strip : of_unit,
                                              slots[unit] * kWideBlock + (swapped_ ? of_unit : of_strip));
        }
        cute::tma_store_arrive();
    }

  private:
    __device__ static void wait_for_warpgroup() { cutlass::arch::NamedBarrier::sync(128, threadIdx.x / 128); }

    // In lines of 128 bytes swizzled as TMA expects them, 64 for each unit.
    template <bool kSwapped>
    __device__ static void put_all(const StagedResults& place, const float (&sums)[kSums]) {
        using Copy = std::conditional_t<kSwapped, cute::SM90_U16x8_STSM_T, cute::SM90_U32x4_STSM_N>;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
        for (int i = 0; i < kSums / 8; ++i) {
            uint32_t words[4];  // 8 x 8 each: 16 of the strip's lines by 16 columns
#pragma unroll
            for (int q = 0; q < 4; ++q)
                words[q] = rounded<Result>(sums[8 * i + 2 * q], sums[8 * i + 2 * q + 1]);
            const int of_strip = 16 * warp + 8 * (lane / 8 % 2), of_unit = 16 * (i % 4) + 8 * (lane / 16);
            const int line = (kSwapped ? of_unit : of_strip) + lane % 8;
            const int eighth = (kSwapped ? of_strip : of_unit) / 8 ^ lane % 8;
            char* const at = place.unit(i / 4) + 128 * line + 16 * eighth;
            Copy::copy(words[0], words[1], words[2], words[3], *reinterpret_cast<cute::uint128_t*>(at));
        }
    }

    template <int kCount>
    __device__ void add_stored(float (&sums)[kCount], int first) const {
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            asm volatile("" ::: "memory");
            const int line = line_ + 8 * (i % 2), column = first + 8 * (i / 2) + 2 * (threadIdx.x % 4);
            const Result* const stored = target(line, column);
            if (stored == nullptr) continue;
            sums[2 * i] += to_float(stored[0]);
            sums[2 * i + 1] += to_float(stored[swapped_ ? 1 << arguments_.col_shift : 1]);
        }
    }

    // Stores float32. Four lanes hold 8 columns of a line, a sector of 32 bytes. Where lines are of x, two of
    // their lanes change a pair of columns for a pair of lines, which are neighbours in memory. All that is
    // added is read before anything is written: memory is waited for once.
    template <int kCount>
    __device__ void store_pairs(float (&sums)[kCount], int first) const {
        constexpr int kPlaces = kCount / 8;  // 16 lines by 16 columns, which no block is smaller than
        // Keeps all that reads them behind the wait for the products, as it is written.
#pragma unroll
        for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(sums[i]);
        const int upper = swapped_ ? threadIdx.x / 4 % 2 : 0;
        if (swapped_) {
#pragma unroll
            for (int i = 0; i < kCount / 2; ++i) exchange_sums(sums[2 * i], sums[2 * i + 1]);
        }
        const int of_lines = swapped_ ? 8 : 8 << arguments_.col_shift;
        const int of_columns = swapped_ ? 8 << arguments_.col_shift : 8;
        Result* to[kPlaces];
#pragma unroll
        for (int i = 0; i < kPlaces; ++i)
            to[i] = target(line_ - upper, first + 16 * i + 2 * (threadIdx.x % 4) + upper);
        const auto for_all = [&](auto action) {
#pragma unroll
            for (int i = 0; i < kPlaces; ++i) {
                if (to[i] == nullptr) continue;
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    Result* const pair = to[i] + q / 2 * of_columns + q % 2 * of_lines;
                    action(*reinterpret_cast<float2*>(pair), sums[8 * i + 2 * q], sums[8 * i + 2 * q + 1]);
                }
            }
        };
        if (arguments_.accumulate)
            for_all([](const float2& stored, float& sum, float& next) {
                sum += stored.x;
                next += stored.y;
            });
        for_all([](float2& stored, float sum, float next) { stored = make_float2(sum, next); });
    }

    // Four lanes hold 32 columns of a line. Each of them stores eight neighbours, which it gets from the
    // others. Where they go is found first for all: memory is waited for once.
    template <int kCount>
    __device__ void store_lines(const float (&sums)[kCount], int first) const {
        Result* to[kCount / 16];
#pragma unroll
        for (int i = 0; i < kCount / 16; ++i) to[i] = target(line_, first + 32 * i + 8 * (threadIdx.x % 4));
#pragma unroll
        for (int i = 0; i < kCount / 8; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int at = 16 * (i / 2) + 2 * (i % 2) + 4 * q;
                words[q] = rounded<Result>(sums[at], sums[at + 1]);
            }
            exchange(words);
            store_chunk(to[i / 2], 8 * (i % 2), words);  // no block has fewer than 16 lines
        }
    }

    // A warp holds 16 columns of 16 lines, where lines are of x. Eight by eight they are transposed.
    template <int kCount>
    __device__ void store_columns(const float (&sums)[kCount], int first) const {
        constexpr int kColumns = 32;  // from one of a lane's targets to the next
        const int eighth = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
        Result* to[2 * kCount / kColumns];
#pragma unroll
        for (int i = 0; i < 2 * kCount / kColumns; ++i)
            to[i] = target(line_ - eighth + 8 * (lane % 2), first + kColumns * i + eighth + 8 * (lane / 2));
#pragma unroll
        for (int i = 0; i < kCount / 8; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int q = 0; q < 4; ++q)
                words[q] = transpose(rounded<Result>(sums[8 * i + 2 * q], sums[8 * i + 2 * q + 1]));
            exchange(words);
            store_chunk(to[i / 2], 16 * (i % 2), words);
        }
    }

    // Transposes 2 x 2 sums over lanes whose lines are neighbours.
    __device__ static void exchange_sums(float& low, float& high) {
        uint32_t words[2] = {__float_as_uint(low), __float_as_uint(high)};
        exchange(words[0], words[1], 4);
        low = __uint_as_float(words[0]);
        high = __uint_as_float(words[1]);
    }

    // `lines`: of the block, further down.
    __device__ void store_chunk(Result* to, int lines, const uint32_t (&words)[4]) const {
        if (to == nullptr) return;
        *reinterpret_cast<uint4*>(to + (lines << arguments_.col_shift)) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }

    // Transposes 8 x 8 elements of which each lane of a warp holds two neighbours of a line.
    __device__ static uint32_t transpose(uint32_t pair) {
        uint32_t result;
        cute::SM75_U32x1_MOVM_T::copy(pair, result);
        return result;
    }

    // The element at some line and column of this half, nullptr if there is none.
    __device__ Result* target(int line, int column) const {
        const int unit_shift = arguments_.unit_shift, row_shift = arguments_.row_shift,
                  col_shift = arguments_.col_shift;
        const int unit = column >> unit_shift, within = column & (1 << unit_shift) - 1;
        // A strip by a unit lies in one block where they are swapped.
        const int block =
            swapped_ ? 0 : (line >> row_shift) * max(1, 1 << unit_shift >> col_shift) + (within >> col_shift);
        const int slot = slots_[unit * plan_.unit_blocks() + block];
        if (slot < 0) return nullptr;
        const int of_strip = feature_ + line, of_unit = units_[unit] + within;
        const int block_line = (swapped_ ? of_unit : of_strip) & (1 << row_shift) - 1;
        const int block_column = (swapped_ ? of_strip : of_unit) & (1 << col_shift) - 1;
        return static_cast<Result*>(arguments_.values) + (int64_t{slot} << row_shift + col_shift) +
               (block_line << col_shift) + block_column;
    }

    const SddArguments& arguments_;
    const StripPlan& plan_;
    const int* units_;
    const int* slots_;
    int feature_;
    int line_;
    bool swapped_;
};

// Adds the partial sums of the tiles that were split, always in the same order. A CTA is a warpgroup for 32
// columns of half a tile.
template <class Traits>
__global__ void __launch_bounds__(128) sdd_reduce(const __grid_constant__ SddArguments arguments) {
    constexpr int kColumns = 32, kVectors = kColumns / 8, kRuns = Traits::kWindow / kColumns;
    const StripPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.teams, arguments.team_size,
                               arguments.may_split);
    cudaGridDependencySynchronize();
    for (int index = blockIdx.x; index < 2 * kRuns * schedule.split_tiles(); index += gridDim.x) {
        const int run = index % kRuns, half = index / kRuns % 2, place = index / kRuns / 2;
        const SddPartials partials = schedule.partials(place);
        float sums[kColumns / 2] = {};
#pragma unroll 4
        for (int number = 0; number < partials.count(); ++number) {
            const float4* const from =
                partial_sums<kSums>(arguments.partial, 2 * int64_t{partials.at(number)} + half);
            add_sums(from + run * kVectors * 128, sums);
        }
        SddEpilogue<Traits>(arguments, plan, schedule.first_split() + place, half)
            .store(sums, kColumns * run);
    }
}

}  // namespace ts::sm90
