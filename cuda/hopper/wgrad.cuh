// Gradient of W: loading, multiplying, storing, and the sum of parts.
#pragma once

#include <cudaTypedefs.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "common/epilogue.cuh"
#include "common/problem.h"
#include "common/sdd_schedule.h"
#include "common/strip_plan.h"
#include "elementwise/groups.h"
#include "elementwise/sums.cuh"
#include "elementwise/sums.h"
#include "hopper/atoms.cuh"
#include "hopper/wgrad_plan.cuh"
#include "tma/pace.cuh"
#include "tma/partial_sums.cuh"
#include "tma/ring.cuh"
#include "tma/work_queue.cuh"

namespace ts::sm90 {

// The arguments of an sdd kernel and what follows from its tile.

constexpr int kSmallTileFeatures = 2 * kStripFeatures + kStripWindow;

struct SddArguments {
    CUtensorMap y;       // row-major [tokens][features], else [features][tokens]
    CUtensorMap x;       // likewise
    CUtensorMap blocks;  // values [nnz * 128][128], if results leave through TMA
    const PlanHeader* plan;
    void* values;
    float4* partial;    // [partials][kHalves], see SddPartials, or nullptr
    int* pace;          // the counters, or nullptr
    Operand y_operand;  // as the products read them from shared memory
    Operand x_operand;
    int plan_lines;       // of 128 bytes that the plan has at least
    int steps;            // of 64 tokens
    int team_size;        // CTAs of a cluster, which compute as many tiles side by side
    int teams;            // that the device holds
    int most_split;       // tiles; 0: none are, and no kernel follows
    bool stages_results;  // in the place of the last stage, and TMA stores them
    bool stages_last;     // those of a CTA's last tile, in the place of the strips
    int unit_shift;       // log2 of a unit's features
    int row_shift;        // log2 of bn
    int col_shift;        // log2 of bk
    bool accumulate;
    int plan_key;     // that the plan must have
    sums::Sums sums;  // over tokens of y, by the warps that have nothing to load; no parts if there are none
    groups::Groups groups;  // of a grouped product
    int group_features;     // likewise, of y for each weight
    PlanReport plan_report;
};

// A tile of a grouped product, and the tokens of its group.
struct GroupTile {
    int tile;  // of the plan; -1: no more
    int begin;
    int end;

    template <class Visit>
    __device__ void each(Visit visit) {
        visit(tile), visit(begin), visit(end);
    }
    __device__ int steps() const { return (end - begin + kSddStep - 1) / kSddStep; }
};

struct NoQueue {
    using Position = int;
};

// Values are stored as Math::Result, the type of the operands or float. `kGrouped_`: of grouped products.
template <class Math_, bool kGrouped_ = false>
struct SddTraits {
    static constexpr bool kGrouped = kGrouped_;
    using Queue = std::conditional_t<kGrouped, WorkQueue<GroupTile>, NoQueue>;
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr int kHalves = 2;  // warpgroups that multiply
    static constexpr int kStrip = kStripFeatures;
    static constexpr int kWindow = kStripWindow;
    static constexpr int kStep = kSddStep;
    static constexpr int kStepTime = 1;  // see SddShares
    using Schedule = SddSchedule<kStepTime>;
    static constexpr int64_t kTileValues = kHalves * kStrip * kWindow;  // of a tile at most
    static constexpr int kThreads = 128 * (1 + kHalves);
    static constexpr int kSumWarps = 3;   // beside the one that loads
    static constexpr int kSumsAhead = 4;  // lines that they read at a time, which their registers bound
    static constexpr int kFeatureBytes = kStep * sizeof(Input);  // of a feature in a stage
    static constexpr int kStripBytes = kStrip * kFeatureBytes;

    // Most tiles are small and leave room for one more stage, or for their results.
    static constexpr int kLargeStageBytes = kStripTileFeatures * kFeatureBytes;
    static constexpr int kSmallStageBytes = kSmallTileFeatures * kFeatureBytes;
    static constexpr int kLargeStages = kSharedCapacity / kLargeStageBytes;
    static constexpr int kMaxStages = kSharedCapacity / kSmallStageBytes;
    // There is no room for results of float.
    static constexpr bool kMayStageResults = sizeof(Result) == 2;
    static constexpr int kResultBytes = 2 * kStrip * kWindow;  // of a half, in 16 bits

