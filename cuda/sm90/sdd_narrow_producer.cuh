// The warp that loads in the sdd kernel for blocks of 16 x 16.
#pragma once

#include "sm90/sdd_narrow_traits.cuh"

namespace ts::sm90 {

// The warp that fills the ring.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddNarrowProducer {
  public:
    __device__ SddNarrowProducer(const SddNarrowArguments& arguments, typename Traits::Shared& shared)
        : arguments_(arguments), shared_(shared), lane_(threadIdx.x % 32) {}

    __device__ void run(const SddPlan& plan, const SddSchedule& schedule) {
        for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
            const SddWork work = schedule.work(index, 0);
            const int4 tile = plan.tile<int4>(work.tile);
            const int feature = lane_ < kListUnits ? __ldg(plan.k + work.tile * kListUnits + lane_) : -1;
            // Back and forth: the tokens that the tile before used last are still in L2.
            load(work, tile, feature, index / static_cast<int>(gridDim.x) % 2 != 0,
                 arguments_.pace != nullptr && schedule.is_whole(index));
        }
    }

  private:
    // Lanes load the units of y and then those of x of a tile, one each.
    __device__ void load(const SddWork& work, int4 tile, int feature, bool backwards, bool paced) {
        constexpr int kStepStages = kSddStep / Traits::kStageTokens;
        const bool is_y = lane_ < tile.x;
        const bool row_major = is_y ? kRowMajorY : kRowMajorX;
        const CUtensorMap* const map = is_y ? &arguments_.y : &arguments_.x;
        const int first = work.first_step * kStepStages, last = work.last_step * kStepStages;
        for (int stage = first; stage < last; ++stage) {
            const int token = Traits::kStageTokens * (backwards ? first + last - 1 - stage : stage);
            if (paced && stage % (kStepStages * Pace::kSteps) == 0 && lane_ == 0)
                pace_.begin(arguments_.pace, static_cast<int>(gridDim.x));
            __syncwarp();
            shared_.ring.wait_empty(position_);
            const Barrier& full = shared_.ring.full[position_.stage];
            if (lane_ == 0) full.arrive_and_expect_tx((tile.x + tile.y) * Traits::kUnitBytes);
            __syncwarp();
            if (feature >= 0) {
                char* const unit =
                    shared_.stages + position_.stage * Traits::kStageBytes + lane_ * Traits::kUnitBytes;
                constexpr int kBoxes = kListUnit / Traits::kBoxFeatures;
#pragma unroll
                for (int i = 0; i < kBoxes; ++i) {
                    const int first = feature + i * Traits::kBoxFeatures;
                    load_box(map, full, Multicast{1}, unit + i * (Traits::kUnitBytes / kBoxes),
                             row_major ? first : token, row_major ? token : first);
                }
            }
            __syncwarp();
            position_.advance();
        }
    }

    const SddNarrowArguments& arguments_;
    typename Traits::Shared& shared_;
    int lane_;
    Pace pace_;
    typename Ring<Traits::kStages>::Position position_;
};

}  // namespace ts::sm90
