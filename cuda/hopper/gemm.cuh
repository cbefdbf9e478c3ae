// Forward and gradient of x: the warps that load, the warpgroups that multiply, and the sum of parts.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm75.hpp>

#include <cstdint>

#include "common/tf32.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/weights.cuh"
#include "tma/launch.cuh"
#include "tma/pace.cuh"
#include "tma/partial_sums.cuh"

namespace ts::sm90 {

// float32 in two parts of TF32, for kernels that multiply it with its own error.
//
// wgmma reads the upper 19 bits of a word in shared memory. So an activation as it is serves as its first
// part, cut off; the second, what is missing, lies beside it, as much of it as TF32 holds. Of the weight,
// which is split in registers, the first part is rounded: what the two second parts would give, which is left
// out, is below 2^-21 of the product, and as often too small as too large.

// The rest that TF32 cuts off, rounded.
__device__ inline uint32_t cut_off(uint32_t value) {
    constexpr uint32_t kRead = ~0u << 13;
    return round_to_tf32(__uint_as_float(value) - __uint_as_float(value & kRead));
}

// Splits an operand in registers, without conversions, which are slow. The first part is rounded, so that the
// rest, of which products read what TF32 holds, is as often cut off above as below zero. A NaN stays one in
// the rest.
__device__ inline void split_operand(uint32_t (&operand)[4], uint32_t (&rest)[4]) {
    constexpr uint32_t kCut = 1u << 13;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float value = __uint_as_float(operand[i]);
        operand[i] = operand[i] + kCut / 2 & ~(kCut - 1);
        rest[i] = __float_as_uint(value - __uint_as_float(operand[i]));
    }
}

// Some warps, of so many threads: write the second parts of the activations behind the first, stage by stage.
template <class Traits, int kThreads, int kStages>
__device__ void split_input(typename Traits::Shared& shared, const Ring<kStages>& ring, int thread) {
    if constexpr (Traits::kSplitsInput) {
        const int lane = thread % 32;
        typename Ring<Traits::Schedule::kQueue>::Position next;
        typename Ring<kStages>::Position position;
        while (true) {
            const auto work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            for (int step = 0; step < work.steps; ++step) {
                ring.wait_full(position);
                const auto* const from =
                    reinterpret_cast<const uint4*>(shared.input[position.stage]) + thread;
                auto* const to =
                    reinterpret_cast<uint4*>(shared.input[position.stage] + Traits::kInputBytes) + thread;
#pragma unroll 4
                for (int i = 0; i < Traits::kInputBytes / 16; i += kThreads) {
                    const uint4 words = from[i];
                    to[i] = {cut_off(words.x), cut_off(words.y), cut_off(words.z), cut_off(words.w)};
                }
                cutlass::arch::fence_view_async_shared();
                __syncwarp();
                if (lane == 0) shared.split[position.stage].arrive();
                position.advance();
            }
        }
    }
}

// The weight format of dds kernels for float32. wgmma takes operands of TF32 from shared memory along k only,
// which values are not in dds_nn: products take the weight from registers, in both directions.

// A stage holds lines of 32 values, swizzled over their 128 bytes, as blocks are:
//   dds_nt: [kFeatures][kStep]      dds_nn: [kFeatures / 32][kStep][32]
template <Op kOp, class Math>
struct FloatWeight : DenseWeight<kOp, Math> {
    using Base = DenseWeight<kOp, Math>;
    using Base::kFeatures;
    using Base::kTransposed;
    static constexpr bool kInRegisters = true;
    static constexpr bool kAlongK = true;
    static constexpr int kStep = 32;
    static constexpr int kWidth = 32;  // of a line
    static constexpr int kLine = 4 * kWidth;
    static constexpr int kBoxBytes = kFeatures * kStep * 4;
    static constexpr int kStageBytes = kBoxBytes;

    static const char* refuses(const Problem& problem) {
        if (problem.row_block() < kWidth || problem.k_block() < kStep)
            return "its blocks have 32 rows and columns at least";
        return problem.input().layout == Layout::row_major ? nullptr : "it reads row-major activations";
    }

    static cudaError_t map(DdsArguments& arguments, const Problem& problem) {
        const int rows = arguments.row_width;
        const int64_t columns = problem.pattern.block_cols;
        if (!kTransposed)
            return encode(arguments.values, Math::kMapType, problem.values.data,
                          {{columns, 1, kStep}, {arguments.value_rows, columns, rows}});
        return encode(arguments.values, Math::kMapType, problem.values.data,
                      {{kWidth, 1, kWidth},
                       {arguments.value_rows, columns, kStep},
                       {columns / kWidth, kWidth, rows / kWidth}});
    }