    template <bool kRowMajor>
    static constexpr cute::SM90::GMMA::Major kMajor =
        kRowMajor ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K;
    template <bool kRowMajorY, bool kRowMajorX>
    using Atom = typename Math::template Atom<kMajor<kRowMajorY>, kMajor<kRowMajorX>>;

    struct Shared {
        // A stage has the strips and then the units of a tile, row-major [kStep][width], else [width][kStep].
        // At kResultsAt results are [kHalves][units of a window][64][64]; in the place of the strips, a
        // unit's are in each stage.
        alignas(1024) char stages[kLargeStages * kLargeStageBytes];
        Ring<kMaxStages> rings[2];  // of the stages of small and of large tiles
        Queue queue;
    };
    static_assert(sizeof(Shared::stages) >= kMaxStages * kSmallStageBytes);
    static constexpr int kResultsAt = (kMaxStages - 1) * kSmallStageBytes;
    static_assert(sizeof(Shared::stages) >= kResultsAt + kHalves * kResultBytes);
    static constexpr int kSharedBytes = sizeof(Shared);
};

// See the plan's `tiles`.
struct SddTile {
    int4 words;

    __device__ int strip(int half) const { return half == 0 || words.y < 0 ? words.x : words.y; }
    __device__ int strips() const { return words.y < 0 ? 1 : 2; }
    __device__ int units() const { return words.z; }
    __device__ int window(int half) const { return half == 0 ? 0 : max(words.w, 0); }
    // True if strips are of x and units of y.
    __device__ bool is_swapped() const { return words.w < 0; }
    __device__ int features(int unit_shift) const {
        return kStripFeatures * strips() + (units() << unit_shift);
    }
    __device__ bool has_strips_of(const SddTile& other) const {
        return words.x == other.words.x && words.y == other.words.y && is_swapped() == other.is_swapped();
    }
    // True if it takes the ring of large tiles.
    __device__ bool is_large(int unit_shift) const { return features(unit_shift) > kSmallTileFeatures; }
};

// See common/strip_plan.h.
struct StripPlan : SddPlan {
    using SddPlan::SddPlan;

    __device__ SddTile tile(int index) const { return {SddPlan::tile<int4>(index)}; }
    __device__ int unit_blocks() const { return group_rows; }
    __device__ const int* units() const { return k; }

    // Brings what concerns a tile close. Called by every lane of a warp, long before anyone reads it.
    // `units_of_tile`: of two windows.
    __device__ void prefetch(int index, int units_of_tile, int lane) const {
        constexpr int kLine = 128 / sizeof(int);
        const int slots_of_tile = units_of_tile * unit_blocks();
        const int* const of_slots = slots + index * slots_of_tile + (lane - 2) * kLine;
        const int* const at = lane == 0
                                  ? reinterpret_cast<const int*>(reinterpret_cast<const int4*>(tiles) + index)
                              : lane == 1 ? units() + index * units_of_tile
                                          : of_slots;
        if ((lane - 2) * kLine < slots_of_tile) asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
    }
};

// Brings the beginning of the plan into L2, for all that will read it one thing after another.
__device__ inline void prefetch_plan(const SddArguments& arguments) {
    for (int line = blockIdx.x; line < arguments.plan_lines; line += gridDim.x)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(arguments.plan + 2 * line));
}

// A position in the ring of the current tile's stages.
template <class Traits>
struct SddCursor {
    typename Ring<Traits::kMaxStages>::Position position;
    bool large = false;
    int small_stages;

    __device__ explicit SddCursor(const SddArguments& arguments)
        : small_stages(arguments.stages_results ? Traits::kMaxStages - 1 : Traits::kMaxStages) {}

