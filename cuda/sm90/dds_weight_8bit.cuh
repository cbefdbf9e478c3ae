// The weight formats of dds kernels for 8 bits: dense blocks, which wgmma reads along k alone.
#pragma once

#include "sm90/dds_weight.cuh"
#include "sm90/wgmma.cuh"

namespace ts::sm90 {

// A stage is that of DenseWeight, in lines of 16 to 128 bytes. Lines of 16 are not swizzled.
template <class Math>
struct ByteWeight : DenseWeight<Op::dds_nt, Math> {
    static constexpr bool kAlongK = true;

    template <int kTokens>
    using Atom = typename Math::template ByteAtom<kTokens>;

    static const char* refuses(const Problem& problem) {
        constexpr int kLeastRows = 32;  // of float32 results, see FloatStaging
        return sizeof(typename Math::Result) == 4 && problem.row_block() < kLeastRows
                   ? "its results in float32 are of blocks with 32 rows at least"
                   : nullptr;
    }

    // Starts the products of a step, sums (+)= weight tokens. `tokens`: where their operand is.
    template <bool kRowMajorTokens, int kTokens, class Sum, int kSums>
    __device__ static void multiply(Sum (&sums)[kSums], const DdsArguments& arguments, const char* stage,
                                    uint32_t tokens, bool add) {
        static_assert(kRowMajorTokens);
        multiply_step<Atom<kTokens>>(sums, arguments.weight, operand_address(stage), arguments.tokens_by_k,
                                     tokens, add);
    }
};

// The same with scales inside of the sums: a step is one block, with a scale of its own, by as many k of each
// token as have one scale.
template <class Math>
struct ScaledByteWeight : ByteWeight<Math> {
    static_assert(ByteWeight<Math>::kStep == kScaleGroup);

    static constexpr int most_stages(int) { return 6; }

    template <int kTokens>
    class Products : public PromotedSums<Math, ByteWeight<Math>::kFeatures * kTokens / 128> {
        using Sum = typename Math::Accumulator;
        static constexpr int kSums = ByteWeight<Math>::kFeatures * kTokens / 128;
        using PromotedSums<Math, kSums>::step_;

      public:
        // Starts the products of a step: all but the last, and the last apart.
        __device__ void start(const char* stage, const DdsArguments& arguments, uint32_t tokens) {
            using Atom = typename ByteWeight<Math>::template Atom<kTokens>;
            const uint32_t weight = operand_address(stage);
            cute::warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                wgmma<Atom>(step_, arguments.weight.at(weight, i), arguments.tokens_by_k.at(tokens, i),
                            i > 0);
                if (i >= 2) cute::warpgroup_commit_batch();
            }
        }
        // While the products are under way: the scales of the step's tokens, of which a thread has two
        // neighbours of each eight, times that of its block.
        __device__ void scale(const float (&tokens)[kTokens], float block) {
            const auto* const pairs = reinterpret_cast<const float2*>(tokens) + threadIdx.x % 4;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                const float2 pair = pairs[4 * i];
                factors_[i] = {pair.x * block, pair.y * block};
            }
        }
        __device__ void add(Sum (&sums)[kSums]) const {
#pragma unroll
            for (int i = 0; i < kSums; i += 2) {
                sums[i] = fmaf(step_[i], factors_[i / 4].x, sums[i]);
                sums[i + 1] = fmaf(step_[i + 1], factors_[i / 4].y, sums[i + 1]);
            }
        }

      private:
        static constexpr int kPairs = kTokens / 8;
        float2 factors_[kPairs];
    };
};

}  // namespace ts::sm90
