// The warps that multiply in the sdd kernel for blocks of 16 x 16.
#pragma once

#include <type_traits>

#include <cute/arch/mma_sm80.hpp>

#include "common/ldmatrix.cuh"
#include "sm90/dds_split.cuh"
#include "sm90/sdd_narrow_epilogue.cuh"
#include "sm90/sdd_narrow_traits.cuh"

namespace ts::sm90 {

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

    // Of the `k`-th tokens of a stage.
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

    __device__ void run(const SddPlan& plan, const SddSchedule& schedule) {
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

}  // namespace ts::sm90
