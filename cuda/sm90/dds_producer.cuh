// The warps that fill the rings of a dds kernel through TMA.
#pragma once

#include "sm90/dds_traits.cuh"

namespace ts::sm90 {

template <class Traits>
struct DdsProducer {
    const DdsArguments& arguments;
    typename Traits::Shared& shared;
    const DdsPlan& plan;
    int rank;  // of the CTA in its cluster
    int lane;

    __device__ int row_rank() const { return Traits::kRowRanks > 1 ? rank : 0; }
    __device__ int token_rank() const { return Traits::kTokenRanks > 1 ? rank : 0; }
    __device__ int step_index(int step) const { return step * Traits::kRowRanks + row_rank(); }

    // One warp: the activations.
    template <bool kRowMajorInput>
    __device__ void load_input() const {
        typename Ring<Schedule::kQueue>::Position next;
        typename Ring<Traits::kInputStages>::Position position;
        const int piece = min(lane, plan.pieces - 1);
        while (true) {
            const Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            const int token = (work.unit * Traits::kTokenRanks + token_rank()) * Traits::kTileTokens;
            for (int step = work.step; step < work.step + work.steps; ++step) {
                const int mask = __ldg(plan.masks + step_index(step));
                const int k = __ldg(plan.k + step_index(step) * plan.pieces + piece);
                const Multicast to = receivers(step, k);
                shared.input_ring.wait_empty(position);
                const Barrier& full = shared.input_ring.full[position.stage];
                if (lane == 0) {
                    shared.present[position.stage] = ((mask & 0xffff) != 0) | ((mask & ~0xffff) != 0) << 1;
                    if (mask != 0)
                        full.arrive_and_expect_tx(Traits::kInputBytes);
                    else
                        full.arrive();
                }
                __syncwarp();
                if (mask != 0 && to.mask != 0 && lane < plan.pieces)
                    load_piece<kRowMajorInput>(full, to, shared.input[position.stage], piece,
                                               k < 0 ? arguments.k_size : k, token);
                __syncwarp();
                position.advance();
            }
        }
    }

    // One warp for each warpgroup: the weight of its 64 features.
    __device__ void load_weight(int group) const {
        const int parts = max(1, Traits::kGroupFeatures / arguments.row_block);  // blocks across the features
        const int piece = lane / parts, part = lane % parts;
        const bool active = piece < plan.pieces;
        // A block wider than a warpgroup is shared by both.
        const int plan_group = arguments.row_block > Traits::kGroupFeatures ? 0 : group * parts + part;
        const int feature = arguments.row_block > Traits::kGroupFeatures ? group * Traits::kGroupFeatures : 0;
        const bool loads = Traits::kTokenRanks == 1 || group % Traits::kTokenRanks == rank;
        const Multicast to{Traits::kTokenRanks == 1 ? uint16_t{1} : Traits::kAllRanks};
        const int k_width = min(arguments.k_block, Traits::kStep);
        const int line = 2 * (Traits::kTransposed ? min(arguments.row_block, Traits::kGroupFeatures) : k_width);
        const int offset = Traits::kTransposed
                               ? (part * Traits::kStep + piece * k_width) * line
                               : (piece * Traits::kGroupFeatures + part * arguments.row_block) * line;
        typename Ring<Schedule::kQueue>::Position next;
        typename Ring<Traits::kWeightStages>::Position position;
        while (true) {
            const Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            for (int step = work.step; step < work.step + work.steps; ++step) {
                const int mask = __ldg(plan.masks + step_index(step)) >> 16 * group & 0xffff;
                if (mask == 0) continue;
                const int at = step_index(step) * plan.pieces + piece;
                const int slot = active ? __ldg(plan.slots + at * plan.groups + plan_group) : -1;
                const int k = active ? __ldg(plan.k + at) & arguments.k_block - 1 : 0;
                shared.weight_ring[group].wait_empty(position);
                const Barrier& full = shared.weight_ring[group].full[position.stage];
                if (lane == 0) full.arrive_and_expect_tx(Traits::kWeightBytes);
                __syncwarp();
                if (active && loads) {
                    // An absent block reads as zero, being outside of the values.
                    const int first = slot < 0 ? static_cast<int>(arguments.value_rows)
                                               : slot * (Traits::kTransposed ? arguments.k_block
                                                                             : arguments.row_block);
                    char* const target = shared.weight[group][position.stage] + offset;
                    if (Traits::kTransposed)
                        load_box(&arguments.values, full, to, target, feature, first + k);
                    else
                        load_box(&arguments.values, full, to, target, k, first + feature);
                }
                __syncwarp();
                position.advance();
            }
        }
    }

  private:
    // Steps that both CTAs walk in the same columns are loaded by one of them, in turn.
    __device__ Multicast receivers(int step, int k) const {
        if (Traits::kRowRanks == 1) return {uint16_t{1} };
        const int piece = min(lane, plan.pieces - 1);
        const int other = __ldg(plan.k + (step * Traits::kRowRanks + (rank ^ 1)) * plan.pieces + piece);
        const bool same = __all_sync(~0u, k == other);
        if (!same) return {static_cast<uint16_t>(1 << rank)};
        return {step % Traits::kRowRanks == rank ? Traits::kAllRanks : uint16_t{0}};
    }

    // 256 tokens of one piece's k.
    template <bool kRowMajorInput>
    __device__ void load_piece(const Barrier& full, Multicast to, char* stage, int piece, int k, int token) const {
        const int width = Traits::kStep / plan.pieces;
        char* const target = stage + piece * width * Traits::kTileTokens * 2;
        constexpr int kAtom = 64;  // tokens that lie side by side
        if (kRowMajorInput) {
            load_box(&arguments.input, full, to, target, k, token);
        } else if (token + Traits::kTileTokens <= arguments.tokens) {
            load_box(&arguments.input, full, to, target, 0, k, token / kAtom);
        } else {
            for (int i = 0; i < Traits::kTileTokens / kAtom; ++i)
                load_box(&arguments.input_tail, full, to, target + i * kAtom * width * 2, token + i * kAtom, k);
        }
    }
};

}  // namespace ts::sm90
