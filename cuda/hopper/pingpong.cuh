// Forward of 8 bits in blocks of 128 or 64, forward and dgrad of 16 bits in blocks of 128: dds_8bit and dds
// with whole tiles for each warpgroup.
// Operands: as in dds_8bit and dds; of 16 bits, and of int8 and fast sums in blocks of 128, all activations
// are row-major.
// CTA: tiles of one block row, 128 tokens x 128 features or 256 x 64, which go to the two warpgroups in turn:
// while one scales, rounds and stores its results, the other one multiplies. A warpgroup multiplies 64
// features at a time, or 64 tokens. No block rows are united: a step has 128 bytes of k of one, two blocks of
// 64 x 64 in 8 bits. Tiles of 192 tokens x 128 features, which load less, are for int8 and fast sums, without
// activation, residual and gate.
// Cluster of 2: different tokens, which share the weight by multicast.
// Warps: 1 or 2 load, 1 schedules, 8 multiply and store; 1 reads ahead all of a tile but its operands.
// CTAs are persistent.
// Sums: of 16 bits, and int32, exact, of int8: one warpgroup at a time keeps the tensor cores busy, from one
// ring of stages for both. Likewise those of float8 in blocks of 64, which are carried over now and then. In
// blocks of 128 they are of 128 k and added to float32 registers, for which those of 64 tokens x 128 features
// leave room. Meanwhile the other warpgroup multiplies, from a ring of its own. Tokens are the rows of wgmma
// then: a thread has sums of four tokens. It reads their scales inside of the sums while these are
// multiplied; the warps that load write them ahead. Fast sums in blocks of 128 are computed as those of int8.
// Results leave half by half, which leaves room for six stages. In blocks of 128 a residual or gate is asked
// for before the products: in 16 bits all of it, as the memory of the sixth stage has buffers for the other
// half, of int8 and fast sums that of the first half.
// Chosen where its estimate is least.
#pragma once

#include "hopper/gemm_rows.cuh"
#include "hopper/weights.cuh"
#include "tma/turns.cuh"

namespace ts::sm90 {

// `kRows`: of a block. Each CTA of a cluster loads half of them for both.
template <class Math, int kRows, int kTokens, Op kOp>
struct HalvedWeight : GroupedWeight<kOp, Math, kRows == 64> {
    using Base = GroupedWeight<kOp, Math, kRows == 64>;
    static constexpr bool kAlongK = true;
    // Sums of 192 x 128 leave no registers for more than scales, bias and rounding.
    static constexpr bool kLarge = kTokens == 192;