    // See DenseWeight for these.
    __device__ static int offset(const DdsArguments& arguments, int row, int) {
        return row * arguments.row_block * kLine;
    }
    __device__ static void load(const DdsArguments& arguments, const Barrier& full, Multicast to, char* stage,
                                int offset, int2 corner) {
        if (kTransposed)
            load_box(&arguments.values, full, to, stage + offset, 0, corner.y, corner.x / kWidth);
        else
            load_box(&arguments.values, full, to, stage + offset, corner.x, corner.y);
    }

    // The products of a warpgroup: of each 8 of k a thread has in registers the weight of features f and f +
    // 8 at k and at k + 4, in this order. They are read while those before are multiplied, and multiplied
    // from others when these have been waited for.
    template <int kTokens>
    class Products : public PromotedSums<Math, kFeatures * kTokens / 128> {
        using Sum = typename Math::Accumulator;
        static constexpr int kSums = kFeatures * kTokens / 128;
        static constexpr bool kSplit = Math::kParts > 1;
        using Atom = typename Math::template RegisterAtom<cute::SM90::GMMA::Major::K, kTokens>;
        using Fragment = WeightFragment;
        using PromotedSums<Math, kSums>::step_;
        static constexpr int kFragments = kStep / 8;

      public:
        __device__ Products() : place_(place()) {}

        // Starts the products of a step, sums (+)= weight tokens, or what add() will add to them. No others
        // may be under way. `tokens`: where their operand is.
        __device__ void start(Sum (&sums)[kSums], const char* stage, const DdsArguments& arguments,
                              uint32_t tokens, bool add) {
            Fragment weight[kFragments], rest[kFragments];
#pragma unroll
            for (int i = 0; i < kFragments; ++i) {
                load(weight[i], stage, i);
                if constexpr (kSplit) split_operand(weight[i], rest[i]);
            }
            cute::warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < kFragments; ++i) {
                const uint64_t operand = arguments.tokens_by_k.at(tokens, i);
                if constexpr (kSplit) {  // small ones first
                    constexpr uint32_t kBehind = kTokens * kStep * 4 / 16;
                    wgmma<Atom>(step_, rest[i], operand, i > 0);
                    wgmma<Atom>(step_, weight[i], operand + kBehind, true);
                    wgmma<Atom>(step_, weight[i], operand, true);
                } else {
                    wgmma<Atom>(sums, weight[i], operand, add || i > 0);
                }
            }
            cute::warpgroup_commit_batch();
        }

      private:
        // Offset of the first fragment: the lane's read for its warp's matrices of 8 x 4, or for itself.
        __device__ static uint32_t place() {
            const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
            if constexpr (kTransposed) {
                const int feature = 16 * (warp % 2) + lane / 4, k = lane % 4;
                return warp / 2 * kStep * kLine + k * kLine + (feature / 4 ^ k) * 16 + feature % 4 * 4 ^
                       part(lane % 4);
            }
            const int feature = 16 * warp + lane % 16;
            return feature * kLine + (lane / 16 ^ feature % 8) * 16;
        }

        // Difference of the address of a part of the fragment from that of the first.
        __device__ static uint32_t part(int index) {
            return (index & 1 ? 32 : 0) ^ (index & 2 ? 4 * kLine ^ 64 : 0);
        }

        __device__ void load(Fragment& to, const char* stage, int index) const {
            if constexpr (kTransposed) {
                load_transposed(to, stage + 8 * index * kLine);
            } else {
                const auto& line = *reinterpret_cast<const cute::uint128_t*>(stage + (place_ ^ 32 * index));
                cute::SM75_U32x4_LDSM_N::copy(line, to[0], to[1], to[2], to[3]);
            }
        }

        // The lanes of one k read another part each at a time, so that all read from other banks.
        __device__ void load_transposed(Fragment& to, const char* lines) const {
            Fragment read, even;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                read[i] = *reinterpret_cast<const uint32_t*>(lines + (place_ ^ part(i)));
            const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
            for (int i = 0; i < 4; ++i) even[i] = odd ? read[i ^ 1] : read[i];
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = upper ? even[i ^ 2] : even[i];
        }

        uint32_t place_;
    };
};

