// Wgrad for blocks of 16 x 16 (sm_90, mma.sync).
//   W[n,k] (+)= sum over tokens t of Y[t,n] * X[t,k], for the kept blocks only, in their slots.
// wgmma multiplies 64 features of Y at least, in which nearly every 16 of X have a block where a quarter
// is kept. mma.sync multiplies 16 by 8, at 62 % of its rate, and so nothing but the blocks.
// Operands: Y and X row- or column-major, bf16 or fp16, or row-major float32 (TF32, or three products of it
// with float32's error), through TMA; W in their dtype or float32.
//   stage   [18 units], each row-major [32 tokens][64 features], else [64 features][32 tokens]; of float32
//           [2][16 tokens][32 features]
// CTA: up to 128 blocks that lie in up to 18 units of 64 features of Y and of X (common/list_plan.h). No
// clusters.
// Warps: 1 loads, 16 multiply a list of up to 8 blocks each and keep their sums in registers.
// Loop over tokens: stages of 32, or 16 of float32. ldmatrix, or a load of each word, brings the features of
// X of one block after another, and those of Y where they change: shared memory is the limit, at 512 bytes
// for each block and 16 tokens, or 8.
// Split: tiles of the last round are cut over the tokens where that pays (common/sdd_schedule.h); a second
// kernel adds the sums.
// Chosen where its estimate is least, where few blocks are kept.
#pragma once

#include <cudaTypedefs.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/mma_sm80.hpp>

#include <algorithm>
#include <type_traits>

#include "common/epilogue.cuh"
#include "common/ldmatrix.cuh"
#include "common/list_plan.h"
#include "common/problem.h"
#include "common/sdd_schedule.h"
#include "hopper/atoms.cuh"
#include "hopper/gemm.cuh"
#include "hopper/launch.cuh"
#include "hopper/wgrad_plan.cuh"
#include "tma/launch.cuh"
#include "tma/pace.cuh"
#include "tma/partial_sums.cuh"
#include "tma/ring.cuh"
#include "tma/sdd_launch.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// The arguments of the sdd kernel for blocks of 16 x 16 and what follows from its tile.

struct SddNarrowArguments {
    CUtensorMap y;
    CUtensorMap x;
    const PlanHeader* plan;
    void* values;
    float4* partial;  // [partials][kGroups], see SddPartials, or nullptr
    int* pace;        // the counters, or nullptr
    int steps;        // of 64 tokens
    int ctas;         // that the device holds
    int most_split;   // tiles; 0: none are, and no kernel follows
    bool accumulate;
    int plan_key;  // that the plan must have
    PlanReport plan_report;
};

// Values are stored as Math::Result, the type of the operands or float.
template <class Math_>
struct SddNarrowTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr int kBlock = 16;
    static constexpr int kBlocks = kListBlocks;
    static constexpr int kGroups = kListWarps / 4;  // warpgroups that multiply
    static constexpr int kThreads = 128 * (1 + kGroups);
    static constexpr bool kFloat = sizeof(Input) == 4;
    static constexpr int kStageTokens = kFloat ? 16 : 32;
    // See SddShares: as measured with one tile for each multiprocessor of an H200.
    static constexpr int kStepTime = kFloat ? (Math::kParts > 1 ? 26 : 11) : 3;
    using Schedule = SddSchedule<kStepTime>;
    static constexpr int kBoxFeatures = kFloat ? 32 : kListUnit;  // of row-major operands, that a copy brings
    static constexpr int kBlockSums = kBlock * kBlock / 32;       // of a lane
    static constexpr int kSums = kBlocks * kBlockSums;
    static constexpr int kUnitBytes = kListUnit * kStageTokens * sizeof(Input);
    static constexpr int kStageBytes = kListUnits * kUnitBytes;
    static constexpr int kStages = kSharedCapacity / kStageBytes;

    struct Shared {
        // A unit has lines of 128 bytes, [kStageTokens][kListUnit], or of 64 bytes,
        // [kListUnit][kStageTokens].
        alignas(1024) char stages[kStages * kStageBytes];
        Ring<kStages> ring;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
};

// The warp that loads in the sdd kernel for blocks of 16 x 16.