    static const char* refuses(const Problem& problem) {
        if (Math::kPrecision == Precision::fast && problem.precision != Precision::fast)
            return "its sums stay with the tensor cores";
        if (kLarge && (problem.activation != Activation::none || problem.residual.data != nullptr))
            return "its results are without activation, residual or gate";
        if (problem.row_block() != kRows || problem.k_block() < kRows)
            return kRows == 128 ? "its blocks have 128 rows and 128 columns at least"
                                : "its blocks have 64 rows and 64 columns at least";
        // Promoted sums, and those of blocks of 64, become column-major results, too.
        const bool promotes =
            Math::kAccumulation == Accumulation::scaled ||
            (Math::kAccumulation == Accumulation::carried && problem.precision != Precision::fast);
        const bool row_major =
            problem.input().layout == Layout::row_major && problem.output().layout == Layout::row_major;
        return row_major || kRows == 64 || promotes ? nullptr : "it reads and writes row-major activations";
    }
    // The distance of groups of scales takes the place of the rows of groups, which have no such scales.
    static cudaError_t map(DdsArguments& arguments, const Problem& problem) {
        if (Math::kAccumulation == Accumulation::scaled)
            arguments.group_rows = static_cast<int>(problem.x_scales_ld);
        if constexpr (Base::kTransposed) return Base::map(arguments, problem);
        if constexpr (Base::kPairsRows) return Base::map_rows(arguments, problem, kRows / 2);
        const int width = std::min<int>(arguments.k_block, Base::kStep);
        const int64_t columns = problem.pattern.block_cols;
        return encode(arguments.values, Math::kMapType, problem.values.data,
                      {{columns, 1, width}, {arguments.value_rows, columns, kRows / 2}});
    }
};

template <class Math, int kRows, int kTokens, Op kOp, bool kGrouped_>
struct DdsTraits<Math, HalvedWeight<Math, kRows, kTokens, kOp>, 2, 1, kTokens, kGrouped_>
    : DdsTraits<Math, GroupedWeight<kOp, Math>, 2, 1, kTokens, kGrouped_> {
    using Base = DdsTraits<Math, GroupedWeight<kOp, Math>, 2, 1, kTokens, kGrouped_>;
    using Weight = HalvedWeight<Math, kRows, kTokens, kOp>;
    static constexpr int kTileFeatures = kRows;
    static constexpr int kFeatureHalves = kRows / Weight::kFeatures;
    static constexpr int kChunks = Weight::kLarge ? 4 : Base::kAllChunks;
    static constexpr bool kPairsRows = Weight::kPairsRows;
    static constexpr bool kScales = is_quantized(Math::kInput) && !Base::kScaled;  // outside of the sums
    // Sums of 64 x 128 leave room for those of a step.
    static constexpr bool kPromotes = Math::kAccumulation != Accumulation::kept && kFeatureHalves == 2;
    static constexpr bool kCarries = Math::kAccumulation == Accumulation::carried && !kPromotes;
    static constexpr int kRings = kPromotes ? Base::kWarpgroups : 1;
    static constexpr int kStages = (kStagedBytes - Base::kWarpgroups * kChunks * Base::kChunkBytes) /
                                   (Base::kInputBytes + kFeatureHalves * Weight::kStageBytes) / kRings;
    // In 16 bits the last stage is memory for a residual or gate, if there is one.
    static constexpr bool kLendsStage = !is_quantized(Math::kInput);
    __device__ static int stages(const DdsArguments& arguments) {
        return kLendsStage && arguments.has_residual ? kStages - 1 : kStages;
    }
    // Row-major results of sums whose rows are features, half of them after the other.
    static constexpr bool kFinishesHalves = kFeatureHalves == 2 && !kPromotes && !Weight::kLarge;
    static constexpr bool kSplits = false;
    static constexpr bool kHalves = false;
    static constexpr int kBoxTokens = Base::kTileTokens;
    static constexpr bool kDealsInTurn = kRows == 128 && !kGrouped_;
    using Schedule = tma::Turns<std::conditional_t<kGrouped_, GroupSpans, Bands<false>>, StepCosts>;
    using Work = typename Schedule::Work;

    // One CTA may have no tokens of a group's last span: in turn either one of the cluster.
    __device__ static int first_token(const Work& work, int rank) {
        return Base::first_token(work, kGrouped_ ? rank ^ work.tile & 1 : rank);
    }
    // True if a CTA has none of the tile's tokens.
    __device__ static bool lacks_tokens(const Work& work, int rank) {
        if constexpr (kGrouped_)
            return first_token(work, rank) >= work.end;
        else
            return false;
    }

    struct NoRing {
        __device__ void init(int) {}
    };
    // The scales of a step's tokens times that of its block, for some steps of each warpgroup. Those of a
    // step are full when they are written, and empty when each of four warps has read them.
    struct Factors : NoRing {
        static constexpr int kSteps = 2;
        float of[kRings][kSteps][Base::kTileTokens];
        Ring<kSteps> rings[kRings];

        __device__ void init(int) {
            for (auto& ring : rings) ring.init(4);
        }
    };
    // Scales of a warpgroup's tokens, which multiply sums: every fourth lane has the same two of each eight.
    struct EndScales {
        alignas(16) float of[Base::kWarpgroups][4][Base::kTileTokens / 4 + 4];  // without conflicts of banks

        __device__ float& of_token(int warpgroup, int token) {
            return of[warpgroup][token / 2 % 4][token / 8 * 2 + token % 2];
        }
    };
    struct Shared {
        alignas(1024) char input[kRings][kStages][Base::kInputBytes];
        alignas(1024) char weight[kRings][kStages][kFeatureHalves][Weight::kStageBytes];
        alignas(1024) char output[Base::kWarpgroups][kChunks][Base::kChunkBytes];
        [[no_unique_address]] std::conditional_t<Base::kScaled, Factors, NoRing> input_ring;
        Ring<kStages> weight_ring[kRings];  // of both operands
        Barrier residual[Base::kWarpgroups * kFeatureHalves][kChunks];
        Schedule schedule;
        [[no_unique_address]] std::conditional_t<Weight::kLarge, EndScales, NoScales> factors;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
    static_assert(kSharedBytes <= kSharedCapacity);
};
template <class Math, int kRows, int kTokens, Op kOp, bool kGrouped>
using PingPongTraits = DdsTraits<Math, HalvedWeight<Math, kRows, kTokens, kOp>, 2, 1, kTokens, kGrouped>;

// The products of 64 features: 8 bits are read along k alone.
template <class Math, Op kOp, int kTokens, bool kBytes = is_quantized(Math::kInput)>
struct HalvedAtom {
    using Type = typename Math::template ByteAtom<kTokens>;
};
template <class Math, Op kOp, int kTokens>
struct HalvedAtom<Math, kOp, kTokens, false> {
    using Major = cute::SM90::GMMA::Major;
    using Type = typename Math::template Atom<kOp == Op::dds_nn ? Major::MN : Major::K, Major::K, kTokens>;
};

// Its activations have no second parts.
template <class Traits, int kThreads>
__device__ void split_input(typename Traits::Shared&, const typename Traits::NoRing&, int) {}

// Traits for an epilogue whose sums are scaled already.
template <class Traits>
struct ScaledTraits : Traits {
    static constexpr bool kScaled = true;
};

template <class Math, int kRows, int kTokens, Op kOp, bool kGrouped>
struct DdsProducer<PingPongTraits<Math, kRows, kTokens, kOp, kGrouped>> {
    using Traits = PingPongTraits<Math, kRows, kTokens, kOp, kGrouped>;
    using Weight = typename Traits::Weight;
    using Work = typename Traits::Work;
    using Queued = typename Ring<Traits::Schedule::kQueue>::Position;
    using Position = typename Ring<Traits::kStages>::Position;

    const DdsArguments& arguments;
    typename Traits::Shared& shared;
    const DdsPlan& plan;
    int rank;
    int lane;
    bool elected;

    // One warp: reads the plan of a tile and what its end needs, which then are in L1.
    template <bool>
    __device__ void load_input() const {
        Queued next;
        while (true) {
            const Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) return;
            // All are asked for before one is waited for.
            const int at = work.step * pieces() + lane;
            const bool walks = lane < work.steps * pieces();
            const int k = walks ? __ldg(plan.k + at) : 0, slot = walks ? __ldg(plan.slots + at) : 0;
            const int feature = __ldg(plan.rows + work.tile) * kRows + kRows / kWarpSize * lane;
            const int token = Traits::first_token(work, rank) + Traits::kTileTokens / kWarpSize * lane;
            using Bits = std::conditional_t<sizeof(typename Traits::Result) == 2, uint16_t, uint32_t>;
            float of_feature = 0, of_token = 0;
            if constexpr (Traits::kScales) {
                of_feature = __ldg(arguments.scales + feature);
                of_token = __ldg(arguments.x_scales + min(token, arguments.tokens - 1));
            }
            const Bits* const bias = static_cast<const Bits*>(arguments.bias);
            const uint32_t of_bias = bias == nullptr ? 0 : bias[feature];
            asm volatile("" ::"r"(k), "r"(slot), "f"(of_feature), "f"(of_token), "r"(of_bias));
        }
    }

    // One warp for each ring: both operands, in boxes of one block, and zeros where a step lacks its second.
    // Scales inside of the sums are asked for with a step, and their products written after the next one's
    // operands have been asked for.
    __device__ void load_weight(int ring) const {
        if (Weight::kLarge && ring == 0) return load_ahead();
        Queued next;
        Position position;
        [[maybe_unused]] StepScales scales;
        for (int turn = 0;; turn ^= 1) {
            const Work work = shared.schedule.pop(next, lane);
            if (work.tile < 0) break;
            if (ring != (Traits::kRings == 2 ? turn : 0)) continue;
            int2 steps = read(work, work.step);
            load_tile(ring, position, work, steps, scales, [] {});
        }
        if (ring < Traits::kRings)
            shared.weight_ring[ring].wait_all_empty(position, Traits::stages(arguments));
    }

  private:
    // Scales of the lane's block, of those read, and of each 32nd token of a step.
    struct StepScales {
        float block;
        float tokens[kTokens / 32];
        RingPosition<2> position;  // of their products
    };
    __device__ void read_token_scales(StepScales& scales, int k, int token) const {
        const float* const of = arguments.x_scales + int64_t{k / kScaleGroup} * arguments.group_rows;
#pragma unroll
        for (int i = 0; i < kTokens / kWarpSize; ++i) {
            const int at = token + kWarpSize * i + lane;
            scales.tokens[i] = at < arguments.tokens ? __ldg(of + at) : 0.0f;
        }
    }
    // Writes those of the i-th step, when there is room.
    __device__ void put_factors(int ring, StepScales& scales, int i) const {
        auto& factors = shared.input_ring;
        const float block = __shfl_sync(~0u, scales.block, i);
        factors.rings[ring].wait_empty(scales.position);
#pragma unroll
        for (int j = 0; j < kTokens / kWarpSize; ++j)
            factors.of[ring][scales.position.stage][kWarpSize * j + lane] = scales.tokens[j] * block;
        __syncwarp();
        if (elected) factors.rings[ring].full[scales.position.stage].arrive();
        scales.position.advance();
    }

    // Waits for a stage and loads a step, the i-th of those read, to it. `at`: k of the lane's block, and its
    // corner in values.
    __device__ void load_step(int ring, Position position, int i, int3 at, int pieces, int width, int token,
                              bool lacks_tokens) const {
        shared.weight_ring[ring].wait_empty(position);
        const Barrier& full = shared.weight_ring[ring].full[position.stage];
        char* const input = shared.input[ring][position.stage];
        char* const weight = shared.weight[ring][position.stage][0];
        if (elected)
            full.arrive_and_expect_tx((lacks_tokens ? 0 : Traits::kInputBytes) +
                                      Traits::kFeatureHalves * Weight::kStageBytes);
        for (int piece = 0; piece < pieces; ++piece) {
            const int in = i * pieces + piece, column = __shfl_sync(~0u, at.x, in);
            const int2 corner{__shfl_sync(~0u, at.y, in), __shfl_sync(~0u, at.z, in)};
            if (elected) {
                if (!lacks_tokens)
                    load_box(&arguments.input, full, Multicast{1},
                             input + piece * width * Traits::kTokenBytes, column, token);
                Weight::load(
                    arguments, full, Multicast{Traits::kAllRanks}, weight,
                    (piece * Weight::kFeatures + rank * kRows / 2) * width * Traits::kInputElementBytes,
                    corner);
            }
        }
    }

    // Loads the only ring: the next tile is taken, and what the plan says of it asked for, while a stage of
    // the one before is waited for.
    __device__ void load_ahead() const {
        Queued next;
        Position position;
        Work next_work;
        int2 steps;
        const auto take = [&] {
            next_work = shared.schedule.pop(next, lane);
            steps = read(next_work, next_work.step);
        };
        take();
        while (next_work.tile >= 0) {
            const Work work = next_work;
            if (work.steps == 0) take();
            StepScales none;
            load_tile(0, position, work, steps, none, take);
        }
        shared.weight_ring[0].wait_all_empty(position);
    }

    // The k and slot of the lane's block in the plan, of the blocks from a step of a tile on.
    __device__ int2 read(const Work& work, int first) const {
        const int at = first * pieces() + lane;
        return at < (work.step + work.steps) * pieces() ? int2{__ldg(plan.k + at), __ldg(plan.slots + at)}
                                                        : int2{};
    }

    // Loads a tile. `next_steps`: what read() says of its first steps. Calls before_last() before its last
    // one.
    template <class Visit>
    __device__ void load_tile(int ring, Position& position, const Work& work, int2& next_steps,
                              [[maybe_unused]] StepScales& scales, Visit before_last) const {
        const int width = Traits::kStep / pieces(), steps_read = kWarpSize / pieces();
        const int token = Traits::first_token(work, rank), end = work.step + work.steps;
        const bool lacks_tokens = Traits::lacks_tokens(work, rank);
        for (int first = work.step; first < end; first += steps_read) {
            const auto [k, slot] = next_steps;
            next_steps = read(work, first + steps_read);
            const int from = k < 0 ? arguments.k_size : k;
            const auto [x, y] =
                Weight::corner(arguments, slot, rank * kRows / 2, from & arguments.k_block - 1);
            if constexpr (Traits::kScaled) scales.block = __ldg(arguments.scales + slot);
            for (int i = 0; i < min(steps_read, end - first); ++i) {
                if (first + i == end - 1) before_last();
                load_step(ring, position, i, int3{from, x, y}, pieces(), width, token, lacks_tokens);
                __syncwarp();
                position.advance(Traits::stages(arguments));
                if constexpr (Traits::kScaled) {
                    if (i > 0) put_factors(ring, scales, i - 1);
                    read_token_scales(scales, __shfl_sync(~0u, k, i), token);
                }
            }
            if constexpr (Traits::kScaled) put_factors(ring, scales, min(steps_read, end - first) - 1);
        }
    }

    __device__ int pieces() const { return kRows == 128 ? 1 : plan.pieces; }

    static constexpr int kWarpSize = 32;
};

// The products of a warpgroup's tiles, and what all of their ends have in common.
template <class Math, int kRows, int kTokens, Op kOp, bool kGrouped>
class PingPongProducts {
  public:
    using Traits = PingPongTraits<Math, kRows, kTokens, kOp, kGrouped>;

