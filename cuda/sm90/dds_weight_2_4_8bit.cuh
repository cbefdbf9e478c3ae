// The weight format of dds_nt kernels for 8-bit values that are 2:4 inside their blocks.
#pragma once

#include "sm90/dds_weight_2_4.cuh"

namespace ts::sm90 {

// Products of 64 x kColumns sums by 64 of k, half of them kept. All threads give metadata.
template <class Input, int kColumns>
struct SparseByteAtom;

#define TS_SPARSE_ATOM(input, columns, ...) \
    template <>                             \
    struct SparseByteAtom<input, columns> : cute::SM90::GMMA::SPARSE::__VA_ARGS__ {};
TS_SPARSE_ATOM(int8_t, 64, GMMA_64x64x64_S32S8S8_SS_TN<>)
TS_SPARSE_ATOM(int8_t, 128, GMMA_64x128x64_S32S8S8_SS_TN<>)
TS_SPARSE_ATOM(int8_t, 256, GMMA_64x256x64_S32S8S8_SS_TN<>)
TS_SPARSE_ATOM(__nv_fp8_e4m3, 64, GMMA_64x64x64_F32E4M3E4M3_SS_TN<>)
TS_SPARSE_ATOM(__nv_fp8_e4m3, 128, GMMA_64x128x64_F32E4M3E4M3_SS_TN<>)
TS_SPARSE_ATOM(__nv_fp8_e4m3, 256, GMMA_64x256x64_F32E4M3E4M3_SS_TN<>)
#undef TS_SPARSE_ATOM

// A stage is that of CompressedWeight: boxes [pieces][kFeatures][k_width / 2], in lines of k_width / 2 bytes,
// and behind them the metadata, [kStep / 32][kFeatures / 16] units of 16 words as they are in memory. These
// have 16 of k of two features, and products want 32 of k of one: threads join halves of two words.
template <class Math>
struct CompressedByteWeight : CompressedWeight<Math> {
    using Base = CompressedWeight<Math>;
    using Base::kFeatures;
    static constexpr bool kAlongK = true;
    static constexpr bool kEndsProducts = true;
    static constexpr int kStep = 128;
    static constexpr int kStepProducts = 2;
    static constexpr int kBoxBytes = kFeatures * kStep / 2;
    static constexpr int kStageBytes = kBoxBytes + kFeatures * kStep / 8;

    // A product reads 64 of k of a token, which are one line.
    static const char* refuses(const Problem& problem) {
        constexpr int kLeastRows = 32;  // of float32 results, see FloatStaging
        if (problem.k_block() < 64) return "its blocks have 64 columns at least";
        return sizeof(typename Math::Result) == 4 && problem.row_block() < kLeastRows
                   ? "its results in float32 are of blocks with 32 rows at least"
                   : nullptr;
    }

    static cudaError_t map(DdsArguments& arguments, const Problem& problem) {
        arguments.metadata = problem.values.metadata;
        const int64_t columns = problem.pattern.block_cols / 2;
        return encode(arguments.values, Math::kMapType, problem.values.data,
                      {{columns, 1, line(arguments)}, {arguments.value_rows, columns, arguments.row_width}});
    }

    // See CompressedWeight for these.
    static Operand operand(const DdsArguments& arguments) {
        constexpr int kProduct = 32;  // bytes of a line
        const int width = line(arguments);
        Operand result = sm90::operand(width, 0);
        for (int i = 0; i < kStep / 2 / kProduct; ++i) {
            const int piece = kProduct * i / width, within = kProduct * i % width;
            result.step[i] = static_cast<uint32_t>((piece * width * kFeatures + within) / 16);
        }
        return result;
    }
    __device__ static int offset(const DdsArguments& arguments, int row, int piece) {
        return (piece * kFeatures + row * arguments.row_block) * line(arguments);
    }

    __device__ static void load(const DdsArguments& arguments, const Barrier& full, Multicast to, char* stage,
                                int offset, int2 corner) {
        load_box(&arguments.values, full, to, stage + offset, corner.x, corner.y);
        Base::load_metadata(arguments, full, to, stage + kBoxBytes, offset >> __ffs(line(arguments)) - 1,
                            corner, 2 * line(arguments));
    }

    // See CompressedWeight for this.
    template <bool kRowMajorTokens, int kTokens, class Sum, int kSums>
    __device__ static void multiply(Sum (&sums)[kSums], const DdsArguments& arguments, const char* stage,
                                    uint32_t tokens, bool add) {
        static_assert(kRowMajorTokens);
        using Atom = SparseByteAtom<typename Math::Input, kTokens>;
        uint32_t metadata[kStepProducts];
#pragma unroll
        for (int i = 0; i < kStepProducts; ++i) metadata[i] = metadata_of(stage + kBoxBytes, i);
        const uint32_t weight = operand_address(stage);
        const Operand &a = arguments.weight, &b = arguments.tokens_by_k;
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < kStepProducts; ++i)
            wgmma<Atom>(sums, a.at(weight, i), b.at(tokens, 2 * i), add || i > 0, metadata[i]);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
    }

  private:
    // Bytes of a line of values.
    __host__ __device__ static int line(const DdsArguments& arguments) {
        return (arguments.k_block < kStep ? arguments.k_block : kStep) / 2;
    }

    // Metadata of a thread in a product of 64 k: two of four lanes have its first 32 of k, of features g and
    // g + 8.
    __device__ static uint32_t metadata_of(const char* stage, int product) {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const int unit = (2 * product + lane % 4 / 2) * (kFeatures / 16) + warp;
        const uint2 words = reinterpret_cast<const uint2*>(stage)[unit * 8 + lane / 4];
        return __byte_perm(words.x, words.y, lane % 2 == 0 ? 0x5410 : 0x7632);
    }
};

}  // namespace ts::sm90