// The warp that fills the ring.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddNarrowProducer {
    using Schedule = typename Traits::Schedule;

  public:
    __device__ SddNarrowProducer(const SddNarrowArguments& arguments, typename Traits::Shared& shared)
        : arguments_(arguments), shared_(shared), lane_(threadIdx.x % 32) {}

    __device__ void run(const SddPlan& plan, const Schedule& schedule) {
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

// Stores of the sdd kernel for blocks of 16 x 16: sums go into the blocks of values, or as partial sums
// into the workspace.

// Stores what a lane holds of a block, as mma.sync leaves it: four sums of each 16 features of y by 8 of x,
// two neighbours in each of two lines that are 8 apart.
template <class Traits>
class SddNarrowEpilogue {
    using Result = typename Traits::Result;

  public:
    __device__ SddNarrowEpilogue(const SddNarrowArguments& arguments, int slot)
        : block_(slot < 0 ? nullptr
                          : static_cast<Result*>(arguments.values) +
                                int64_t{slot} * Traits::kBlock * Traits::kBlock),
          line_(threadIdx.x % 32 / 4),
          lane_(threadIdx.x % 4) {}

    __device__ void add_stored(float* sums) const {
        if (block_ == nullptr) return;
        for_pairs([&](int line, int column, int at) {
            const Result* const stored = block_ + line * Traits::kBlock + column;
            sums[at] += to_float(stored[0]);
            sums[at + 1] += to_float(stored[1]);
        });
    }

    // Four lanes hold 16 columns of two lines. Of 16 bits, each of them stores eight neighbours, which it
    // gets from the others.
    __device__ void store(const float* sums) const {
        if (block_ == nullptr) return;
        if constexpr (sizeof(Result) == sizeof(float)) {
            for_pairs([&](int line, int column, int at) {
                *reinterpret_cast<float2*>(block_ + line * Traits::kBlock + column) =
                    make_float2(sums[at], sums[at + 1]);
            });
        } else {
            uint32_t words[4];  // of two lines, of eight columns each
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int at = 4 * (q % 2) + 2 * (q / 2);
                words[q] = rounded<Result>(sums[at], sums[at + 1]);
            }
            exchange(words);
            const int line = line_ + 8 * (lane_ / 2), column = 8 * (lane_ % 2);
            *reinterpret_cast<uint4*>(block_ + line * Traits::kBlock + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

  private:
    // `action`: for the line and column of a pair and where its sums are.
    template <class Action>
    __device__ void for_pairs(Action action) const {
#pragma unroll
        for (int i = 0; i < Traits::kBlockSums / 2; ++i)
            action(line_ + 8 * (i % 2), 8 * (i / 2) + 2 * lane_, 2 * i);
    }

    Result* block_;
    int line_;
    int lane_;
};

// Adds the partial sums of the tiles that were split, always in the same order. A CTA is a warpgroup, for one
// block of each warp.
template <class Traits>
__global__ void __launch_bounds__(128)
    sdd_narrow_reduce(const __grid_constant__ SddNarrowArguments arguments) {
    constexpr int kVectors = Traits::kBlockSums / 4;
    const SddPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    const typename Traits::Schedule schedule(plan.tile_count, arguments.steps, arguments.ctas, 1,
                                             arguments.most_split > 0);
    cudaGridDependencySynchronize();
    const int parts = Traits::kBlocks * Traits::kGroups;  // of a tile
    for (int index = blockIdx.x; index < parts * schedule.split_tiles(); index += gridDim.x) {
        const int block = index % Traits::kBlocks, group = index / Traits::kBlocks % Traits::kGroups;
        const SddPartials partials = schedule.partials(index / parts);
        const int tile = schedule.first_split() + index / parts;
        float sums[Traits::kBlockSums] = {};
#pragma unroll 8
        for (int number = 0; number < partials.count(); ++number) {
            const float4* const from = partial_sums<Traits::kSums>(
                arguments.partial, int64_t{Traits::kGroups} * partials.at(number) + group);
            add_sums(from + block * kVectors * 128, sums);
        }
        const int warp = 4 * group + static_cast<int>(threadIdx.x) / 32;
        const SddNarrowEpilogue<Traits> epilogue(
            arguments, __ldg(plan.slots + (tile * kListWarps + warp) * Traits::kBlocks + block));
        if (arguments.accumulate) epilogue.add_stored(sums);
        epilogue.store(sums);
    }
}

// The warps that multiply in the sdd kernel for blocks of 16 x 16.

// Operands of mma.sync in the stages, 16 features by the tokens of a product.
template <class Math, bool kRowMajor, int kBytes = sizeof(typename Math::Input)>
struct ListOperand;

// 16 bits, by ldmatrix.
template <class Math, bool kRowMajor>
struct ListOperand<Math, kRowMajor, 2> {
    static constexpr int kTokens = 16;

    // Address of a lane's part of one ldmatrix: from the beginning of a unit, with an exclusive or of what
    // `strip_offset` says.
    __device__ static uint32_t lane_offset(int lane, bool is_y) {
        const int eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
        const int feature = is_y ? low : high, token = is_y ? high : low;  // whether of the second half
        if (kRowMajor) return (eighth + 8 * token) * 128 + (feature ^ eighth) * 16;
        return (eighth + 8 * feature) * 64 + (token ^ eighth / 2) * 16;
    }

    // `strip`: 16 features of a tile's units.
    __device__ static uint32_t strip_offset(uint32_t strip) {
        return strip / 4 * 4096 | (kRowMajor ? strip % 4 * 32 : strip % 4 * 1024);
    }

    // The address of the `k`-th tokens of a stage.
    __device__ static uint32_t address(uint32_t base, uint32_t at, int k) {
        return kRowMajor ? base + at + 2048 * k : base + (at ^ 32 * k);
    }

    __device__ static void load(uint32_t (&to)[4], uint32_t address) {
        load_matrices<kRowMajor>(to, address);
    }

    // Unless the condition is 0, without a branch, which would cut the code around it in two.
    __device__ static void load_if(uint32_t condition, uint32_t (&to)[4], uint32_t address) {
        if constexpr (kRowMajor)
            asm volatile(
                "{ .reg .pred load; setp.ne.u32 load, %5, 0; "
                "@load ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4]; }"
                : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                : "r"(address), "r"(condition));
        else
            asm volatile(
                "{ .reg .pred load; setp.ne.u32 load, %5, 0; "
                "@load ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4]; }"
                : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                : "r"(address), "r"(condition));
    }
};

// float32, word by word. Of the eight tokens of a product lane 4 g + t has 2 t and 2 t + 1, of features g and
// g + 8: so the lanes of a load read from other banks.
template <class Math>
struct ListOperand<Math, true, 4> {
    static constexpr int kTokens = 8;

    __device__ static uint32_t lane_offset(int lane, bool) {
        const int t = lane % 4, g = lane / 4;
        return 2 * t * 128 + (g / 4 ^ 2 * t) * 16 + g % 4 * 4;
    }
    __device__ static uint32_t strip_offset(uint32_t strip) {
        return strip / 4 * 4096 | strip / 2 % 2 * 2048 | strip % 2 * 64;
    }
    __device__ static uint32_t address(uint32_t base, uint32_t at, int k) { return base + at + 1024 * k; }

    __device__ static void load(uint32_t (&to)[4], uint32_t address) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(address));
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[1]) : "r"(address ^ 32));
        asm volatile("ld.shared.u32 %0, [%1 + 128];" : "=r"(to[2]) : "r"(address ^ 16));
        asm volatile("ld.shared.u32 %0, [%1 + 128];" : "=r"(to[3]) : "r"(address ^ 48));
    }
    __device__ static void load_if(uint32_t condition, uint32_t (&to)[4], uint32_t address) {
        asm volatile(
            "{ .reg .pred load; setp.ne.u32 load, %8, 0; "
            "@load ld.shared.u32 %0, [%4]; @load ld.shared.u32 %1, [%5]; "
            "@load ld.shared.u32 %2, [%6 + 128]; @load ld.shared.u32 %3, [%7 + 128]; }"
            : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
            : "r"(address), "r"(address ^ 32), "r"(address ^ 16), "r"(address ^ 48), "r"(condition));
    }
};

