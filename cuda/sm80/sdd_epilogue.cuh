// How the sums of an sdd kernel become values.
#pragma once

#include "common/epilogue.cuh"
#include "sm80/sdd_loader.cuh"

namespace ts::sm80 {

// Adds what is stored to two neighbouring sums.
template <class Result, class Sum>
__device__ inline void add_pair(const Result* stored, Pair<Sum>& sum) {
    const auto before = *reinterpret_cast<const Pair<Result>*>(stored);
    sum.first += static_cast<Sum>(before.first);
    sum.second += static_cast<Sum>(before.second);
}

template <class Result, class Sum>
__device__ inline void store_sums(Result* target, const Pair<Sum>& sum) {
    auto& pair = *reinterpret_cast<Pair<Result>*>(target);
    if constexpr (std::is_same_v<Result, Sum>)
        pair = sum;
    else
        pair = {from_float<Result>(sum.first), from_float<Result>(sum.second)};
}

// Stores a warp's sums to the blocks' slots, or as partial sums.
template <class Traits>
__device__ inline void sdd_store(
    const SddArguments& arguments, const PlanView& plan, const SddWork& work,
    const Accumulators<typename Traits::Accumulator, Traits::kMTiles, Traits::kNTiles>& sums, int first_row,
    int first_column, int lane) {
    using Result = typename Traits::Result;
    using Sum = typename Traits::Accumulator;
    const int row_mask = (1 << arguments.row_shift) - 1, col_mask = (1 << arguments.col_shift) - 1;
#pragma unroll
    for (int tile = 0; tile < Traits::kMTiles * Traits::kNTiles; ++tile) {
        const int m = tile / Traits::kNTiles, n = tile % Traits::kNTiles;
        const int row = first_row + 16 * m, column = first_column + 16 * n;
        const int piece = column >> arguments.col_shift, in_group = row >> arguments.row_shift;
        const int slot = __ldg(plan.slots + (work.tile * plan.pieces + piece) * plan.group_rows + in_group);
        if (slot < 0) continue;
        const int64_t block = int64_t{slot} << arguments.row_shift + arguments.col_shift;
        int64_t at[4];
        Pair<Sum> pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int line = (row & row_mask) + i / 2 * 8 + lane / 4;
            const int within = (column & col_mask) + i % 2 * 8 + lane % 4 * 2;
            const auto* pair = sums[m][n][i % 2] + i / 2 * 2;
            at[i] = block + (line << arguments.col_shift) + within;
            pairs[i] = {pair[0], pair[1]};
        }
        if (arguments.parts > 1) {
            Sum* const partial = static_cast<Sum*>(arguments.partial) + work.part * arguments.value_count;
#pragma unroll
            for (int i = 0; i < 4; ++i) store_sums(partial + at[i], pairs[i]);
            continue;
        }
        auto* const values = static_cast<Result*>(arguments.values);
        // All that is added is read before anything is written: memory is waited for once.
        if (arguments.accumulate) {
#pragma unroll
            for (int i = 0; i < 4; ++i) add_pair(values + at[i], pairs[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) store_sums(values + at[i], pairs[i]);
    }
}

// Adds the partial sums of all parts, in their order. There are none where the plan was not the launch's.
template <class Math>
__global__ void sdd_reduce(const __grid_constant__ SddArguments arguments) {
    using Result = typename Math::Result;
    using Sum = typename Math::Accumulator;
    if (arguments.plan->key != arguments.plan_key) return;
    const int64_t pairs = arguments.value_count / 2, stride = int64_t{gridDim.x} * blockDim.x;
    const auto* partial = static_cast<const Pair<Sum>*>(arguments.partial);
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pairs; i += stride) {
        Pair<Sum> sum = partial[i];
        for (int part = 1; part < arguments.parts; ++part) {
            const Pair<Sum> next = partial[part * pairs + i];
            sum.first += next.first;
            sum.second += next.second;
        }
        auto* const values = static_cast<Result*>(arguments.values) + 2 * i;
        if (arguments.accumulate) add_pair(values, sum);
        store_sums(values, sum);
    }
}

}  // namespace ts::sm80
