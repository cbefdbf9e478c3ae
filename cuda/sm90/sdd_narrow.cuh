// sdd, the gradient of the block-sparse weight, of blocks of 16 x 16: W[n, k] = sum over tokens t
// of y[t, n] x[t, k], for the kept blocks only, written (or added) to their slots in values.
//
// wgmma multiplies 64 features of y at least, in which nearly every 16 of x have a block where a quarter is
// kept. mma.sync multiplies 16 by 8, at 62 % of its rate, and so nothing but the blocks. A CTA computes tiles
// of up to 128 blocks of 16 x 16 that lie in some units of 64 features of y and of x (see
// common/list_plan.h): one warp loads these units through TMA, in stages of 32 tokens, whichever blocks are
// in them. Each of 16 warps has a list of blocks, whose sums it keeps in registers: ldmatrix brings the
// features of x of one block after another, and those of y where they change. Shared memory limits that: 512
// bytes for each block and 16 tokens. sdd_schedule.cuh says which CTA computes what.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/mma_sm80.hpp>

#include "common/epilogue.cuh"
#include "common/list_plan.h"
#include "sm90/launch.cuh"
#include "sm90/select.h"
#include "sm90/wgmma.cuh"
#include "tma/launch.cuh"
#include "tma/partial_sums.cuh"
#include "tma/ring.cuh"
#include "tma/sdd_schedule.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

struct SddNarrowArguments {
    CUtensorMap y;
    CUtensorMap x;
    const PlanHeader* plan;
    void* values;
    float4* partial;  // [partials][kGroups], see SddPartials, or nullptr
    int* pace;        // the counters, or nullptr
    int steps;        // of 64 tokens
    int ctas;         // that the device holds
    bool may_split;
    bool accumulate;
    int plan_key;  // that the plan must have
};

// `Result`: what values are stored as, the element of the operands or float.
template <class Math_, class Result_>
struct SddNarrowTraits {
    using Math = Math_;
    using Result = Result_;
    static constexpr int kBlock = 16;
    static constexpr int kBlocks = kListBlocks;
    static constexpr int kGroups = kListWarps / 4;  // warpgroups that multiply
    static constexpr int kThreads = 128 * (1 + kGroups);
    static constexpr int kStageTokens = 32;
    static constexpr int kBlockSums = kBlock * kBlock / 32;  // of a lane
    static constexpr int kSums = kBlocks * kBlockSums;
    static constexpr int kStages = 3;
    static constexpr int kUnitBytes = kListUnit * kStageTokens * 2;
    static constexpr int kStageBytes = kListUnits * kUnitBytes;

    struct Shared {
        // Of a unit lines of 128 bytes, [kStageTokens][kListUnit], or of 64 bytes, [kListUnit][kStageTokens].
        alignas(1024) char stages[kStages * kStageBytes];
        Ring<kStages> ring;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
};

// The plan's arrays; see common/list_plan.h.
struct ListPlan {
    int tile_count;
    const int4* tiles;
    const unsigned* masks;
    const int* units;
    const int* slots;

    // Ends the kernel with an error if the plan is not the one that the launch is for.
    __device__ ListPlan(const PlanHeader* plan, int key) {
        if (plan->key != key) __trap();
        const auto* words = reinterpret_cast<const int*>(plan);
        tile_count = __shfl_sync(~0u, plan->tiles, 0);
        tiles = reinterpret_cast<const int4*>(words + plan->tiles_at);
        masks = reinterpret_cast<const unsigned*>(words + plan->masks_at);
        units = words + plan->k_at;
        slots = words + plan->slots_at;
    }
};

// Where a lane finds its part of what one ldmatrix brings, 16 features by 16 tokens, as an operand of
// mma.sync: from the beginning of a unit, with an exclusive or of what `strip_offset` says.
template <bool kRowMajor>
__device__ inline uint32_t lane_offset(int lane, bool is_y) {
    const int eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
    const int feature = is_y ? low : high, token = is_y ? high : low;  // whether of the second half
    if (kRowMajor) return (eighth + 8 * token) * 128 + (feature ^ eighth) * 16;
    return (eighth + 8 * feature) * 64 + (token ^ eighth / 2) * 16;
}

// `strip`: 16 features of a tile's units.
template <bool kRowMajor>
__device__ inline uint32_t strip_offset(uint32_t strip) {
    return strip / 4 * 4096 | (kRowMajor ? strip % 4 * 32 : strip % 4 * 1024);
}

template <bool kRowMajor>
__device__ inline void load_fragment(uint32_t (&fragment)[4], uint32_t address) {
    if constexpr (kRowMajor)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address));
}