    __device__ PingPongProducts(const DdsArguments& arguments, typename Traits::Shared& shared,
                                const DdsPlan& plan, int rank, int warpgroup)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          warpgroup_(warpgroup),
          ring_(Traits::kRings == 2 ? warpgroup : 0),
          lane_(threadIdx.x % kWarpSize) {}

  protected:
    using Work = typename Traits::Work;
    using Half = typename Traits::Accumulator[Traits::kSums];
    using Sums = Half[Traits::kFeatureHalves];
    using Atom = typename HalvedAtom<Math, kOp, Traits::kTileTokens>::Type;
    static constexpr bool kPromotes = Traits::kPromotes, kCarries = Traits::kCarries;
    static constexpr bool kHalved = !is_quantized(Traits::Math::kInput);
    static constexpr bool kFinishesHalves = Traits::kFinishesHalves;
    static constexpr int kWarpSize = 32;
    static constexpr int kTurns = 5;  // the first of two barriers, behind those of the epilogue

    template <class Visit>
    __device__ static void each_half(Visit visit) {
#pragma unroll
        for (int half = 0; half < Traits::kFeatureHalves; ++half) visit(half);
    }

    // Steps of the other warpgroup.
    __device__ void skip(int steps) {
        constexpr int kLent = Traits::kStages - 1;
        if (Traits::stages(arguments_) == kLent)
            position_.template skip<kLent>(steps);
        else
            position_.skip(steps);
    }

    // Steps of a tile without tokens. The warps stay together: see release_input() of other kernels.
    __device__ void pass_over(int steps) {
        for (int step = 0; step < steps; ++step) {
            shared_.weight_ring[ring_].wait_full(position_);
            __syncwarp();
            sync();
            release(position_.stage);
            position_.advance(Traits::stages(arguments_));
        }
    }

    __device__ static void clear(Sums& sums) {
        asm volatile("");  // see DdsConsumer
        each_half([&](int half) {
#pragma unroll
            for (int i = 0; i < Traits::kSums; ++i) sums[half][i] = 0;
        });
    }

    // Some steps of a tile, as many as there are lanes or less.
    __device__ void multiply(Sums& sums, int first, int count) {
        for (int step = 0; step < count; ++step) {
            shared_.weight_ring[ring_].wait_full(position_);
            if constexpr (kPromotes)
                promote(sums, [] {});
            else
                keep(sums, first + step > 0);
            position_.advance(Traits::stages(arguments_));
        }
    }

