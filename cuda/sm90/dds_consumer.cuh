// The warpgroups that multiply in a dds kernel.
#pragma once

#include "sm90/dds_epilogue.cuh"
#include "sm90/dds_traits.cuh"
#include "tma/partial_sums.cuh"

namespace ts::sm90 {

// One warpgroup's products of all its tiles.
template <class Traits, bool kRowMajorInput>
class DdsConsumer {
    using Sum = typename Traits::Accumulator;
    using Work = typename Traits::Work;

  public:
    __device__ DdsConsumer(const DdsArguments& arguments, typename Traits::Shared& shared,
                           const DdsPlan& plan, int rank, int warpgroup)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          warpgroup_(warpgroup),
          lane_(threadIdx.x % kWarpSize) {}

    __device__ void run() {
        DdsEpilogue<Traits> epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_],
                                     warpgroup_);
        Sum sums[Traits::kSums];
        if constexpr (Traits::kScaled)
            if (warpgroup_ == 1) cutlass::arch::NamedBarrier::arrive(256, kTurns);
        Work work = next_work(epilogue);
        epilogue.read_bias();
        while (work.tile >= 0) {
            if constexpr (Traits::kGrouped) epilogue.set_group(work);
            epilogue.begin(Traits::first_token(work, rank_));
            int64_t partial = 0;
            if constexpr (Traits::kSplits)
                partial = partial_place<Traits>(arguments_, work, rank_, warpgroup_);
            if constexpr (kPromotes) products_.begin(sums);
            if constexpr (Traits::kCarries) begin_carrying(work);
            const bool any = Traits::is_half(work, Traits::first_token(work, rank_))
                                 ? multiply_all<Traits::kBoxTokens>(sums, work)
                                 : multiply_all<Traits::kTileTokens>(sums, work);
            // While the last products are under way, so that what the plan says of the next tile has arrived
            // when the barriers of the epilogue wait for all that is read.
            work = next_work(epilogue);
            release_multiplied(sums);
            if (!any) clear(sums);
            if constexpr (Traits::kCarries)
                if (carries_) carried_.add_to(sums);
            if (Traits::kSplits && arguments_.partial != nullptr)
                store_sums(partial_sums<Traits::kSums>(arguments_.partial, partial), sums);
            else
                epilogue.store(sums);
        }
        epilogue.finish_stores();
    }

  private:
    using InputPosition = typename Ring<Traits::kInputStages>::Position;
    using WeightPosition = typename Ring<Traits::kWeightStages>::Position;
    static constexpr int kWarpSize = 32;
    static constexpr int kTurns = 3;  // the first of two barriers; see multiply_scaled
    static constexpr bool kPromotes = !Traits::kCarries && Traits::Math::kAccumulation != Accumulation::kept;

    __device__ Work next_work(DdsEpilogue<Traits>& epilogue) {
        const Work work = shared_.schedule.pop(next_, lane_);
        if (work.tile < 0) return work;
        mask_ = mask_from(work, 0);
        epilogue.prepare(Traits::rows_of(plan_, work.tile, rank_));
        return work;
    }

    // The plan's masks of the lane's step, of 32 from the tile's step `first`.
    __device__ uint32_t mask_from(const Work& work, int first) const {
        const int step = first + lane_;
        return step < work.steps ? __ldg(plan_.masks + Traits::plan_index(work.step + step, rank_)) : 0;
    }

    // Starts all products of a tile's first tokens; false if there are none. The last may be under way
    // afterwards.
    template <int kTokens>
    __device__ bool multiply_all(Sum (&sums)[Traits::kSums], const Work& work) {
        bool any = false;
        for (int first = 0; first < work.steps; first += kWarpSize) {
            // Steps in which the warpgroup has blocks.
            const uint32_t steps_present = __ballot_sync(~0u, (mask_ >> 16 * warpgroup_ & 0xffff) != 0);
            mask_ = mask_from(work, first + kWarpSize);
            const int count = min(kWarpSize, work.steps - first);
            for (int step = 0; step < count; ++step) {
                wait_input();
                if (steps_present >> step & 1) {
                    multiply<kTokens>(sums, any);
                    any = true;
                } else {
                    release_multiplied(sums);
                    release_input(input_.stage);
                }
                input_.advance();
            }
        }
        return any;
    }

    __device__ void wait_input() const {
        if constexpr (Traits::kSplitsInput)
            wait(shared_.split[input_.stage], input_.parity);
        else
            shared_.input_ring.wait_full(input_);
    }

    __device__ void begin_carrying(const Work& work) {
        const int interval = arguments_.carried_products;
        carry_times_.begin(interval, warpgroup_, Traits::kWarpgroups);
        carries_ = work.steps > interval / (2 * Traits::Weight::kStepProducts);
        if (carries_) carried_.begin();
    }

    __device__ static void clear(Sum (&sums)[Traits::kSums]) {
        asm volatile("");  // a branch, which is rarely taken, is faster than choosing each sum
#pragma unroll
        for (int i = 0; i < Traits::kSums; ++i) sums[i] = 0;
    }

    template <int kTokens>
    __device__ void multiply(Sum (&sums)[Traits::kSums], bool add) {
        shared_.weight_ring[warpgroup_].wait_full(weight_);
        const char* const stage = shared_.weight[warpgroup_][weight_.stage];
        const uint32_t tokens = operand_address(shared_.input[input_.stage]);
        if constexpr (Traits::kScaled) {
            multiply_scaled(sums, stage, tokens);
            return;
        } else if constexpr (Traits::Weight::kInRegisters || kPromotes) {
            release_multiplied(sums);  // they read or write registers that are written now
            products_.start(sums, stage, arguments_, tokens, add);
        } else {
            if constexpr (Traits::kCarries) {
                if (carry_times_.are_due() && carries_) {
                    release_multiplied(sums);
                    // Always true. But for a condition the compiler would move all of that before the
                    // release.
                    if (arguments_.carried_products > 0) carried_.carry(sums, carry_times_.factor());
                }
                carry_times_.add(Traits::Weight::kStepProducts);
            }
            constexpr int kSome = Traits::kSums * kTokens / Traits::kTileTokens;
            Traits::Weight::template multiply<kRowMajorInput, kTokens>(reinterpret_cast<Sum(&)[kSome]>(sums),
                                                                       arguments_, stage, tokens, add);
            if constexpr (Traits::Weight::kEndsProducts) {
                release(input_.stage, weight_.stage);
                return weight_.advance();
            }
            if (multiplied_) {
                cute::warpgroup_wait<1>();
                release(multiplied_input_, multiplied_weight_);
            }
        }
        multiplied_ = true;
        multiplied_input_ = input_.stage;
        multiplied_weight_ = weight_.stage;
        weight_.advance();
    }

    // In turn: while the sums of one warpgroup's step are scaled and added, the other one's products are
    // under way, which otherwise would share the tensor cores and end at the same time.
    __device__ void multiply_scaled(Sum (&sums)[Traits::kSums], const char* stage, uint32_t tokens) {
        // Before its products: once they have ended, another warp may give the stage back.
        const float block = shared_.scales.blocks[warpgroup_][weight_.stage];
        cutlass::arch::NamedBarrier::sync(256, kTurns + warpgroup_);
        products_.start(stage, arguments_, tokens);
        cute::warpgroup_wait<1>();
        cutlass::arch::NamedBarrier::arrive(256, kTurns + (warpgroup_ ^ 1));
        products_.scale(shared_.scales.tokens[input_.stage], block);
        cute::warpgroup_wait<0>();
        release(input_.stage, weight_.stage);
        products_.add(sums);
        weight_.advance();
    }

    // Waits for the products under way and gives their stages back.
    __device__ void release_multiplied(Sum (&sums)[Traits::kSums]) {
        cute::warpgroup_wait<0>();  // outside of the condition, or the compiler serialises wgmma
        if (!multiplied_) return;
        release(multiplied_input_, multiplied_weight_);
        if constexpr (kPromotes) products_.add(sums);
        multiplied_ = false;
    }

    __device__ void release(int input, int weight) const {
        release_input(input);
        const int thread = threadIdx.x % 128;
        if (Traits::kTokenRanks > 1) {
            if (thread < Traits::kRanks) shared_.weight_ring[warpgroup_].empty[weight].arrive(thread);
        } else if (thread == 0) {
            shared_.weight_ring[warpgroup_].empty[weight].arrive();
        }
    }
    // Every warp for itself: in steps without products nothing else keeps the warps together, and one that
    // is late would mistake the stage's next use but one for the one it waits for.
    __device__ void release_input(int stage) const {
        if (Traits::kRowRanks > 1) {
            if (lane_ < Traits::kRanks) shared_.input_ring.empty[stage].arrive(lane_);
        } else if (lane_ == 0) {
            shared_.input_ring.empty[stage].arrive();
        }
    }

    const DdsArguments& arguments_;
    typename Traits::Shared& shared_;
    const DdsPlan& plan_;
    int rank_;
    int warpgroup_;
    int lane_;
    typename Ring<Traits::Schedule::kQueue>::Position next_;
    uint32_t mask_ = 0;  // what the plan says of the lane's step of the next tile
    InputPosition input_;
    WeightPosition weight_;
    bool multiplied_ = false;
    int multiplied_input_ = 0;
    int multiplied_weight_ = 0;
    typename Traits::Weight::template Products<Traits::kTileTokens> products_;
    bool carries_ = false;
    CarryTimes carry_times_;
    [[no_unique_address]] std::conditional_t<Traits::kCarries, CarriedSums<Traits::kSums>, NoCarriedSums>
        carried_;
};

}  // namespace ts::sm90
