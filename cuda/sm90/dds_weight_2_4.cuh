// The weight format of dds_nt kernels for values that are 2:4 inside their blocks (TS_STORAGE_2_4), which
// multiply by wgmma for sparse operands.
#pragma once

#include <climits>

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
// k_width bytes. Behind them is the metadata, [kStep / 32][kFeatures / 16] units of 16 words as they are in
// memory, where those of 32 of k of a block lie one after another.
template <class Math>
struct CompressedWeight : InSharedMemory {
    static constexpr uint32_t kStorages = bits_of(Storage::two_of_four);
    static constexpr uint32_t kDTypes = 0;
    static constexpr int kFeatures = 64;
    static constexpr int kStep = 64;
    static constexpr int kBoxBytes = kFeatures * kStep / 2 * 2;
    static constexpr int kStageBytes = kBoxBytes + kFeatures * kStep / 8;

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

    // One thread: the box at an offset in a stage, and its metadata.
    __device__ static void load(const DdsArguments& arguments, const Barrier& full, Multicast to, char* stage,
                                int offset, int2 corner) {
        load_box(&arguments.values, full, to, stage + offset, corner.x, corner.y);
        load_metadata(arguments, full, to, stage + kBoxBytes, offset >> __ffs(k_width(arguments)) - 1, corner,
                      k_width(arguments));
    }

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

  protected:
    // The metadata of a box, which begins at a line of the stage and has `width` of k.
    __device__ static void load_metadata(const DdsArguments& arguments, const Barrier& full, Multicast to,
                                         char* metadata, int line, int2 corner, int width) {
        constexpr int kUnitBytes = 64, kUnits = kFeatures / 16;
        const int row_units = arguments.row_block / 16, bytes = arguments.row_width / 16 * kUnitBytes;
        const int slot = corner.y >> arguments.row_shift, feature = corner.y & arguments.row_block - 1;
        // Without a block the weight is zero, whatever is kept of it: any metadata will do.
        const bool exists = corner.y < arguments.value_rows;
        int unit = exists ? (slot * (arguments.k_block / 32) + corner.x / 16) * row_units + feature / 16 : 0;
        char* target =
            metadata + (line / kFeatures * width / 32 * kUnits + line % kFeatures / 16) * kUnitBytes;
        for (int k = 0; k < width; k += 32) {
            load_bytes(arguments.metadata + int64_t{unit} * (kUnitBytes / 4), full, to, target, bytes);
            if (exists) unit += row_units;
            target += kUnits * kUnitBytes;
        }
    }

  private:
    __host__ __device__ static int k_width(const DdsArguments& arguments) {
        return arguments.k_block < kStep ? arguments.k_block : kStep;
    }

    // The word of a thread: of each four lanes two have the metadata of the first 32 of k, two of the others.
    __device__ static int metadata_place() {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        return lane % 4 / 2 * kFeatures + warp * 16 + lane / 4 * 2 + lane % 2;
    }
};

}  // namespace ts::sm90