    __device__ void begin_carrying(const Work& work) {
        const int interval = arguments_.carried_products;
        carry_times_.begin(interval, 0, 1);
        carries_ = work.steps > interval / (2 * Traits::Weight::kStepProducts);
        if (carries_) each_half([&](int half) { carried_[half].begin(); });
    }
    __device__ void add_carried(Sums& sums) const {
        if (carries_) each_half([&](int half) { carried_[half].add_to(sums[half]); });
    }

    __device__ void release_multiplied() {
        if (multiplied_ >= 0) release(multiplied_);
        multiplied_ = -1;
    }

    // Half of the tokens after the other, in the same registers. These are the rows of the products: a thread
    // has two of 64, and their factors at hand if there are scales inside of the sums. `meanwhile`: what is
    // done with the first half while the other one is multiplied.
    template <class Meanwhile>
    __device__ void promote(Sums& sums, Meanwhile meanwhile) {
        Half products;
        [[maybe_unused]] float2 factors[2];
        each_half([&](int half) {
            const char* const input =
                shared_.input[ring_][position_.stage] + half * (Traits::kInputBytes / 2);
            multiply_step<Atom>(products, arguments_.tokens_by_k, operand_address(input), arguments_.weight,
                                operand_address(shared_.weight[ring_][position_.stage][0]), false);
            if constexpr (Traits::kScaled)
                if (half == 0) read_factors(factors);
            if (half == 1) meanwhile();
            cute::warpgroup_wait<0>();
            if (half == 1) release(position_.stage);
#pragma unroll
            for (int i = 0; i < Traits::kSums; ++i)
                if constexpr (Traits::kScaled)
                    sums[half][i] =
                        fmaf(products[i], i / 2 % 2 == 0 ? factors[half].x : factors[half].y, sums[half][i]);
                else
                    sums[half][i] += products[i];
        });
    }

    // Scales outside of the sums: of a token, and of the thread's features in each half.
    __device__ float token_scale(int token) const {
        return token < arguments_.tokens ? __ldg(arguments_.x_scales + token) : 0.0f;
    }
    struct OfFeatures {
        float2 of[Traits::kFeatureHalves];
    };
    template <class Element>
    __device__ OfFeatures read_of_features(const void* all, int row) const {
        OfFeatures found;
        const Element* const first = static_cast<const Element*>(all) + row * Traits::kTileFeatures +
                                     threadIdx.x % 128 / kWarpSize * 16 + lane_ / 4;
        const int second = to_second<Traits::kPairsRows>(arguments_, lane_ / 4);
#pragma unroll
        for (int half = 0; half < Traits::kFeatureHalves; ++half) {
            const Element* const of = first + half * Traits::kWarpgroupFeatures;
            found.of[half] = {to_float(__ldg(of)), to_float(__ldg(of + second))};
        }
        return found;
    }
    __device__ OfFeatures read_feature_scales(int row) const {
        return read_of_features<float>(arguments_.scales, row);
    }
    __device__ OfFeatures read_bias(int row) const {
        return arguments_.bias == nullptr ? OfFeatures{}
                                          : read_of_features<typename Traits::Result>(arguments_.bias, row);
    }

    // The thread in its warpgroup. The compiler cannot see it, and computes nothing of it before the loop, in
    // registers.
    __device__ static int unseen_thread() {
        int thread = threadIdx.x % 128;
        asm volatile("" : "+r"(thread));
        return thread;
    }

    __device__ void sync() const {
        cutlass::arch::NamedBarrier::sync(128, 1 + Traits::kFeatureHalves * warpgroup_);
    }

    // One thread. Of a grouped product only tokens of the group are stored.
    __device__ void store_box(const char* buffer, int x, int y, const Work& work) const {
        if constexpr (kGrouped) {
            if (y >= work.end) return;
            store_range_box(&arguments_.output, buffer, x, y, min(work.end - y, Traits::kChunkTokens));
        } else {
            cute::SM90_TMA_STORE_2D::copy(&arguments_.output, buffer, x, y);
        }
        cute::tma_store_arrive();
    }

    const DdsArguments& arguments_;
    typename Traits::Shared& shared_;
    const DdsPlan& plan_;
    int rank_;
    int warpgroup_;
    int ring_;
    int lane_;
    RingPosition<Traits::kStages> position_;

  private:
    __device__ void keep(Sums& sums, bool add) {
        if constexpr (kCarries) carry(sums);
        cute::warpgroup_arrive();
        each_half([&](int half) {
            const uint32_t tokens = operand_address(shared_.input[ring_][position_.stage]);
            const uint32_t weight = operand_address(shared_.weight[ring_][position_.stage][half]);
            wgmma_of_step<Atom>(sums[half], arguments_.weight, weight, arguments_.tokens_by_k, tokens, add);
            if (kHalved || half == Traits::kFeatureHalves - 1) cute::warpgroup_commit_batch();
        });
        if (multiplied_ >= 0) {
            cute::warpgroup_wait<kHalved ? Traits::kFeatureHalves : 1>();
            release(multiplied_);
        }
        multiplied_ = position_.stage;
    }
    __device__ void carry(Sums& sums) {
        if (carry_times_.are_due() && carries_) {
            cute::warpgroup_wait<0>();
            release_multiplied();
            const float factor = carry_times_.factor();
            // Always true, see DdsConsumer.
            if (arguments_.carried_products > 0)
                each_half([&](int half) { carried_[half].carry(sums[half], factor); });
        }
        carry_times_.add(Traits::Weight::kStepProducts);
    }

    // The factors of a thread's tokens, two of each half.
    __device__ void read_factors(float2 (&factors)[2]) {
        auto& ring = shared_.input_ring.rings[ring_];
        ring.wait_full(factors_);
        const float* const of =
            shared_.input_ring.of[ring_][factors_.stage] + threadIdx.x % 128 / kWarpSize * 16 + lane_ / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) factors[half] = {of[64 * half], of[64 * half + 8]};
        __syncwarp();
        if (lane_ == 0) ring.empty[factors_.stage].arrive();
        factors_.advance();
    }

    __device__ void release(int stage) const {
        const int thread = threadIdx.x % 128;
        if (thread < Traits::kRanks) shared_.weight_ring[ring_].empty[stage].arrive(thread);
    }

    int multiplied_ = -1;      // stage of the products under way
    RingPosition<2> factors_;  // of scales inside of the sums
    bool carries_ = false;
    CarryTimes carry_times_;
    [[no_unique_address]] std::conditional_t<kCarries, CarriedSums<Traits::kSums>, NoCarriedSums>
        carried_[Traits::kFeatureHalves];
};