// Unless the condition is 0, without a branch, which would cut the code around it in two.
template <bool kRowMajor>
__device__ inline void load_fragment_if(uint32_t condition, uint32_t (&fragment)[4], uint32_t address) {
    if constexpr (kRowMajor)
        asm volatile(
            "{ .reg .pred load; setp.ne.u32 load, %5, 0; "
            "@load ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(fragment[0]), "+r"(fragment[1]), "+r"(fragment[2]), "+r"(fragment[3])
            : "r"(address), "r"(condition));
    else
        asm volatile(
            "{ .reg .pred load; setp.ne.u32 load, %5, 0; "
            "@load ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(fragment[0]), "+r"(fragment[1]), "+r"(fragment[2]), "+r"(fragment[3])
            : "r"(address), "r"(condition));
}

template <class Math>
using WarpAtom = std::conditional_t<Math::kDType == DType::bfloat16, cute::SM80_16x8x16_F32BF16BF16F32_TN,
                                    cute::SM80_16x8x16_F32F16F16F32_TN>;

// sums += a b for the 16 features of x in `b`, eight by eight.
template <class Math>
__device__ inline void multiply_strip(float* sums, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* const c = sums + 4 * half;
        WarpAtom<Math>::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1],
                            c[0], c[1], c[2], c[3]);
    }
}

