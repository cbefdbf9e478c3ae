// The weight format of dds kernels for float32. wgmma takes operands of TF32 from shared memory along k only,
// which values are not in dds_nn: products take the weight from registers, in both directions.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "sm90/dds_split.cuh"
#include "sm90/dds_weight.cuh"

namespace ts::sm90 {

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

}  // namespace ts::sm90