template <class Math, int kRows, int kTokens, Op kOp, bool kGrouped, bool kRowMajorInput>
class DdsConsumer<PingPongTraits<Math, kRows, kTokens, kOp, kGrouped>, kRowMajorInput>
    : PingPongProducts<Math, kRows, kTokens, kOp, kGrouped> {
    using Base = PingPongProducts<Math, kRows, kTokens, kOp, kGrouped>;
    using Base::arguments_, Base::shared_, Base::plan_, Base::rank_, Base::warpgroup_, Base::ring_;
    using Base::kCarries, Base::kHalved, Base::kFinishesHalves, Base::kPromotes, Base::kTurns,
        Base::kWarpSize;
    using Base::lane_, Base::position_, Base::clear, Base::each_half, Base::release_multiplied, Base::sync;
    using Base::multiply, Base::promote, Base::store_box;
    using typename Base::Half, typename Base::Sums, typename Base::Traits, typename Base::Work;
    using typename Base::OfFeatures;
    using Epilogue = DdsEpilogue<ScaledTraits<Traits>>;
    using Results = float[Traits::kSums];

  public:
    using Base::Base;

    __device__ void run() {
        // The epilogue needs no registers for what is known here.
        __builtin_assume(arguments_.row_block == kRows);
        __builtin_assume(arguments_.row_shift == (kRows == 128 ? 7 : 6));
        __builtin_assume(arguments_.row_width == Traits::kWarpgroupFeatures);
        __builtin_assume(arguments_.warpgroup_rows == 1);
        if constexpr (kFinishesHalves) __builtin_assume(arguments_.output_layout == Layout::row_major);
        typename Ring<Traits::Schedule::kQueue>::Position next;
        Sums sums;
        clear(sums);  // else they have registers from the beginning on, where there are fewer
        uint32_t residual_parity = 0;
        [[maybe_unused]] int has_residual = arguments_.has_residual;
        // A register, instead of a constant that is read for each tile.
        if constexpr (kFinishesHalves) asm volatile("" : "+r"(has_residual));
        if (!kPromotes && warpgroup_ == 1) cutlass::arch::NamedBarrier::arrive(256, kTurns);
        for (int turn = 0;; turn ^= 1) {
            const Work work = shared_.schedule.pop(next, lane_);
            if (work.tile < 0) break;
            if (turn != warpgroup_) {
                if constexpr (!kPromotes) this->skip(work.steps);
                continue;
            }
            [[maybe_unused]] std::conditional_t<kPromotes, RowScales, EndScales> scales;
            if constexpr (Traits::kScales && kPromotes)
                scales = read_row_scales(work);
            else if constexpr (Traits::kScales)
                scales = read_end_scales(work);
            const int row = __ldg(plan_.rows + work.tile);
            if constexpr (kFinishesHalves)
                if (has_residual && !Traits::lacks_tokens(work, rank_)) load_residual(work, row);
            if constexpr (kPromotes)
                clear(sums);
            else
                cutlass::arch::NamedBarrier::sync(256, kTurns + warpgroup_);
            const bool lacks_tokens = Traits::lacks_tokens(work, rank_);
            if (lacks_tokens) this->pass_over(work.steps);
            if constexpr (kCarries) this->begin_carrying(work);
            // The end of a tile of plain results begins with its last step, see finish_scaled().
            const bool is_plain = Traits::kScaled && Epilogue::is_plain(arguments_);
            const int steps = is_plain ? work.steps - 1 : work.steps;
            for (int first = 0; !lacks_tokens && first < steps; first += kWarpSize)
                multiply(sums, first, min(kWarpSize, steps - first));
            if constexpr (!kPromotes) {
                cutlass::arch::NamedBarrier::arrive(256, kTurns + (warpgroup_ ^ 1));
                if constexpr (!kHalved) {
                    cute::warpgroup_wait<0>();
                    release_multiplied();
                    if (work.steps == 0) clear(sums);
                }
                if constexpr (kCarries) this->add_carried(sums);
            }
            if (lacks_tokens) {
                if constexpr (kHalved)
                    cute::warpgroup_wait<0>();  // of none, which the compiler does not know
                continue;
            }
            if constexpr (Traits::kScales && !kPromotes) scale(sums, scales);
            const int thread = Base::unseen_thread();
            if constexpr (kFinishesHalves) {
                // In 8 bits, nothing of the end runs beside the last products.
                if (!kHalved && Epilogue::is_plain(arguments_))
                    store_plain(sums, work, row, thread);
                else
                    finish(sums, work, row, thread, residual_parity & 1);
            } else if constexpr (Traits::kScaled) {
                finish_scaled(sums, work, row, thread, residual_parity & 1, is_plain);
            } else if constexpr (kPromotes) {
                const ColumnScales of_features = read_column_scales(row);
                const auto store = [&](auto plain) {
                    each_half([&](int half) {
                        scale(sums[half], scales.tokens[half], of_features);
                        finish_tokens<plain()>(sums[half], half, work, row, thread, residual_parity & 1);
                    });
                };
                if (Epilogue::is_plain(arguments_))
                    store(std::true_type{});
                else
                    store(std::false_type{});
            } else {
                static_assert(Traits::kFeatureHalves == 1);
                Epilogue epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_],
                                  warpgroup_, thread, residual_parity);
                epilogue.prepare_row(row);
                if constexpr (kGrouped) epilogue.set_group(work);
                epilogue.read_bias();
                epilogue.begin(Traits::first_token(work, rank_));
                epilogue.store(sums[0]);
            }
            residual_parity = ~residual_parity;
        }
        cute::tma_store_wait<0>();
    }

  private:
    // Features before those of the tile's weight.
    __device__ int features_before(const Work& work) const {
        if constexpr (kGrouped)
            return work.group * arguments_.group_rows * kRows;
        else
            return 0;
    }

    // Adds the residual of a chunk to its sums, or multiplies them by its gate, when it has arrived.
    template <bool kRowMajor, class Staging>
    __device__ void add_residual(const Staging& staging, float* sums, char* buffer, const Barrier& arrived,
                                 uint32_t parity) const {
        wait(arrived, parity);
        if (arguments_.gate_activation != Activation::none)
            staging.template activate<kRowMajor>(buffer, arguments_.gate_activation);
        __syncwarp();
        with_join(arguments_, [&](auto join) { staging.template combine<kRowMajor>(sums, buffer, join); });
    }

    // The end of a tile with scales inside of the sums. Plain results: of the first half of the tokens while
    // the other one's last products are under way.
    __device__ void finish_scaled(Sums& sums, const Work& work, int row, int thread, uint32_t parity,
                                  bool is_plain) {
        const auto finish = [&](auto plain, int half) {
            finish_tokens<plain()>(sums[half], half, work, row, thread, parity);
        };
        if (!is_plain) return each_half([&](int half) { finish(std::false_type{}, half); });
        const auto finish_first = [&] { finish(std::true_type{}, 0); };
        if (work.steps > 0) {
            shared_.weight_ring[ring_].wait_full(position_);
            promote(sums, finish_first);
            position_.advance();
        } else {
            finish_first();
        }
        finish(std::true_type{}, 1);
    }

    // The end of half of the tokens of a tile, which are rows of sums. Each of two warps stores 64 features.
    template <bool kPlain>
    __device__ void finish_tokens(Half& sums, int half, const Work& work, int row, int thread,
                                  uint32_t parity) const {
        using Result = typename Traits::Result;
        const bool row_major = kPlain || kGrouped || arguments_.output_layout == Layout::row_major;
        const int warp = thread / kWarpSize, lane = thread % kWarpSize, feature = row * kRows;
        auto& buffers = shared_.output[warpgroup_];
        const auto& arrived = shared_.residual[Traits::kFeatureHalves * warpgroup_ + half];
        const bool has_residual = !kPlain && arguments_.has_residual;
        const int token = Traits::first_token(work, rank_) + Traits::kTileTokens / 2 * half;
        const int first = feature - features_before(work);
        const auto own_chunk = [&](auto visit) {
            if (lane > 0 || warp >= Traits::kChunks) return;
            const int x = first + Traits::kWarpgroupFeatures * warp;
            visit(row_major ? x : token, row_major ? token : x);
        };
        own_chunk([&](int x, int y) {
            cute::tma_store_wait<0>();
            if (!has_residual) return;
            arrived[warp].arrive_and_expect_tx(Traits::kChunkBytes);
            load_box(&arguments_.residual, arrived[warp], Multicast{1}, buffers[warp], x, y);
        });
        if constexpr (!kPlain) {
            if (arguments_.bias != nullptr) {
                const auto* const bias = static_cast<const Result*>(arguments_.bias) + feature + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < Traits::kSums; ++i) sums[i] += to_float(bias[i / 4 * 8 + i % 2]);
            }
            activate_all<Result>(sums, arguments_.activation);
        }
        sync();
        // Results lie as features whose rows are tokens, or the other way round.
        const auto put = [&](auto lines_of_tokens, auto alone) {
            constexpr bool kAsFeatures = !lines_of_tokens();
            const HalfStaging<Result> staging(arguments_, thread, lines_of_tokens());
#pragma unroll
            for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
                float* const of = sums + chunk * (Traits::kSums / Traits::kChunks);
                if (!alone() && has_residual)
                    add_residual<kAsFeatures>(staging, of, buffers[chunk], arrived[chunk], parity);
                staging.template put<kAsFeatures>(of, buffers[chunk]);
            }
        };
        if (row_major && !has_residual)
            put(std::true_type{}, std::true_type{});
        else if (row_major)
            put(std::true_type{}, std::false_type{});
        else
            put(std::false_type{}, std::false_type{});
        cutlass::arch::fence_view_async_shared();
        sync();
        own_chunk([&](int x, int y) { store_box(buffers[warp], x, y, work); });
    }

    // The end of a tile of row-major results: one half of the features after the other, by the same buffers.
    // Each warp stores the results of a chunk, and reads its residual or gate, which is asked for before the
    // products. Where no stage is lent, the warps of the first half's chunks do so for the second half when
    // the first one's results are stored.
    using Staging = HalfStaging<typename Traits::Result>;
    static constexpr int kChunks = Traits::kChunks, kChunkSums = Traits::kChunkTokens / 2;

    struct Chunk {
        bool is_own;  // of the lane
        int half, chunk;
        int feature, token;  // the first ones
    };
    __device__ Chunk chunk_of(const Work& work, int row, int thread) const {
        static_assert(Traits::kFeatureHalves * kChunks == 4, "a warp for each");
        const int warp = thread / kWarpSize, half = warp / kChunks, chunk = warp % kChunks;
        return {thread % kWarpSize == 0, half, chunk,
                row * kRows + half * Traits::kWarpgroupFeatures - features_before(work),
                Traits::first_token(work, rank_) + chunk * Traits::kChunkTokens};
    }
    __device__ const Barrier& arrival_of(int half, int chunk) const {
        return shared_.residual[Traits::kFeatureHalves * warpgroup_ + half][chunk];
    }
    // The second half's buffers are in the last stage, if that is lent.
    static constexpr bool kLends = Traits::kLendsStage;
    __device__ char* residual_of(int half, int chunk) const {
        constexpr int kLast = Traits::kStages - 1;
        if (!kLends || half == 0) return shared_.output[warpgroup_][chunk];
        char* const lent = warpgroup_ == 0 ? shared_.input[0][kLast] : shared_.weight[0][kLast][0];
        return lent + chunk * Traits::kChunkBytes;
    }
    __device__ void load_residual(const Work& work, int row) const {
        const Chunk own = chunk_of(work, row, threadIdx.x % 128);
        if (own.is_own && (own.half == 0 || kLends)) load_own(own, own.half);
    }
    // One thread, which stores from the same buffer.
    __device__ void load_own(const Chunk& own, int half) const {
        const Barrier& arrived = arrival_of(half, own.chunk);
        cute::tma_store_wait<0>();
        arrived.arrive_and_expect_tx(Traits::kChunkBytes);
        load_box(&arguments_.residual, arrived, Multicast{1}, residual_of(half, own.chunk),
                 feature_of(own, half), own.token);
    }
    __device__ static int feature_of(const Chunk& own, int half) {
        return own.feature + (half - own.half) * Traits::kWarpgroupFeatures;
    }

    __device__ void finish(Sums& sums, const Work& work, int row, int thread, uint32_t parity) {
        const Staging staging(arguments_, thread);
        const Chunk own = chunk_of(work, row, thread);
        const bool is_plain = arguments_.bias == nullptr && arguments_.activation == Activation::none;
        if constexpr (kHalved) {
            // The first half is stored while the last products of the second run.
            if (is_plain && !arguments_.has_residual && work.steps > 0) {
                cute::warpgroup_wait<Traits::kFeatureHalves - 1>();
                store_half(sums[0], 0, staging, own, work);
                cute::warpgroup_wait<0>();
                release_multiplied();
                return store_half(sums[1], 1, staging, own, work);
            }
            cute::warpgroup_wait<0>();
            release_multiplied();
            if (work.steps == 0) clear(sums);
        }
        const OfFeatures bias = this->read_bias(row);
        each_half([&](int half) {
            auto& results = reinterpret_cast<Results&>(sums[half]);
            if (!is_plain) add_bias_and_activate(results, bias.of[half]);
            if (!arguments_.has_residual) return store_half(results, half, staging, own, work);
            const bool is_asker = own.is_own && own.half == 0;
            if (!kLends && half == 1 && is_asker) load_own(own, half);
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                float* const of = results + chunk * kChunkSums;
                char* const buffer = residual_of(half, chunk);
                add_residual<true>(staging, of, buffer, arrival_of(half, chunk), parity);
                staging.template put<true>(of, buffer);
            }
            if (!kLends) store_own(residual_of(half, own.chunk), own, half, work, is_asker);
        });
        if (arguments_.has_residual && kLends)
            store_own(residual_of(own.half, own.chunk), own, own.half, work, own.is_own);
    }
    __device__ void store_plain(Sums& sums, const Work& work, int row, int thread) const {
        each_half([&](int half) {
            const int place = Traits::kFeatureHalves * warpgroup_ + half;
            Epilogue epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[place], place, thread,
                              0);
            epilogue.prepare_row(row);
            if constexpr (kGrouped) epilogue.set_group(work);
            epilogue.store_plain(sums[half], Traits::first_token(work, rank_));
        });
    }
    __device__ void store_half(const Results& results, int half, const Staging& staging, const Chunk& own,
                               const Work& work) const {
        if (own.is_own) cute::tma_store_wait<0>();
        sync();
        auto& buffers = shared_.output[warpgroup_];
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
            staging.template put<true>(results + chunk * kChunkSums, buffers[chunk]);
        store_own(buffers[own.chunk], own, half, work, own.is_own && own.half == half);
    }
    __device__ void store_own(const char* buffer, const Chunk& own, int half, const Work& work,
                              bool stores) const {
        cutlass::arch::fence_view_async_shared();
        sync();
        if (stores) store_box(buffer, feature_of(own, half), own.token, work);
    }

    // Scales outside of the sums, which are read before these are computed: of each 32nd token, and of the
    // thread's features.
    struct EndScales {
        float tokens[Traits::kTileTokens / kWarpSize];
        OfFeatures features;
    };
    __device__ EndScales read_end_scales(const Work& work) const {
        EndScales scales;
#pragma unroll
        for (int i = 0; i < Traits::kTileTokens / kWarpSize; ++i)
            scales.tokens[i] = this->token_scale(Traits::first_token(work, rank_) + kWarpSize * i + lane_);
        scales.features = this->read_feature_scales(__ldg(plan_.rows + work.tile));
        return scales;
    }
    __device__ void add_bias_and_activate(Results& sums, float2 bias) const {
        if (arguments_.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < Traits::kSums; ++i) sums[i] += i / 2 % 2 == 0 ? bias.x : bias.y;
        }
        activate_all<typename Traits::Result>(sums, arguments_.activation);
    }
    // See DdsEpilogue for where the sums of a thread are.
    __device__ void scale(Sums& sums, const EndScales& scales) const {
#pragma unroll
        for (int i = 0; i < Traits::kSums; i += 4) {
            const int token = 2 * i, lane = token % kWarpSize + lane_ % 4 * 2;
            const float of_first = __shfl_sync(~0u, scales.tokens[token / kWarpSize], lane);
            const float of_second = __shfl_sync(~0u, scales.tokens[token / kWarpSize], lane + 1);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float of_token = j % 2 == 0 ? of_first : of_second;
#pragma unroll
                for (int half = 0; half < Traits::kFeatureHalves; ++half) {
                    auto& results = reinterpret_cast<Results&>(sums[half]);
                    const float2 features = scales.features.of[half];
                    const float of_feature = j / 2 == 0 ? features.x : features.y;
                    results[i + j] = scaled(sums[half][i + j], of_token, of_feature);
                }
            }
        }
    }

    // The same where tokens are the rows of sums, two of each half. Those of features are read when there are
    // no products any more, which leave no registers for them.
    struct RowScales {
        float2 tokens[2];
    };
    __device__ RowScales read_row_scales(const Work& work) const {
        RowScales scales;
        const int first = Traits::first_token(work, rank_) + threadIdx.x % 128 / kWarpSize * 16 + lane_ / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            scales.tokens[half] = {this->token_scale(first + 64 * half),
                                   this->token_scale(first + 64 * half + 8)};
        return scales;
    }
    struct ColumnScales {
        float2 of[Traits::kSums / 4];  // of two in each eight
    };
    __device__ ColumnScales read_column_scales(int row) const {
        ColumnScales scales;
        const float* const first = arguments_.scales + row * kRows + lane_ % 4 * 2;
#pragma unroll
        for (int i = 0; i < Traits::kSums / 4; ++i)
            scales.of[i] = {__ldg(first + 8 * i), __ldg(first + 8 * i + 1)};
        return scales;
    }
    __device__ static void scale(Half& sums, float2 of_tokens, const ColumnScales& scales) {
#pragma unroll
        for (int i = 0; i < Traits::kSums; ++i) {
            const float2 of_features = scales.of[i / 4];
            sums[i] = scaled(sums[i], i / 2 % 2 == 0 ? of_tokens.x : of_tokens.y,
                             i % 2 == 0 ? of_features.x : of_features.y);
        }
    }
};

