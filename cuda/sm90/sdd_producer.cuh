// The warp that loads in the sdd kernel.
#pragma once

#include "sm90/sdd_traits.cuh"

namespace ts::sm90 {

// The warp that fills the rings.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddProducer {
  public:
    __device__ SddProducer(const SddArguments& arguments, typename Traits::Shared& shared, int rank)
        : arguments_(arguments), shared_(shared), rank_(rank), lane_(threadIdx.x % 32), cursor_(arguments) {}

    __device__ void run(const StripPlan& plan, const SddSchedule& schedule) {
        const int team = blockIdx.x / arguments_.team_size, teams = gridDim.x / arguments_.team_size;
        for (int index = team; index < schedule.size(); index += teams) {
            const SddWork work = schedule.work(index, rank_);
            plan.prefetch(work.tile, 2 * Traits::kWindow >> arguments_.unit_shift, lane_);
            const SddTile tile = plan.tile(work.tile);
            const SddTile other = plan.tile(min(work.tile ^ 1, plan.tile_count - 1));  // in a team of two
            const bool shares = arguments_.team_size > 1 && tile.has_strips_of(other);
            const int feature = my_feature(plan, work.tile, tile);
            select(tile.is_large(arguments_.unit_shift));
            // Back and forth: the tokens that the tile before used last are still in L2.
            load(work, tile, feature, index / teams % 2 != 0,
                 arguments_.pace != nullptr && schedule.is_whole(index), shares);
        }
    }

    // Loads a grouped product: takes tiles, those of the groups with most tokens first, and tells the
    // consumers.
    __device__ void run_groups(const StripPlan& plan) {
        typename Traits::Queue::Position position;
        int index = blockIdx.x;
        while (true) {
            const GroupTile work = group_tile(plan, index);
            shared_.queue.push(work, position, lane_);
            if (work.tile < 0) return;
            index = take();  // which is there when it is needed
            plan.prefetch(work.tile, 2 * Traits::kWindow >> arguments_.unit_shift, lane_);
            const SddTile tile = plan.tile(work.tile);
            const int feature = my_feature(plan, work.tile, tile);
            select(tile.is_large(arguments_.unit_shift));
            load(work, tile, feature, false, false, false);
        }
    }

  private:
    __device__ int take() const {
        const int taken = lane_ == 0 ? atomicAdd(arguments_.groups.taken, 1) : 0;
        return static_cast<int>(gridDim.x) + __shfl_sync(~0u, taken, 0);
    }

    __device__ GroupTile group_tile(const StripPlan& plan, int index) const {
        const groups::Groups& groups = arguments_.groups;
        if (index >= __ldg(groups.tiles_before + groups.count)) return no_more<GroupTile>();
        int low = 0, high = groups.count;  // the last place that has not more tiles before it
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (__ldg(groups.tiles_before + middle) <= index ? low : high) = middle;
        }
        const int group = __ldg(groups.by_size + low), begin = groups.begin(group);
        const int first = groups.count == 1 ? 0 : __ldg(plan.starts + group);
        return {first + index - __ldg(groups.tiles_before + low), begin, begin + groups.size(group)};
    }

    // Lanes load the strips and then the units of a tile, one each. The plan is asked for the units before it
    // has said how many strips there are.
    __device__ int my_feature(const StripPlan& plan, int index, const SddTile& tile) const {
        const int room = 2 * Traits::kWindow >> arguments_.unit_shift;
        const int unit = lane_ < room ? __ldg(plan.units() + index * room + lane_) : -1;
        const int after_strips = __shfl_sync(~0u, unit, lane_ - tile.strips());
        return lane_ < tile.strips() ? tile.strip(lane_) : after_strips;
    }

    // Before stages of another size are filled, those that lie there must be empty.
    __device__ void select(bool large) {
        if (large == cursor_.large) return;
        auto position = cursor_.position;
        for (int i = 0; i < cursor_.stages(); ++i) {
            shared_.rings[cursor_.large].wait_empty(position);
            position.advance(cursor_.stages());
        }
        cursor_.select(large);
    }

    // `shares`: strips with the other CTA of the team. Each of them loads one for both.
    template <class Work>
    __device__ void load(const Work& work, const SddTile& tile, int feature, bool backwards, bool paced,
                         bool shares) {
        const bool is_strip = lane_ < tile.strips();
        const bool is_y = is_strip != tile.is_swapped();
        const bool row_major = is_y ? kRowMajorY : kRowMajorX;
        const CUtensorMap* const map = is_y ? &arguments_.y : &arguments_.x;
        const int unit_bytes = Traits::kFeatureBytes << arguments_.unit_shift;
        const int offset = is_strip ? lane_ * Traits::kStripBytes
                                    : tile.strips() * (Traits::kStripBytes - unit_bytes) + lane_ * unit_bytes;
        const int bytes = tile.features(arguments_.unit_shift) * Traits::kFeatureBytes;
        const bool loads = feature >= 0 && !(shares && is_strip && lane_ != rank_);
        const Multicast to{static_cast<uint16_t>(shares && is_strip ? 3 : 1 << rank_)};
        Ring<Traits::kMaxStages>& ring = shared_.rings[cursor_.large];
        const auto [first_step, last_step] = steps_of(work);
        for (int step = first_step; step < last_step; ++step) {
            const int token = Traits::kStep * (backwards ? first_step + last_step - 1 - step : step);
            if (paced && step % Pace::kSteps == 0 && lane_ == 0)
                pace_.begin(arguments_.pace, static_cast<int>(gridDim.x));
            __syncwarp();
            ring.wait_empty(cursor_.position);
            const Barrier& full = ring.full[cursor_.position.stage];
            if (lane_ == 0) full.arrive_and_expect_tx(bytes);
            __syncwarp();
            char* const target = shared_.stages + cursor_.stage_offset() + offset;
            if constexpr (Traits::kGrouped) {
                const int in_weight = is_y ? feature % arguments_.group_features : feature;
                const int first = work.begin + token, rows = min(work.end - first, Traits::kStep);
                if (loads) load_range_box(map, full, target, in_weight, first, rows);
            } else if (loads) {
                load_box(map, full, to, target, row_major ? feature : token, row_major ? token : feature);
            }
            __syncwarp();
            cursor_.advance();
        }
    }

    __device__ static int2 steps_of(const SddWork& work) {
        return make_int2(work.first_step, work.last_step);
    }
    __device__ static int2 steps_of(const GroupTile& work) { return make_int2(0, work.steps()); }

    const SddArguments& arguments_;
    typename Traits::Shared& shared_;
    int rank_;
    int lane_;
    Pace pace_;
    SddCursor<Traits> cursor_;
};

}  // namespace ts::sm90
