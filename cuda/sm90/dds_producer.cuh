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
        const int pieces = plan.pieces, width = Traits::kStep / pieces;
        const int steps_read = kWarpSize / pieces;
        while (true) {
            const typename Traits::Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            const int token = Traits::first_token(work, rank), end = work.step + work.steps;
            const int boxes = Traits::kHalves && !Traits::is_half(work, token) ? 2 : 1;
            const auto read = [&](int first) {
                return input_step(first + lane / pieces, lane % pieces, end);
            };
            InputStep next_steps = read(work.step);
            for (int first = work.step; first < end; first += steps_read) {
                const auto [masks, ks, other_ks] = next_steps;
                next_steps = read(first + steps_read);
                const uint32_t same = __ballot_sync(~0u, ks == other_ks);
                for (int i = 0; i < min(steps_read, end - first); ++i) {
                    const int from = i * pieces, mask = __shfl_sync(~0u, masks, from);
                    const uint32_t all = (1u << pieces) - 1;
                    const Multicast to = receivers(first + i, (same >> from & all) == all);
                    shared.input_ring.wait_empty(position);
                    const Barrier& full = shared.input_ring.full[position.stage];
                    if (elected)
                        full.arrive_and_expect_tx(mask != 0 ? boxes * Traits::kBoxTokens * kStepBytes : 0);
                    if (mask != 0 && to.mask != 0) {
                        if constexpr (Traits::kScaled)
                            load_scales(full, to, position.stage, __shfl_sync(~0u, ks, from), token);
                        for (int piece = 0; piece < pieces; ++piece)
                            load_piece<kRowMajorInput>(
                                full, to, shared.input[position.stage] + piece * width * Traits::kTokenBytes,
                                __shfl_sync(~0u, ks, from + piece), width, token, boxes);
                    }
                    __syncwarp();
                    position.advance();
                }
            }
        }
    }

    // One warp for each warpgroup: the weight of its 64 features.
    __device__ void load_weight(int warpgroup) const {
        const int rows = arguments.warpgroup_rows, boxes = rows * plan.pieces;
        const int steps_read = kWarpSize / boxes;
        const int piece = lane % boxes / rows, row = lane % rows;
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
            const typename Traits::Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            const int end = work.step + work.steps;
            const auto read = [&](int first) -> WeightStep {
                const int step = first + lane / boxes;
                if (step >= end) return {};
                const int at = Traits::plan_index(step, rank) * plan.pieces + piece;
                return {__ldg(plan.masks + Traits::plan_index(step, rank)),
                        __ldg(plan.slots + at * plan.group_rows + in_group), __ldg(plan.k + at)};
            };
            WeightStep next_steps = read(work.step);
            for (int first = work.step; first < end; first += steps_read) {
                const auto [mask, slot, column] = next_steps;
                next_steps = read(first + steps_read);
                const uint32_t present = __ballot_sync(~0u, (mask >> 16 * warpgroup & 0xffff) != 0);
                const int k = slot < 0 ? 0 : column & arguments.k_block - 1;
                const auto [x, y] = Weight::corner(arguments, slot, feature, k);
                float scale = 0;
                if constexpr (Traits::kScaled)
                    if (slot >= 0) scale = __ldg(arguments.scales + slot);
                for (int i = 0; i < min(steps_read, end - first); ++i) {
                    const int from = i * boxes;
                    if ((present >> from & 1) == 0) continue;
                    shared.weight_ring[warpgroup].wait_empty(position);
                    const Barrier& full = shared.weight_ring[warpgroup].full[position.stage];
                    char* const stage = shared.weight[warpgroup][position.stage];
                    if constexpr (Traits::kScaled) {
                        if (lane == from) shared.scales.blocks[warpgroup][position.stage] = scale;
                        __syncwarp();
                    }
                    if (elected) full.arrive_and_expect_tx(Weight::kStageBytes);
                    if (loads)
                        for (int box = 0; box < boxes; ++box)
                            load_block(full, to, stage, __shfl_sync(~0u, offset, box),
                                       __shfl_sync(~0u, x, from + box), __shfl_sync(~0u, y, from + box));
                    __syncwarp();
                    position.advance();
                }
            }
        }
    }

  private:
    static constexpr int kWarpSize = 32;
    static constexpr int kStepBytes =  // of a token
        Traits::kStep * Traits::kInputElementBytes + Traits::kScaleBytes;

    // A step of the plan. Lanes read as many steps as there are lanes for, each one piece or box of
    // one step, while those before them are loaded: the plan may be far away.
    struct InputStep {
        int mask;
        int k;        // of the lane's piece
        int other_k;  // for the other CTA, if they differ in block rows
    };
    __device__ InputStep input_step(int step, int piece, int end) const {
        if (step >= end) return {};
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
    __device__ Multicast receivers(int step, bool same) const {
        if (Traits::kRowRanks == 1) return {uint16_t{1}};
        if (!same) return {static_cast<uint16_t>(1 << rank)};
        return {step % Traits::kRowRanks == rank ? Traits::kAllRanks : uint16_t{0}};
    }

    __device__ void load_block(const Barrier& full, Multicast to, char* stage, int offset, int x,
                               int y) const {
        if (elected) Weight::load(arguments, full, to, stage, offset, make_int2(x, y));
    }

    // Loads the scales of a step's tokens; zero where there is none.
    __device__ void load_scales(const Barrier& full, Multicast to, int stage, int k, int token) const {
        if (elected)
            load_box(&arguments.scales_map, full, to, shared.scales.tokens[stage], token, k / kScaleGroup);
    }

    // All tokens of one piece's k, zero where there is none.
    template <bool kRowMajorInput>
    __device__ void load_piece(const Barrier& full, Multicast to, char* target, int k, int width, int token,
                               int boxes) const {
        if (!elected) return;
        if (k < 0) k = arguments.k_size;
        constexpr int kAtom = 64;  // tokens that lie side by side
        if (kRowMajorInput) {
            load_box(&arguments.input, full, to, target, k, token);
            if (Traits::kHalves && boxes > 1)
                load_box(&arguments.input, full, to,
                         target + Traits::kBoxTokens * width * Traits::kInputElementBytes, k,
                         token + Traits::kBoxTokens);
        } else if (token + Traits::kTileTokens <= arguments.tokens) {
            load_box(&arguments.input, full, to, target, 0, k, token / kAtom);
        } else {
            for (int i = 0; i < Traits::kTileTokens / kAtom; ++i)
                load_box(&arguments.input_tail, full, to,
                         target + i * kAtom * width * Traits::kInputElementBytes, token + i * kAtom, k);
        }
    }
};

}  // namespace ts::sm90