// The sums of a thread leave registers for little else. So the scales of tokens lie in shared memory, and
// each 64 tokens are scaled, rounded and stored at a time.
template <class Math, bool kRowMajorInput>
class DdsConsumer<PingPongTraits<Math, 128, 192, Op::dds_nt, false>, kRowMajorInput>
    : PingPongProducts<Math, 128, 192, Op::dds_nt, false> {
    using Base = PingPongProducts<Math, 128, 192, Op::dds_nt, false>;
    using Base::arguments_, Base::shared_, Base::plan_, Base::rank_, Base::warpgroup_, Base::lane_;
    using Base::kTurns, Base::kWarpSize, Base::clear, Base::sync;
    using typename Base::OfFeatures, typename Base::Sums, typename Base::Traits, typename Base::Work;

  public:
    using Base::Base;

    __device__ void run() {
        typename Ring<Traits::Schedule::kQueue>::Position next;
        Sums sums;
        clear(sums);  // else they have registers from the beginning on, where there are fewer
        if (warpgroup_ == 1) cutlass::arch::NamedBarrier::arrive(256, kTurns);
        // Tiles of the other warpgroup lie between.
        const auto take = [&] {
            Work work = shared_.schedule.pop(next, lane_);
            if (work.tile < 0) return work;
            this->skip(work.steps);
            return shared_.schedule.pop(next, lane_);
        };
        Work next_work = warpgroup_ == 0 ? shared_.schedule.pop(next, lane_) : take();
        while (next_work.tile >= 0) {
            const Work work = next_work;
            cutlass::arch::NamedBarrier::sync(256, kTurns + warpgroup_);
            for (int first = 0; first < work.steps; first += kWarpSize)
                this->multiply(sums, first, min(kWarpSize, work.steps - first));
            cutlass::arch::NamedBarrier::arrive(256, kTurns + (warpgroup_ ^ 1));
            // While the last products are under way.
            const int row = __ldg(plan_.rows + work.tile);
            float of_tokens[kOwnTokens];
            read_token_scales(of_tokens, work);
            const OfFeatures scales = this->read_feature_scales(row), bias = this->read_bias(row);
            next_work = take();
            put_token_scales(of_tokens);
            cute::warpgroup_wait<0>();
            this->release_multiplied();
            if (work.steps == 0) clear(sums);
            store<0>(sums, scales, bias, row, work, Base::unseen_thread());
        }
        cute::tma_store_wait<0>();
    }

  private:
    static constexpr int kOwnTokens = (Traits::kTileTokens + 127) / 128;

    // Scales outside of the sums. Those of tokens go to shared memory, where they are when the threads have
    // been waited for.
    __device__ void read_token_scales(float (&scales)[kOwnTokens], const Work& work) const {
#pragma unroll
        for (int i = 0; i < kOwnTokens; ++i)
            scales[i] = this->token_scale(Traits::first_token(work, rank_) + threadIdx.x % 128 + 128 * i);
    }
    __device__ void put_token_scales(const float (&scales)[kOwnTokens]) const {
#pragma unroll
        for (int i = 0; i < kOwnTokens; ++i) {
            const int token = threadIdx.x % 128 + 128 * i;
            if (token < Traits::kTileTokens) shared_.factors.of_token(warpgroup_, token) = scales[i];
        }
    }
    // The scales of two tokens in each of two times eight.
    __device__ float4 scales_of(int token) const {
        return reinterpret_cast<const float4&>(shared_.factors.of_token(warpgroup_, token + lane_ % 4 * 2));
    }

    // Stores all features of a chunk of tokens, and the next chunks. They take two sets of buffers in turn.
    // See HalfStaging for the places.
    template <int kChunk>
    __device__ void store(Sums& sums, const OfFeatures& scales, const OfFeatures& bias, int row,
                          const Work& work, int thread) const {
        constexpr int kHalves = Traits::kFeatureHalves, kChunkTokens = Traits::kChunkTokens;
        constexpr int kSets = Traits::kChunks / kHalves, kSet = kChunk % kSets;
        const int warp = thread / kWarpSize, lane = thread % kWarpSize;
        if constexpr (kChunk == 0) {
            if (lane == 0) cute::tma_store_wait<0>();
            sync();
        }
        const uint32_t place =
            swizzled((lane / 16 * 8 + lane % 8) * kLine + (16 * warp + lane / 8 % 2 * 8) * 2, kLine);
        auto& buffers = shared_.output[warpgroup_];
#pragma unroll
        for (int i = 0; i < kChunkTokens / 16; ++i) {
            uint32_t words[kHalves][4];
            round_tokens(words, sums, scales, bias, kChunk * kChunkTokens + 16 * i);
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                const auto& four = words[half];
                char* const to = buffers[kSet * kHalves + half] + place + 16 * i * kLine;
                cute::SM90_U16x8_STSM_T::copy(four[0], four[1], four[2], four[3],
                                              *reinterpret_cast<cute::uint128_t*>(to));
            }
        }
        cutlass::arch::fence_view_async_shared();
        // The next chunk's buffers are those of one before.
        if constexpr (kChunk + 1 >= kSets && kChunk + 1 < Traits::kAllChunks)
            if (lane == 0) cute::tma_store_wait<0>();
        sync();
        const int half = warp - kSet * kHalves;
        if (lane == 0 && half >= 0 && half < kHalves)
            this->store_box(buffers[warp], row * Traits::kTileFeatures + half * Traits::kWarpgroupFeatures,
                            Traits::first_token(work, rank_) + kChunk * kChunkTokens, work);
        if constexpr (kChunk + 1 < Traits::kAllChunks)
            store<kChunk + 1>(sums, scales, bias, row, work, thread);
    }

    // Scales and rounds 16 tokens: of each half the words of four matrices.
    __device__ void round_tokens(uint32_t (&words)[Traits::kFeatureHalves][4], Sums& sums,
                                 const OfFeatures& scales, const OfFeatures& bias, int token) const {
        const float4 of_tokens = scales_of(token);
        const auto each = [&](auto visit) {
#pragma unroll
            for (int half = 0; half < Traits::kFeatureHalves; ++half)
#pragma unroll
                for (int i = 0; i < 4; ++i) visit(half, i, token / 2 + 2 * i);
        };
        const auto result = [&](int half, int at) -> float& {
            return reinterpret_cast<float (&)[Traits::kSums]>(sums[half])[at];
        };
        each([&](int half, int i, int at) {
            const float of_feature = i % 2 == 0 ? scales.of[half].x : scales.of[half].y;
            result(half, at) = scaled(sums[half][at], i / 2 == 0 ? of_tokens.x : of_tokens.z, of_feature);
            result(half, at + 1) =
                scaled(sums[half][at + 1], i / 2 == 0 ? of_tokens.y : of_tokens.w, of_feature);
        });
        if (arguments_.bias != nullptr) {
            asm volatile("");  // a branch
            each([&](int half, int i, int at) {
                const float of_feature = i % 2 == 0 ? bias.of[half].x : bias.of[half].y;
                result(half, at) += of_feature;
                result(half, at + 1) += of_feature;
            });
        }
        each([&](int half, int i, int at) {
            words[half][i] = rounded<typename Traits::Result>(result(half, at), result(half, at + 1));
        });
    }
};