// sums += a b for the 16 features of x in `b`, eight by eight.
template <class Math>
__device__ inline void multiply_strip(float* sums, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* const c = sums + 4 * half;
        if constexpr (Math::kInput == DType::float32) {
            cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[half],
                                                     b[half + 2], c[0], c[1], c[2], c[3]);
        } else {
            using Atom =
                std::conditional_t<Math::kInput == DType::bfloat16, cute::SM80_16x8x16_F32BF16BF16F32_TN,
                                   cute::SM80_16x8x16_F32F16F16F32_TN>;
            Atom::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1], c[0],
                      c[1], c[2], c[3]);
        }
    }
}

// One warp's products of its blocks of all tiles.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddNarrowConsumer {
    using Sum = typename Traits::Accumulator;
    using Schedule = typename Traits::Schedule;
    using OperandX = ListOperand<typename Traits::Math, kRowMajorX>;
    using OperandY = ListOperand<typename Traits::Math, kRowMajorY>;
    static constexpr int kBlocks = Traits::kBlocks;
    static constexpr bool kSplit = Traits::Math::kParts > 1;  // three products for one

  public:
    __device__ SddNarrowConsumer(const SddNarrowArguments& arguments, typename Traits::Shared& shared)
        : arguments_(arguments),
          shared_(shared),
          warp_(__shfl_sync(~0u, threadIdx.x / 32 - 4, 0)),
          lane_(threadIdx.x % 32),
          offset_y_(OperandY::lane_offset(lane_, true)),
          offset_x_(OperandX::lane_offset(lane_, false)) {}

    __device__ void run(const SddPlan& plan, const Schedule& schedule) {
        for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
            const SddWork work = schedule.work(index, 0);
            const int4 tile = plan.tile<int4>(work.tile);
            const int list = (work.tile * kListWarps + warp_) * kBlocks;
            Sum sums[Traits::kSums];
#pragma unroll
            for (float& sum : sums) sum = 0;
            read_list(plan.masks + list);
            const int stages = (work.last_step - work.first_step) * (kSddStep / Traits::kStageTokens);
            const int blocks = __shfl_sync(~0u, min(max(tile.z - warp_ * tile.w, 0), tile.w), 0);
            if (blocks > kBlocks / 2)
                multiply<kBlocks>(sums, stages);
            else
                multiply<kBlocks / 2>(sums, stages);
            if (work.partial >= 0) {
                cudaTriggerProgrammaticLaunchCompletion();
                store_sums(partial_sums<Traits::kSums>(arguments_.partial,
                                                       int64_t{Traits::kGroups} * work.partial + warp_ / 4),
                           sums);
            } else if (work.exists) {
                store(plan.slots + list, sums);
            }
        }
    }

  private:
    __device__ void read_list(const int* masks) {
        changes_ = 0;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const unsigned mask = __shfl_sync(~0u, __ldg(masks + i), 0);
            at_x_[i] = OperandX::strip_offset(mask & 0xffff) ^ offset_x_;
            at_y_[i] = OperandY::strip_offset(mask >> 16 & 0x7fff) ^ offset_y_;
            changes_ |= mask >> 31 << i;
        }
    }

    // Multiplies the first `kCount` blocks of the list. Fragments of x are loaded some blocks ahead.
    template <int kCount>
    __device__ void multiply(Sum (&sums)[Traits::kSums], int stages) {
        constexpr int kAhead = kSplit ? 1 : 2, kTurns = Traits::kStageTokens / OperandX::kTokens * kCount;
        for (int stage = 0; stage < stages; ++stage) {
            shared_.ring.wait_full(position_);
            const uint32_t base =
                cute::cast_smem_ptr_to_uint(shared_.stages) + position_.stage * Traits::kStageBytes;
            uint32_t a[4], b[kAhead + 1][4];
            [[maybe_unused]] uint32_t rest_of_a[4];
            const auto load_x = [&](int turn) {
                OperandX::load(b[turn % (kAhead + 1)],
                               OperandX::address(base, at_x_[turn % kCount], turn / kCount));
            };
#pragma unroll
            for (int turn = 0; turn < kAhead; ++turn) load_x(turn);
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                const int block = turn % kCount;
                if (turn + kAhead < kTurns) load_x(turn + kAhead);
                const uint32_t changes = changes_ & 1u << block;
                const uint32_t at_y = OperandY::address(base, at_y_[block], turn / kCount);
                auto& own_b = b[turn % (kAhead + 1)];
                Sum* const own_sums = sums + block * Traits::kBlockSums;
                if constexpr (kSplit) {
                    if (changes != 0) {
                        OperandY::load(a, at_y);
                        split_operand(a, rest_of_a);
                    }
                    multiply_split(own_sums, a, rest_of_a, own_b);
                } else {
                    OperandY::load_if(changes, a, at_y);
                    multiply_strip<typename Traits::Math>(own_sums, a, own_b);
                }
            }
            release(a[0] ^ b[(kTurns - 1) % (kAhead + 1)][0]);
            position_.advance();
        }
    }

    // Leaves a stage once the last of what was loaded from it, in `loaded`, is in registers. An arrival waits
    // for no ldmatrix under way, and these wait long where other warps store: TMA filled the stage before.
    // Only a register orders the two, so the address depends on one: no bit of warp_ above the fifth is set,
    // which the compiler does not know.
    __device__ void release(uint32_t loaded) {
        const uint32_t zero = loaded & static_cast<uint32_t>(warp_) >> 8;
        __syncwarp();
        if (lane_ == 0) shared_.ring.empty[position_.stage + zero].arrive();
    }

    // Splits `b`. The sums of a product are apart from the others: see Accumulation::promoted.
    __device__ static void multiply_split(Sum* sums, const uint32_t (&a)[4], const uint32_t (&rest_of_a)[4],
                                          uint32_t (&b)[4]) {
        uint32_t rest_of_b[4];
        split_operand(b, rest_of_b);
        Sum product[Traits::kBlockSums] = {};
        multiply_strip<typename Traits::Math>(product, rest_of_a, b);  // small ones first
        multiply_strip<typename Traits::Math>(product, a, rest_of_b);
        multiply_strip<typename Traits::Math>(product, a, b);
#pragma unroll
        for (int i = 0; i < Traits::kBlockSums; ++i) sums[i] += product[i];
    }

    // All that is added is read before anything is written: memory is waited for once.
    __device__ void store(const int* slots, Sum (&sums)[Traits::kSums]) const {
        int slot[kBlocks];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) slot[i] = __ldg(slots + i);
        if (arguments_.accumulate) {
#pragma unroll
            for (int i = 0; i < kBlocks; ++i)
                SddNarrowEpilogue<Traits>(arguments_, slot[i]).add_stored(sums + i * Traits::kBlockSums);
        }
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
            SddNarrowEpilogue<Traits>(arguments_, slot[i]).store(sums + i * Traits::kBlockSums);
    }

    const SddNarrowArguments& arguments_;
    typename Traits::Shared& shared_;
    int warp_;
    int lane_;
    uint32_t offset_y_;
    uint32_t offset_x_;
    uint32_t at_x_[kBlocks];  // in a stage
    uint32_t at_y_[kBlocks];
    uint32_t changes_;  // bit i: block i has other features of y than the one before it
    typename Ring<Traits::kStages>::Position position_;
};

