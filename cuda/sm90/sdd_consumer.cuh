// The warpgroups that multiply in the sdd kernel.
#pragma once

#include "sm90/sdd_epilogue.cuh"
#include "sm90/sdd_traits.cuh"

namespace ts::sm90 {

// One warpgroup's products of its half of all tiles.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddConsumer {
    using Sum = typename Traits::Accumulator;

  public:
    __device__ SddConsumer(const SddArguments& arguments, typename Traits::Shared& shared, int rank, int half)
        : arguments_(arguments), shared_(shared), rank_(rank), half_(half), cursor_(arguments) {}

    __device__ void run(const StripPlan& plan, const SddSchedule& schedule) {
        Sum sums[kSums];
        const int team = blockIdx.x / arguments_.team_size, teams = gridDim.x / arguments_.team_size;
        for (int index = team; index < schedule.size(); index += teams) {
            // Skipping what has no steps would make the compiler think that lanes of a warp differ.
            const SddWork work = schedule.work(index, rank_);
            sum_up_tile(sums, plan.tile(work.tile), work.last_step - work.first_step);
            // The other CTA may exit while this one stores.
            const bool is_last = index + teams >= schedule.size();
            if (is_last) cute::cluster_arrive();
            if (work.partial >= 0) {
                cudaTriggerProgrammaticLaunchCompletion();
                store_sums(partial_sums<kSums>(arguments_.partial, 2 * int64_t{work.partial} + half_), sums);
            } else if (Traits::kMayStageResults && work.exists &&
                       (arguments_.stages_results || is_last && arguments_.stages_last)) {
                SddEpilogue<Traits>(arguments_, plan, work.tile, half_)
                    .store_through(place_of_results(), sums);
            } else if (work.exists) {
                SddEpilogue<Traits>(arguments_, plan, work.tile, half_).store(sums, 0);
            }
        }
        if (team >= schedule.size()) cute::cluster_arrive();
        if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();
    }

    // Multiplies the tiles of a grouped product.
    __device__ void run_groups(const StripPlan& plan) {
        Sum sums[kSums];
        typename Traits::Queue::Position position;
        const int lane = threadIdx.x % 32;
        GroupTile work = shared_.queue.pop(position, lane);
        while (work.tile >= 0) {
            const int index = work.tile;
            sum_up_tile(sums, plan.tile(index), work.steps());
            work = shared_.queue.pop(position, lane);
            const SddEpilogue<Traits> epilogue(arguments_, plan, index, half_);
            if (Traits::kMayStageResults && arguments_.stages_results)
                epilogue.store_through(place_of_results(), sums);
            else
                epilogue.store(sums, 0);
        }
        if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();
    }

  private:
    // In the place of the last stage or, where all stages are needed until the end, of this half's strips.
    __device__ StagedResults place_of_results() const {
        if (arguments_.stages_results)
            return {shared_.stages + Traits::kResultsAt + half_ * Traits::kResultBytes, Traits::kStripBytes};
        return {shared_.stages + half_ * Traits::kStripBytes, Traits::kSmallStageBytes};
    }

    __device__ void sum_up_tile(Sum (&sums)[kSums], const SddTile& tile, int steps) {
        cursor_.select(tile.is_large(arguments_.unit_shift));
        const int strip = half_ < tile.strips() ? half_ * Traits::kStripBytes : 0;
        const int window = tile.window(half_) << arguments_.unit_shift;
        sum_up(sums, tile.is_swapped(), strip,
               tile.strips() * Traits::kStripBytes + window * Traits::kFeatureBytes, steps);
    }

    // `strip`, `window`: where they lie in a stage.
    __device__ void sum_up(Sum (&sums)[kSums], bool swapped, int strip, int window, int steps) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
        // Units are as wide as strips where y and x are swapped: with the same layout, they are operands
        // alike.
        if (kRowMajorY == kRowMajorX || !__shfl_sync(~0u, swapped, 0))
            multiply_steps<kRowMajorY, kRowMajorX>(sums, arguments_.y_operand, strip, arguments_.x_operand,
                                                   window, steps);
        else
            multiply_steps<kRowMajorX, kRowMajorY>(sums, arguments_.x_operand, strip, arguments_.y_operand,
                                                   window, steps);
    }

    template <bool kRowMajorStrip, bool kRowMajorUnits>
    __device__ void multiply_steps(Sum (&sums)[kSums], const Operand& strip_operand, int strip,
                                   const Operand& units_operand, int window, int steps) {
        Ring<Traits::kMaxStages>& ring = shared_.rings[cursor_.large];
        int multiplied = -1;
        for (int step = 0; step < steps; ++step) {
            ring.wait_full(cursor_.position);
            const uint32_t stage = cute::cast_smem_ptr_to_uint(shared_.stages) + cursor_.stage_offset();
            multiply_step<typename Traits::template Atom<kRowMajorStrip, kRowMajorUnits>>(
                sums, strip_operand, operand_address(stage + strip), units_operand,
                operand_address(stage + window), true);
            cute::warpgroup_wait<1>();
            if (multiplied >= 0) release(ring, multiplied);
            multiplied = cursor_.position.stage;
            cursor_.advance();
        }
        cute::warpgroup_wait<0>();
        if (multiplied >= 0) release(ring, multiplied);
    }

    // To all CTAs of the team, since any may load for all.
    __device__ void release(const Ring<Traits::kMaxStages>& ring, int stage) const {
        const int thread = threadIdx.x % 128;
        if (thread < arguments_.team_size) ring.empty[stage].arrive(thread);
    }

    const SddArguments& arguments_;
    typename Traits::Shared& shared_;
    int rank_;
    int half_;
    SddCursor<Traits> cursor_;
};

}  // namespace ts::sm90
