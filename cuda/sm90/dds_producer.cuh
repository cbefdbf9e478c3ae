// The warps that fill the rings of a dds kernel through TMA.
#pragma once

#include "sm90/dds_traits.cuh"

namespace ts::sm90 {

template <class Traits>
struct DdsProducer {
    using Weight = typename Traits::Weight;

    const DdsArguments& arguments;
    typename Traits::Shared& shared;
    const DdsPlan& plan;
    int rank;  // of the CTA in its cluster
    int lane;
    bool elected;  // the one lane that starts copies, from values that all lanes have

    // One warp: the activations.
    template <bool kRowMajorInput>
    __device__ void load_input() const {
        typename Ring<Traits::Schedule::kQueue>::Position next;
        typename Ring<Traits::kInputStages>::Position position;
        const int piece = min(lane, plan.pieces - 1), width = Traits::kStep / plan.pieces;
        while (true) {
            const Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            const int token = Traits::first_token(work, rank);
            InputStep next_step = input_step(work.step, piece, work.steps > 0);
            for (int step = work.step; step < work.step + work.steps; ++step) {
                const auto [mask, k, other_k] = next_step;
                next_step = input_step(step + 1, piece, step + 1 < work.step + work.steps);
                const Multicast to = receivers(step, k, other_k);
                shared.input_ring.wait_empty(position);
                const Barrier& full = shared.input_ring.full[position.stage];
                if (elected) full.arrive_and_expect_tx(mask != 0 ? Traits::kInputBytes : 0);
                if (mask != 0 && to.mask != 0)
                    for (int i = 0; i < plan.pieces; ++i)
                        load_piece<kRowMajorInput>(
                            full, to, shared.input[position.stage] + i * width * Traits::kTileTokens * 2,
                            __shfl_sync(~0u, k, i), width, token);
                __syncwarp();
                position.advance();
            }
        }
    }

    // One warp for each warpgroup: the weight of its 64 features.
    __device__ void load_weight(int warpgroup) const {
        const int rows = arguments.warpgroup_rows;
        const int piece = lane / rows, row = lane % rows;
        const bool active = piece < plan.pieces;
        // A block wider than a warpgroup is shared by both.
        const int in_group = arguments.row_block > Traits::kWarpgroupFeatures ? 0 : warpgroup * rows + row;
        const int feature =
            arguments.row_block > Traits::kWarpgroupFeatures ? warpgroup * Traits::kWarpgroupFeatures : 0;
        const bool loads = Traits::kTokenRanks == 1 || warpgroup % Traits::kTokenRanks == rank;
        const Multicast to{Traits::kTokenRanks == 1 ? uint16_t{1} : Traits::kAllRanks};
        const int offset = Weight::offset(arguments, row, piece);
        typename Ring<Traits::Schedule::kQueue>::Position next;
        typename Ring<Traits::kWeightStages>::Position position;
        while (true) {
            const Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            const auto read = [&](int step) -> WeightStep {
                if (step == work.step + work.steps) return {};
                const int at = Traits::plan_index(step, rank) * plan.pieces + piece;
                return {__ldg(plan.masks + Traits::plan_index(step, rank)),
                        active ? __ldg(plan.slots + at * plan.group_rows + in_group) : -1,
                        active ? __ldg(plan.k + at) : 0};
            };
            WeightStep next_step = read(work.step);
            for (int step = work.step; step < work.step + work.steps; ++step) {
                const auto [mask, slot, column] = next_step;
                next_step = read(step + 1);
                if ((mask >> 16 * warpgroup & 0xffff) == 0) continue;
                const int k = slot < 0 ? 0 : column & arguments.k_block - 1;
                shared.weight_ring[warpgroup].wait_empty(position);
                const Barrier& full = shared.weight_ring[warpgroup].full[position.stage];
                if (elected) full.arrive_and_expect_tx(Weight::kBoxBytes);
                if (loads) {
                    const auto [x, y] = Weight::corner(arguments, slot, feature, k);
                    for (int i = 0; i < rows * plan.pieces; ++i)
                        load_block(full, to,
                                   shared.weight[warpgroup][position.stage] + __shfl_sync(~0u, offset, i),
                                   __shfl_sync(~0u, x, i), __shfl_sync(~0u, y, i));
                }
                Weight::load_others(arguments, full, shared.weight[warpgroup][position.stage], slot, feature,
                                    k, lane);
                __syncwarp();
                position.advance();
            }
        }
    }

  private:
    // What the plan says of a step, read one step ahead.
    struct InputStep {
        int mask;
        int k;        // of the lane's piece
        int other_k;  // for the other CTA, if they differ in block rows
    };
    __device__ InputStep input_step(int step, int piece, bool exists) const {
        if (!exists) return {};
        const int at = Traits::plan_index(step, rank) * plan.pieces + piece;
        const int other = Traits::plan_index(step, rank ^ 1) * plan.pieces + piece;
        return {__ldg(plan.masks + Traits::plan_index(step, rank)), __ldg(plan.k + at),
                Traits::kRowRanks > 1 ? __ldg(plan.k + other) : 0};
    }
    struct WeightStep {
        int mask;
        int slot;  // of the lane's block
        int k;
    };

    // Steps that both CTAs walk in the same columns are loaded by one of them, in turn.
    __device__ Multicast receivers(int step, int k, int other_k) const {
        if (Traits::kRowRanks == 1) return {uint16_t{1}};
        const bool same = __all_sync(~0u, k == other_k);
        if (!same) return {static_cast<uint16_t>(1 << rank)};
        return {step % Traits::kRowRanks == rank ? Traits::kAllRanks : uint16_t{0}};
    }

    __device__ void load_block(const Barrier& full, Multicast to, char* target, int x, int y) const {
        if (elected) Weight::load(arguments, full, to, target, make_int2(x, y));
    }

    // All tokens of one piece's k, zero where there is none.
    template <bool kRowMajorInput>
    __device__ void load_piece(const Barrier& full, Multicast to, char* target, int k, int width,
                               int token) const {
        if (!elected) return;
        if (k < 0) k = arguments.k_size;
        constexpr int kAtom = 64;  // tokens that lie side by side
        if (kRowMajorInput) {
            load_box(&arguments.input, full, to, target, k, token);
        } else if (token + Traits::kTileTokens <= arguments.tokens) {
            load_box(&arguments.input, full, to, target, 0, k, token / kAtom);
        } else {
            for (int i = 0; i < Traits::kTileTokens / kAtom; ++i)
                load_box(&arguments.input_tail, full, to, target + i * kAtom * width * 2, token + i * kAtom,
                         k);
        }
    }
};

}  // namespace ts::sm90