// The sdd kernel for blocks of 16 x 16: which warps load and multiply.

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_narrow_kernel(const __grid_constant__ SddNarrowArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    set_up([&] {
        if (arguments.steps > 0)
            for (const CUtensorMap* map : {&arguments.y, &arguments.x}) prefetch(map);
        shared.ring.init(kListWarps);
    });
    const SddPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    const typename Traits::Schedule schedule(plan.tile_count, arguments.steps, arguments.ctas, 1,
                                             arguments.most_split > 0);
    cute::cluster_wait();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<32>();
        if (warp == 0)
            SddNarrowProducer<Traits, kRowMajorY, kRowMajorX>(arguments, shared).run(plan, schedule);
    } else {
        cutlass::arch::warpgroup_reg_alloc<112>();
        SddNarrowConsumer<Traits, kRowMajorY, kRowMajorX>(arguments, shared).run(plan, schedule);
    }
}

// The host side of the sdd kernel for blocks of 16 x 16.

// One row of the registry.
template <class Math>
struct SddNarrow {
    using Traits = SddNarrowTraits<Math>;
    using WideTraits = SddNarrowTraits<WithResult<Math, float>>;
    static constexpr PlanShape kPlan = kListPlan;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Traits::kSharedBytes, 1)) return reason;
        if (!sdd_fits(problem, device)) return "so many tokens are out of its reach";
        if (Traits::kFloat &&
            (problem.x.layout != Layout::row_major || problem.y.layout != Layout::row_major))
            return "it reads row-major activations";
        return are_listed_blocks(problem.pattern) ? nullptr : "its blocks are 16 x 16";
    }

    static size_t workspace_size(const Problem& problem, const Device& device, const Decision&) {
        if (problem.pattern.nnz == 0) return 0;
        return sdd_bytes(is_paced(problem, device), most_split(problem, device) > 0, device, kTileValues);
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void* workspace,
                          void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        SddNarrowArguments arguments{};
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.plan_key = plan_key(problem.pattern, problem.op, kListPlan);
        arguments.plan_report = problem.plan_report;
        arguments.values = problem.values.data;
        arguments.steps = sdd_steps(problem);
        arguments.ctas = device.multiprocessors;
        arguments.most_split = most_split(problem, device);
        arguments.accumulate = problem.accumulate;
        if (problem.tokens > 0) {
            const Pattern& pattern = problem.pattern;
            if (const cudaError_t error = map(arguments.y, problem, problem.y, pattern.out_features))
                return error;
            if (const cudaError_t error = map(arguments.x, problem, problem.x, pattern.in_features))
                return error;
        }
        if (const cudaError_t error = use_memory(arguments, workspace, is_paced(problem, device), stream))
            return error;
        const auto start = problem.result_dtype == Math::kResult ? start_for<Traits> : start_for<WideTraits>;
        return start(arguments, problem, device, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<SddNarrow>(name, "sm90_sdd_narrow");
        row.ops = bits_of(Op::sdd_tn);
        row.input_dtypes = bits_of(Math::kInput);
        row.result_dtypes = bits_of(Math::kResult, DType::float32);
        row.precision = Math::kPrecision;
        row.accumulation = Math::kAccumulation;
        row.tile_features = kListUnit;
        row.tile_values = kTileValues;
        row.step_time = Traits::kStepTime;
        return row;
    }

  private:
    static constexpr int64_t kTileValues = kListTileValues;

    static bool is_paced(const Problem& problem, const Device& device) {
        return sdd_steps(problem) >= kMinPacedSteps && fills(problem, device, kTileValues);
    }

    static int most_split(const Problem& problem, const Device& device) {
        const double fewest = static_cast<double>(problem.pattern.nnz) / kListTileBlocks;
        const double most = kMostTiles * list_tiles(problem.pattern);
        return tma::most_split(fewest, most, sdd_steps(problem), device.multiprocessors, 1,
                               Traits::kStepTime);
    }

    // The kernel, and the one that adds partial sums.
    template <class OfResult>
    static cudaError_t start_for(const SddNarrowArguments& arguments, const Problem& problem,
                                 const Device& device, void* stream) {
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        auto start = start_on<OfResult, true, true>;
        if constexpr (!Traits::kFloat) {
            if (row_major_y && !row_major_x) start = start_on<OfResult, true, false>;
            if (!row_major_y)
                start = row_major_x ? start_on<OfResult, false, true> : start_on<OfResult, false, false>;
        }
        if (const cudaError_t error = start(arguments, device, stream)) return error;
        if (arguments.most_split == 0) return cudaSuccess;
        const int parts = Traits::kBlocks * Traits::kGroups * arguments.most_split;
        const int ctas = std::min(parts, 16 * arguments.ctas);
        return launch_early<sdd_narrow_reduce<OfResult>, 0>(arguments, ctas, 128, stream);
    }

    template <class OfResult, bool kRowMajorY, bool kRowMajorX>
    static cudaError_t start_on(const SddNarrowArguments& arguments, const Device& device, void* stream) {
        constexpr auto kKernel = sdd_narrow_kernel<OfResult, kRowMajorY, kRowMajorX>;
        return ClusterLauncher<kKernel, SddNarrowArguments>::launch(
            arguments, device, arguments.ctas, 1, Traits::kThreads, Traits::kSharedBytes, stream, false);
    }

    static cudaError_t map(CUtensorMap& map, const Problem& problem, const Matrix& matrix, int64_t features) {
        if (matrix.layout == Layout::row_major)
            return encode(
                map, Math::kMapType, matrix.data,
                {{features, 1, Traits::kBoxFeatures}, {problem.tokens, matrix.ld, Traits::kStageTokens}});
        return encode(map, Math::kMapType, matrix.data,
                      {{problem.tokens, 1, Traits::kStageTokens}, {features, matrix.ld, kListUnit}});
    }
};

}  // namespace ts::sm90

#define TS_ROW_sdd_narrow(name, math) TS_SM90_ROW(name, SddNarrow<math>)
