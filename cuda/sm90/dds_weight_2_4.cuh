// The weight format of dds_nt kernels for values that are 2:4 inside their blocks (TS_STORAGE_2_4), which
// multiply by wgmma for sparse operands.
#pragma once

#include <climits>

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm90_gmma_sparse.hpp>

#include "sm90/dds_weight.cuh"

namespace ts::sm90 {

// Products of 64 x kColumns sums by 32 of k, half of them kept. `kSelector`: which threads give metadata.
template <class Math, cute::SM90::GMMA::Major kTokens, int kColumns, cute::SM90::GMMA::SparseSel kSelector>
struct SparseAtom;

#define TS_SPARSE_ATOM(math, columns, atom)                                                              \
    template <cute::SM90::GMMA::Major kTokens, cute::SM90::GMMA::SparseSel kSelector>                    \
    struct SparseAtom<math, kTokens, columns, kSelector>                                                 \
        : cute::SM90::GMMA::SPARSE::atom<cute::SM90::GMMA::Major::K, kTokens,                            \
                                         cute::SM90::GMMA::ScaleIn::One, cute::SM90::GMMA::ScaleIn::One, \
                                         kSelector> {};
TS_SPARSE_ATOM(bf16, 128, GMMA_64x128x32_F32BF16BF16_SS)
TS_SPARSE_ATOM(bf16, 256, GMMA_64x256x32_F32BF16BF16_SS)
TS_SPARSE_ATOM(f16, 128, GMMA_64x128x32_F32F16F16_SS)
TS_SPARSE_ATOM(f16, 256, GMMA_64x256x32_F32F16F16_SS)
#undef TS_SPARSE_ATOM

// A stage holds boxes of kept values as the dense format does, [pieces][kFeatures][k_width / 2], in lines of
// k_width bytes. Behind them is the metadata, [kFeatures / 16][kStep / 32] units of 16 words as they are in
// memory, which every CTA loads for itself: the words that the threads of a warp need lie side by side.
template <class Math>
struct CompressedWeight : InSharedMemory {
    static constexpr uint32_t kStorages = bits_of(Storage::two_of_four);
    static constexpr uint32_t kDTypes = 0;
    static constexpr int kFeatures = 64;
    static constexpr int kStep = 64;
    static constexpr int kBoxBytes = kFeatures * kStep / 2 * 2;
    static constexpr int kStageBytes = kBoxBytes + kFeatures * kStep / 8;
    static constexpr int kOtherFills = 32;  // one by each lane

    // As many as fit: steps are short.
    static constexpr int most_stages(int) { return INT_MAX; }

    // Lines of values, which are [nnz * block_rows, block_cols / 2].
    static int64_t value_rows(const Pattern& pattern) { return pattern.nnz * pattern.block_rows; }

    static cudaError_t map(DdsArguments& arguments, const Problem& problem) {
        arguments.metadata = problem.values.metadata;
        const int64_t columns = problem.pattern.block_cols / 2;
        return encode(
            arguments.values, problem.values.dtype, problem.values.data,
            {{columns, 1, k_width(arguments) / 2}, {arguments.value_rows, columns, arguments.row_width}});
    }

    // How the products read a stage.
    static Operand operand(const DdsArguments& arguments) {
        const int width = k_width(arguments);
        Operand result = sm90::operand(width, 0);
        for (int k32 = 0; k32 < kStep / 32; ++k32) {
            const int piece = 32 * k32 / width, within = 32 * k32 % width;
            result.step[k32] = static_cast<uint32_t>((piece * width * kFeatures + within) / 16);
        }
        return result;
    }

    // Offset in a stage of the box of a block row of the warpgroup and a piece of k.
    __device__ static int offset(const DdsArguments& arguments, int row, int piece) {
        return (piece * kFeatures + row * arguments.row_block) * k_width(arguments);
    }

    // Corner in values of the box that begins at a feature and k of a block: outside, which reads as zero,
    // if there is no block.
    __device__ static int2 corner(const DdsArguments& arguments, int slot, int feature, int k) {
        const int first = slot < 0 ? static_cast<int>(arguments.value_rows) : slot * arguments.row_block;
        return make_int2(k / 2, first + feature);
    }

    // One thread.
    __device__ static void load(const DdsArguments& arguments, const Barrier& full, Multicast to,
                                char* target, int2 corner) {
        load_box(&arguments.values, full, to, target, corner.x, corner.y);
    }

    // Metadata loads of a lane of the loading warp: four lanes load a unit of 16 features and 32 of k, of the
    // block that is in their box.
    class OtherLoads {
      public:
        // `feature`: of its blocks, where the warpgroup's begin.
        __device__ OtherLoads(const DdsArguments& arguments, int feature, int lane) : lane_(lane) {
            const int unit = lane / 4, row = 16 * (unit / 2), k = 32 * (unit % 2);
            const int width = k_width(arguments);
            box_ = k / width * arguments.warpgroup_rows + (row >> arguments.row_shift);
            row_units_ = arguments.row_block / 16;
            block_units_ = arguments.k_block / 32 * row_units_;
            const int block_row = feature + row & arguments.row_block - 1;
            first_ = arguments.metadata + 4 * lane % 16 + 16 * (k % width / 32 * row_units_ + block_row / 16);
        }

        // Lanes have the slot and k of a box each, those of this step from lane `first` on.
        __device__ void load(const Barrier& full, char* stage, int slot, int k, int first) const {
            slot = __shfl_sync(~0u, slot, first + box_);
            k = __shfl_sync(~0u, k, first + box_);
            // Without a block the weight is zero, whatever is kept of it: any metadata will do.
            const int64_t unit = slot < 0 ? 0 : int64_t{slot} * block_units_ + k / 32 * row_units_;
            const auto& from = *reinterpret_cast<const uint4*>(first_ + 16 * unit);
            cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(from,
                                                         reinterpret_cast<uint4*>(stage + kBoxBytes)[lane_]);
            cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<const uint64_t*>(&full));
        }

      private:
        int lane_;
        int box_;
        int row_units_;
        int block_units_;
        const uint32_t* first_;
    };

    // Starts the products of a step, sums (+)= weight tokens. `tokens`: where their operand is.
    template <bool kRowMajorTokens, int kTokens, class Sum, int kSums>
    __device__ static void multiply(Sum (&sums)[kSums], const DdsArguments& arguments, const char* stage,
                                    uint32_t tokens, bool add) {
        using cute::SM90::GMMA::SparseSel;
        constexpr auto kMajor = kRowMajorTokens ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;
        const uint32_t metadata = reinterpret_cast<const uint32_t*>(stage + kBoxBytes)[metadata_place()];
        const uint32_t weight = operand_address(stage);
        const Operand &a = arguments.weight, &b = arguments.tokens_by_k;
        cute::warpgroup_arrive();
        wgmma<SparseAtom<Math, kMajor, kTokens, SparseSel::Zero>>(sums, a.at(weight, 0), b.at(tokens, 0), add,
                                                                  metadata);
        wgmma<SparseAtom<Math, kMajor, kTokens, SparseSel::One>>(sums, a.at(weight, 1), b.at(tokens, 2), true,
                                                                 metadata);
        cute::warpgroup_commit_batch();
    }

  private:
    __host__ __device__ static int k_width(const DdsArguments& arguments) {
        return arguments.k_block < kStep ? arguments.k_block : kStep;
    }

    // The word of a thread: of each four lanes two have the metadata of the first 32 of k, two of the others.
    __device__ static int metadata_place() {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        return warp * 32 + lane % 4 / 2 * 16 + lane / 4 * 2 + lane % 2;
    }
};

}  // namespace ts::sm90