// The warps that fill the rings of a dds kernel through TMA.

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
        const int pieces = plan.pieces, shift = log2_of(pieces), width = Traits::kStep >> shift;
        const int steps_read = kWarpSize >> shift;
        // One CTA of a cluster counts: the other one cannot go far without it.
        const bool paces = Traits::kPaces && arguments.pace != nullptr && rank == 0;
        [[maybe_unused]] tma::Pace pace;
        [[maybe_unused]] int begun = 0;  // steps
        while (true) {
            const typename Traits::Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) {
                if (paces && elected) tma::Pace::end(arguments.pace);
                return shared.input_ring.wait_all_empty(position);
            }
            const int token = Traits::first_token(work, rank), end = work.step + work.steps;
            const int boxes = Traits::kHalves && !Traits::is_half(work, token) ? 2 : 1;
            const auto read = [&](int first) {
                return input_step(first + (lane >> shift), lane & pieces - 1, end);
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
                    if constexpr (Traits::kPaces) {
                        if (paces && begun++ % tma::Pace::kSteps == 0) {
                            if (elected) pace.begin(arguments.pace, gridDim.x / Traits::kRanks);
                            __syncwarp();
                        }
                    }
                    shared.input_ring.wait_empty(position);
                    const Barrier& full = shared.input_ring.full[position.stage];
                    if (elected)
                        full.arrive_and_expect_tx(mask != 0 ? boxes * Traits::kBoxTokens * kStepBytes : 0);
                    if (mask != 0 && to.mask != 0) {
                        if constexpr (Traits::kScaled)
                            load_scales(full, to, position.stage, __shfl_sync(~0u, ks, from), token);
#pragma unroll 1
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
        const int shift = log2_of(boxes), steps_read = kWarpSize >> shift;
        const int piece = (lane & boxes - 1) >> log2_of(rows), row = lane & rows - 1;
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
            if (work.tile < 0) return shared.weight_ring[warpgroup].wait_all_empty(position);
            const int end = work.step + work.steps;
            const auto read = [&](int first) -> WeightStep {
                const int step = first + (lane >> shift);
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
#pragma unroll 1
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

    // Divisions by what is only known at run time take long.
    __device__ static int log2_of(int power) { return 31 - __clz(power); }

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

// The warpgroups that multiply in a dds kernel.

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
        // First a tile without steps and rows, while operands are on their way: the code of its end comes
        // from far away. Parts of tiles have another end.
        Work work{};
        if (Traits::kSplits && arguments_.partial != nullptr) work = next_work(epilogue);
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
            auto& some = reinterpret_cast<Sum(&)[kSome]>(sums);
            if constexpr (Traits::Weight::kStartsSingly)
                products_.template start<0>(some, arguments_, stage, tokens, add);
            else
                Traits::Weight::template multiply<kRowMajorInput, kTokens>(some, arguments_, stage, tokens,
                                                                           add);
            if (multiplied_) {
                cute::warpgroup_wait<1>();
                release(multiplied_input_, multiplied_weight_);
            }
            if constexpr (Traits::Weight::kStartsSingly) {
                products_.template start<1>(some, arguments_, stage, tokens, true);
                cute::warpgroup_wait<1>();
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

// The dds kernel: which warps load, schedule and multiply.

template <class Traits, bool kRowMajorInput>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    dds_kernel(const __grid_constant__ DdsArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const auto rank = static_cast<int>(cute::block_rank_in_cluster());
    if (threadIdx.x == 32) {
        prefetch_header(arguments.plan);
        if (arguments.value_rows > 0)
            for (const CUtensorMap* map : {&arguments.values, &arguments.input}) prefetch(map);
        prefetch(&arguments.output);
    }
    set_up([&] {
        shared.input_ring.init(4 * Traits::kWarpgroups * Traits::kRowRanks);
        for (auto& ring : shared.weight_ring) ring.init(Traits::kTokenRanks);
        for (auto& chunks : shared.residual)
            for (const Barrier& arrived : chunks) arrived.init(1);
        shared.schedule.init(1 + Traits::kWarpgroups + 4 * (Traits::kWarpgroups + Traits::kSplitsInput));
        if constexpr (Traits::kSplitsInput)
            for (const Barrier& split : shared.split) split.init(4);
    });
    // Each role reads the plan for itself: what it has to wait for differs.
    const auto read_plan = [&] { return DdsPlan(arguments.plan, arguments.plan_key); };
    if (Traits::kSplits && arguments.partial != nullptr)
        cudaTriggerProgrammaticLaunchCompletion();  // see dds_reduce

    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        const bool elected = cute::elect_one_sync() != 0;
        if (warp <= Traits::kWarpgroups) {
            const DdsPlan plan = read_plan();
            cute::cluster_wait();
            const DdsProducer<Traits> producer{arguments, shared, plan, rank, lane, elected};
            if (warp == 0)
                producer.template load_input<kRowMajorInput>();
            else
                producer.load_weight(warp - 1);
        } else {
            const DdsPlan plan = read_plan();
            shared.schedule.run(Traits::schedule_of(arguments), typename Traits::Costs(plan), plan.is_own,
                                blockIdx.x / Traits::kRanks, gridDim.x / Traits::kRanks, lane);
            if (!plan.is_own) report_stale(arguments.plan_report);
        }
    } else if (warp >= 4 * (1 + Traits::kWarpgroups)) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        cute::cluster_wait();
        split_input<Traits, 128>(shared, shared.input_ring, threadIdx.x % 128);
    } else {
        cutlass::arch::warpgroup_reg_alloc<Traits::kComputerRegisters>();
        const DdsPlan plan = read_plan();
        cute::cluster_wait();
        DdsConsumer<Traits, kRowMajorInput>(arguments, shared, plan, rank, warp / 4 - 1).run();
    }
}

// dds in parts: where tiles are few, the sums over k are cut, and a second kernel adds them.

// A CTA computes a chunk of the tokens of what a warpgroup of the dds kernel does of one tile.
template <class Traits>
struct ReduceTraits : Traits {
    static constexpr int kAllChunks = 1;
    static constexpr int kChunks = 1;
    static constexpr int kSums = Traits::kSums / Traits::kAllChunks;
};

template <class Traits>
struct ReduceShared {
    alignas(1024) typename DdsEpilogue<Traits>::Buffers output;
    typename DdsEpilogue<Traits>::Arrived residual;
};

// Adds the partial sums of each tile, always in the same order, and makes results of them. It is launched
// while the dds kernel still runs.
template <class Traits>
__global__ void __launch_bounds__(128) dds_reduce(const __grid_constant__ DdsArguments arguments) {
    using Chunk = ReduceTraits<Traits>;
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<ReduceShared<Chunk>*>(memory);
    if (threadIdx.x == 0) {
        for (const Barrier& arrived : shared.residual) arrived.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    const DdsPlan plan(arguments.plan, arguments.plan_key);
    if (!plan.is_own) return cudaGridDependencySynchronize();  // no sums: the dds kernel has said so
    const int chunk = blockIdx.x % Traits::kAllChunks, share = blockIdx.x / Traits::kAllChunks;
    const int warpgroup = share % Traits::kWarpgroups, cta = share / Traits::kWarpgroups;
    const int rank = cta % Traits::kRanks, item = cta / Traits::kRanks;
    const Work work{item / arguments.spans, item % arguments.spans, 0, 0, 0};
    DdsEpilogue<Chunk> epilogue(arguments, shared.output, shared.residual, warpgroup);
    epilogue.prepare(Traits::rows_of(plan, work.tile, rank));
    epilogue.read_bias();
    epilogue.begin(Traits::first_token(work, rank) + chunk * Traits::kChunkTokens);
    const float4* const partial =
        partial_sums<Traits::kSums>(arguments.partial,
                                    partial_place<Traits>(arguments, work, rank, warpgroup)) +
        chunk * (Chunk::kSums / 4 * 128);
    constexpr int64_t kDistance = Traits::kRanks * Traits::kWarpgroups * (Traits::kSums / 4 * 128);
    cudaGridDependencySynchronize();
    typename Chunk::Accumulator sums[Chunk::kSums] = {};
    add_parts(partial, kDistance, arguments.schedule.by_parts.divisor, sums);
    epilogue.store(sums);
    epilogue.finish_stores();
}

// Bytes of the partial sums of a part of a tile of a cluster.
template <class Traits>
constexpr int64_t kPartBytes =
    int64_t{sizeof(float)} * Traits::kRanks * Traits::kTileTokens * Traits::kTileFeatures;

// For the kernel that computes the parts.
inline DdsArguments without_epilogue(DdsArguments arguments) {
    arguments.bias = nullptr;
    arguments.has_residual = false;
    return arguments;
}

template <class Traits>
cudaError_t reduce_parts(const DdsArguments& arguments, int64_t items, void* stream) {
    return launch_early<dds_reduce<Traits>, sizeof(ReduceShared<ReduceTraits<Traits>>)>(
        arguments, items * Traits::kRanks * Traits::kWarpgroups * Traits::kAllChunks, 128, stream);
}

}  // namespace ts::sm90