// The warp that fills the ring.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddNarrowProducer {
  public:
    __device__ SddNarrowProducer(const SddNarrowArguments& arguments, typename Traits::Shared& shared)
        : arguments_(arguments), shared_(shared), lane_(threadIdx.x % 32) {}

    __device__ void run(const ListPlan& plan, const SddSchedule& schedule) {
        for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
            const SddWork work = schedule.work(index, 0);
            const int4 tile = __ldg(plan.tiles + work.tile);
            const int feature = lane_ < kListUnits ? __ldg(plan.units + work.tile * kListUnits + lane_) : -1;
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
            if (feature >= 0)
                load_box(map, full, Multicast{1},
                         shared_.stages + position_.stage * Traits::kStageBytes + lane_ * Traits::kUnitBytes,
                         row_major ? feature : token, row_major ? token : feature);
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
                words[q] = rounded<typename Traits::Math>(sums[at], sums[at + 1]);
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

// One warp's products of its blocks of all tiles.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddNarrowConsumer {
    static constexpr int kBlocks = Traits::kBlocks;

  public:
    __device__ SddNarrowConsumer(const SddNarrowArguments& arguments, typename Traits::Shared& shared)
        : arguments_(arguments),
          shared_(shared),
          warp_(__shfl_sync(~0u, threadIdx.x / 32 - 4, 0)),
          lane_(threadIdx.x % 32),
          offset_y_(lane_offset<kRowMajorY>(lane_, true)),
          offset_x_(lane_offset<kRowMajorX>(lane_, false)) {}

    __device__ void run(const ListPlan& plan, const SddSchedule& schedule) {
        for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
            const SddWork work = schedule.work(index, 0);
            const int4 tile = __ldg(plan.tiles + work.tile);
            const int list = (work.tile * kListWarps + warp_) * kBlocks;
            float sums[Traits::kSums];
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
    __device__ void read_list(const unsigned* masks) {
        changes_ = 0;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const unsigned mask = __shfl_sync(~0u, __ldg(masks + i), 0);
            at_x_[i] = strip_offset<kRowMajorX>(mask & 0xffff) ^ offset_x_;
            at_y_[i] = strip_offset<kRowMajorY>(mask >> 16 & 0x7fff) ^ offset_y_;
            changes_ |= mask >> 31 << i;
        }
    }

    // Of the first `kCount` blocks of the list. Fragments of x are loaded some blocks ahead.
    template <int kCount>
    __device__ void multiply(float (&sums)[Traits::kSums], int stages) {
        constexpr int kAhead = 2, kTurns = Traits::kStageTokens / 16 * kCount;
        for (int stage = 0; stage < stages; ++stage) {
            shared_.ring.wait_full(position_);
            const uint32_t base =
                cute::cast_smem_ptr_to_uint(shared_.stages) + position_.stage * Traits::kStageBytes;
            uint32_t a[4], b[kAhead + 1][4];
            const auto load_x = [&](int turn) {
                load_fragment<kRowMajorX>(b[turn % (kAhead + 1)],
                                          address<kRowMajorX>(base, at_x_[turn % kCount], turn / kCount));
            };
#pragma unroll
            for (int turn = 0; turn < kAhead; ++turn) load_x(turn);
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                const int block = turn % kCount;
                if (turn + kAhead < kTurns) load_x(turn + kAhead);
                load_fragment_if<kRowMajorY>(changes_ & 1u << block, a,
                                             address<kRowMajorY>(base, at_y_[block], turn / kCount));
                multiply_strip<typename Traits::Math>(sums + block * Traits::kBlockSums, a,
                                                      b[turn % (kAhead + 1)]);
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

    // Of the `k16`-th 16 tokens of a stage.
    template <bool kRowMajor>
    __device__ static uint32_t address(uint32_t base, uint32_t at, int k16) {
        return kRowMajor ? base + at + 2048 * k16 : base + (at ^ 32 * k16);
    }

    // All that is added is read before anything is written: memory is waited for once.
    __device__ void store(const int* slots, float (&sums)[Traits::kSums]) const {
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

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_narrow_kernel(const __grid_constant__ SddNarrowArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    if (threadIdx.x == 0) {
        if (arguments.steps > 0)
            for (const CUtensorMap* map : {&arguments.y, &arguments.x}) prefetch(map);
        shared.ring.init(kListWarps);
        cutlass::arch::fence_barrier_init();
    }
    const ListPlan plan(arguments.plan, arguments.plan_key);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.ctas, 1, arguments.may_split);
    __syncthreads();
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

// Adds the partial sums of the tiles that were split, always in the same order. A CTA is a warpgroup, for one
// block of each warp.
template <class Traits>
__global__ void __launch_bounds__(128)
    sdd_narrow_reduce(const __grid_constant__ SddNarrowArguments arguments) {
    constexpr int kVectors = Traits::kBlockSums / 4;
    const ListPlan plan(arguments.plan, arguments.plan_key);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.ctas, 1, arguments.may_split);
    cudaGridDependencySynchronize();
    const int parts = Traits::kBlocks * Traits::kGroups;  // of a tile
    for (int index = blockIdx.x; index < parts * schedule.split_tiles(); index += gridDim.x) {
        const int block = index % Traits::kBlocks, group = index / Traits::kBlocks % Traits::kGroups;
        const SddPartials partials = schedule.partials(index / parts);
        const int tile = schedule.first_split() + index / parts;
        float sums[Traits::kBlockSums] = {};
#pragma unroll 4
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

// Host side: one row of the registry.
template <class Math>
struct SddNarrow {
    using Common = SddNarrowTraits<Math, float>;  // for what is the same for all

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Common::kSharedBytes, 1)) return reason;
        if (!sdd_fits(problem, device)) return "so many tokens are out of its reach";
        return are_listed_blocks(problem.pattern) ? nullptr : "its blocks are 16 x 16";
    }

    static size_t workspace_size(const Problem& problem, const Device& device) {
        if (problem.pattern.nnz == 0 || !may_split(problem)) return 0;
        return split_bytes(device, kTileValues);
    }

    static int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        SddNarrowArguments arguments{};
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.plan_key = plan_key(problem.pattern, problem.op, kListPlan);
        arguments.values = problem.values.data;
        arguments.steps = sdd_steps(problem);
        arguments.ctas = device.multiprocessors;
        arguments.may_split = may_split(problem);
        arguments.accumulate = problem.accumulate;
        if (problem.tokens > 0) {
            const Pattern& pattern = problem.pattern;
            if (const cudaError_t error = map(arguments.y, problem, problem.y, pattern.out_features))
                return error;
            if (const cudaError_t error = map(arguments.x, problem, problem.x, pattern.in_features))
                return error;
        }
        if (arguments.may_split) {
            const bool is_paced = fills(problem, device, kTileValues);
            if (const cudaError_t error = use_split_memory(arguments, workspace, is_paced, stream))
                return error;
        }
        const auto start =
            problem.result_dtype == Math::kDType ? start_for<typename Math::Element> : start_for<float>;
        return start(arguments, problem, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row{name,
                   DeviceType::cuda,
                   90,
                   1u << static_cast<int>(Op::sdd_tn),
                   1u << static_cast<int>(Math::kDType),
                   Precision::highest,
                   kListPlan,
                   0,
                   kListUnit,
                   0,
                   refuses,
                   workspace_size,
                   launch};
        row.result_dtypes = 1u << static_cast<int>(Math::kDType) | 1u << static_cast<int>(DType::float32);
        row.estimate = estimate_sdd_narrow;
        return row;
    }

  private:
    static constexpr int64_t kTileValues = int64_t{kListTileBlocks} * Common::kBlock * Common::kBlock;

    // The number of tiles is on the device.
    static bool may_split(const Problem& problem) { return sdd_steps(problem) >= kMinSplitSteps; }

    // The kernel, and the one that adds partial sums.
    template <class Result>
    static cudaError_t start_for(const SddNarrowArguments& arguments, const Problem& problem, void* stream) {
        using Traits = SddNarrowTraits<Math, Result>;
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        const auto start =
            row_major_y ? (row_major_x ? start_on<Traits, true, true> : start_on<Traits, true, false>)
                        : (row_major_x ? start_on<Traits, false, true> : start_on<Traits, false, false>);
        if (const cudaError_t error = start(arguments, stream)) return error;
        if (!arguments.may_split) return cudaSuccess;
        return launch_early<sdd_narrow_reduce<Traits>, 0>(arguments, 16 * arguments.ctas, 128, stream);
    }

    template <class Traits, bool kRowMajorY, bool kRowMajorX>
    static cudaError_t start_on(const SddNarrowArguments& arguments, void* stream) {
        constexpr auto kKernel = sdd_narrow_kernel<Traits, kRowMajorY, kRowMajorX>;
        return ClusterLauncher<kKernel, SddNarrowArguments>::launch(
            arguments, arguments.ctas, 1, Traits::kThreads, Traits::kSharedBytes, stream, false);
    }

    static cudaError_t map(CUtensorMap& map, const Problem& problem, const Matrix& matrix, int64_t features) {
        if (matrix.layout == Layout::row_major)
            return encode(map, problem.dtype, matrix.data,
                          {{features, 1, kListUnit}, {problem.tokens, matrix.ld, Common::kStageTokens}});
        return encode(map, problem.dtype, matrix.data,
                      {{problem.tokens, 1, Common::kStageTokens}, {features, matrix.ld, kListUnit}});
    }
};

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, math)                             \
    namespace ts::sm90 {                                            \
    const Kernel& name() {                                          \
        static constexpr Kernel kRow = SddNarrow<math>::row(#name); \
        return kRow;                                                \
    }                                                               \
    }
