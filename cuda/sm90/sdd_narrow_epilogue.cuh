// Stores of the sdd kernel for blocks of 16 x 16: sums go into the blocks of values, or as partial sums
// into the workspace.
#pragma once

#include "common/epilogue.cuh"
#include "sm90/exchange.cuh"
#include "sm90/sdd_narrow_traits.cuh"
#include "tma/partial_sums.cuh"

namespace ts::sm90 {

// Stores what a lane holds of a block, as mma.sync leaves it: four sums of each 16 features of y by 8 of x,
// two neighbours in each of two lines that are 8 apart.
template <class Traits>
class SddNarrowEpilogue {
    using Result = typename Traits::Result;

  public:
    __device__ SddNarrowEpilogue(const SddNarrowArguments& arguments, int slot)
        : block_(slot < 0 ? nullptr
                          : static_cast<Result*>(arguments.values) +
                                int64_t{slot} * Traits::kBlock * Traits::kBlock),
          line_(threadIdx.x % 32 / 4),
          lane_(threadIdx.x % 4) {}

    __device__ void add_stored(float* sums) const {
        if (block_ == nullptr) return;
        for_pairs([&](int line, int column, int at) {
            const Result* const stored = block_ + line * Traits::kBlock + column;
            sums[at] += to_float(stored[0]);
            sums[at + 1] += to_float(stored[1]);
        });
    }

    // Four lanes hold 16 columns of two lines. Of 16 bits, each of them stores eight neighbours, which it
    // gets from the others.
    __device__ void store(const float* sums) const {
        if (block_ == nullptr) return;
        if constexpr (sizeof(Result) == sizeof(float)) {
            for_pairs([&](int line, int column, int at) {
                *reinterpret_cast<float2*>(block_ + line * Traits::kBlock + column) =
                    make_float2(sums[at], sums[at + 1]);
            });
        } else {
            uint32_t words[4];  // of two lines, of eight columns each
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int at = 4 * (q % 2) + 2 * (q / 2);
                words[q] = rounded<Result>(sums[at], sums[at + 1]);
            }
            exchange(words);
            const int line = line_ + 8 * (lane_ / 2), column = 8 * (lane_ % 2);
            *reinterpret_cast<uint4*>(block_ + line * Traits::kBlock + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

  private:
    // `action`: for the line and column of a pair and where its sums are.
    template <class Action>
    __device__ void for_pairs(Action action) const {
#pragma unroll
        for (int i = 0; i < Traits::kBlockSums / 2; ++i)
            action(line_ + 8 * (i % 2), 8 * (i / 2) + 2 * lane_, 2 * i);
    }

    Result* block_;
    int line_;
    int lane_;
};

// Adds the partial sums of the tiles that were split, always in the same order. A CTA is a warpgroup, for one
// block of each warp.
template <class Traits>
__global__ void __launch_bounds__(128)
    sdd_narrow_reduce(const __grid_constant__ SddNarrowArguments arguments) {
    constexpr int kVectors = Traits::kBlockSums / 4;
    const SddPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.ctas, 1, arguments.may_split);
    cudaGridDependencySynchronize();
    const int parts = Traits::kBlocks * Traits::kGroups;  // of a tile
    for (int index = blockIdx.x; index < parts * schedule.split_tiles(); index += gridDim.x) {
        const int block = index % Traits::kBlocks, group = index / Traits::kBlocks % Traits::kGroups;
        const SddPartials partials = schedule.partials(index / parts);
        const int tile = schedule.first_split() + index / parts;
        float sums[Traits::kBlockSums] = {};
#pragma unroll 4
        for (int number = 0; number < partials.count(); ++number) {
            const float4* const from = partial_sums<Traits::kSums>(
                arguments.partial, int64_t{Traits::kGroups} * partials.at(number) + group);
            add_sums(from + block * kVectors * 128, sums);
        }
        const int warp = 4 * group + static_cast<int>(threadIdx.x) / 32;
        const SddNarrowEpilogue<Traits> epilogue(
            arguments, __ldg(plan.slots + (tile * kListWarps + warp) * Traits::kBlocks + block));
        if (arguments.accumulate) epilogue.add_stored(sums);
        epilogue.store(sums);
    }
}

}  // namespace ts::sm90