template <Op kOp, class Math, int kRows, int kTokens, bool kGrouped = false>
struct PingPong : Dds<kOp, Math, 2, 1, kTokens, HalvedWeight<Math, kRows, kTokens, kOp>, kGrouped> {
    static constexpr bool kIsFloat8 = Math::kAccumulation == Accumulation::carried;

    static constexpr Kernel row(const char* name) {
        Kernel row = PingPong::Dds::row(name);
        row.variant = "_own";  // short, as estimates have it
        if constexpr (kIsFloat8) {
            // Fast sums in blocks of 128 have a kernel of their own, whose warpgroups take turns.
            using Fast = Dds<kOp, FastMath<Math>, 2, 1, kTokens,
                             HalvedWeight<FastMath<Math>, kRows, kTokens, kOp>, kGrouped>;
            if constexpr (kRows == 128) row.launch = launch_either<typename PingPong::Dds, Fast>;
            // Sums that are carried over in blocks of 64 take no longer than fast ones.
            row.accumulation = kRows == 128 ? Accumulation::promoted : Accumulation::kept;
        }
        return row;
    }
};

}  // namespace ts::sm90

#define TS_ROW_dds_pingpong(name, op, math, rows, tokens) \
    TS_SM90_ROW(name, PingPong<Op::op, math, rows, tokens>)

// The same for groups of tokens; see dds_grouped.
#define TS_ROW_dds_grouped_pingpong(name, op, math, rows, tokens) \
    TS_SM90_ROW(name, PingPong<Op::op, math, rows, tokens, true>)