    __device__ int stages() const { return large ? Traits::kLargeStages : small_stages; }
    __device__ int stage_offset() const {
        return position.stage * Traits::kFeatureBytes * (large ? kStripTileFeatures : kSmallTileFeatures);
    }
    __device__ void advance() { position.advance(stages()); }
    __device__ void select(bool now_large) {
        if (now_large == large) return;
        const auto before = position;
        position = other_;
        other_ = before;
        large = now_large;
    }

  private:
    typename Ring<Traits::kMaxStages>::Position other_;
};

// The warp that loads in the sdd kernel.

// The warp that fills the rings.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddProducer {
    using Schedule = typename Traits::Schedule;

  public:
    __device__ SddProducer(const SddArguments& arguments, typename Traits::Shared& shared, int rank)
        : arguments_(arguments), shared_(shared), rank_(rank), lane_(threadIdx.x % 32), cursor_(arguments) {}

    __device__ void run(const StripPlan& plan, const Schedule& schedule) {
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
        shared_.rings[cursor_.large].wait_all_empty(cursor_.position, cursor_.stages());
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

// Stores of an sdd kernel: sums go into the blocks of values, or as partial sums into the workspace.

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
    const typename Traits::Schedule schedule(plan.tile_count, arguments.steps, arguments.teams,
                                             arguments.team_size, arguments.most_split > 0);
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

// The warpgroups that multiply in the sdd kernel.

// One warpgroup's products of its half of all tiles.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddConsumer {
    using Sum = typename Traits::Accumulator;
    using Schedule = typename Traits::Schedule;

  public:
    __device__ SddConsumer(const SddArguments& arguments, typename Traits::Shared& shared, int rank, int half)
        : arguments_(arguments), shared_(shared), rank_(rank), half_(half), cursor_(arguments) {}

    __device__ void run(const StripPlan& plan, const Schedule& schedule) {
        Sum sums[kSums];
        const int team = blockIdx.x / arguments_.team_size, teams = gridDim.x / arguments_.team_size;
        for (int index = team; index < schedule.size(); index += teams) {
            // Skipping what has no steps would make the compiler think that lanes of a warp differ.
            const SddWork work = schedule.work(index, rank_);
            sum_up_tile(sums, plan.tile(work.tile), work.last_step - work.first_step);
            const bool is_last = index + teams >= schedule.size();
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

// The sdd kernel: which warps load, multiply, and sum up y.

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_kernel(const __grid_constant__ SddArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 128) prefetch_plan(arguments);
    set_up([&] {
        if (arguments.steps > 0)
            for (const CUtensorMap* map : {&arguments.y, &arguments.x}) prefetch(map);
        for (auto& ring : shared.rings) ring.init(Traits::kHalves * arguments.team_size);
    });
    const int rank = blockIdx.x % arguments.team_size;
    const StripPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    const typename Traits::Schedule schedule(plan.tile_count, arguments.steps, arguments.teams,
                                             arguments.team_size, arguments.most_split > 0);
    cute::cluster_wait();
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (warp == 0)
            SddProducer<Traits, kRowMajorY, kRowMajorX>(arguments, shared, rank).run(plan, schedule);
        else
            sums::sum_items<typename Traits::Input, Traits::kSumsAhead, true>(
                arguments.sums, (warp - 1) * gridDim.x + blockIdx.x, Traits::kSumWarps * gridDim.x,
                threadIdx.x % 32);
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        SddConsumer<Traits, kRowMajorY, kRowMajorX>(arguments, shared, rank, warp / 4 - 1)
            .run(plan, schedule);
    }
}

// The sdd kernel of grouped products: which warps load and multiply.

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_grouped_kernel(const __grid_constant__ SddArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 128) prefetch_plan(arguments);
    set_up([&] {
        for (auto& ring : shared.rings) ring.init(Traits::kHalves);
        shared.queue.init(4 * Traits::kHalves);
    });
    const StripPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    cute::cluster_wait();
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (warp == 0) SddProducer<Traits, true, true>(arguments, shared, 0).run_groups(plan);
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        SddConsumer<Traits, true, true>(arguments, shared, 0, warp / 4 - 1).run_groups(plan);
    }
}

}  // namespace ts::sm90
