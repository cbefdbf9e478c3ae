// How the sums of the dds kernel for narrow blocks become results.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "common/epilogue.cuh"
#include "sm90/dds_narrow_traits.cuh"

namespace ts::sm90 {

// The epilogue of one warpgroup: bias and activation in registers, then straight to memory, if what the four
// lanes that have a token's features exchange makes 16 bytes for each; through shared memory by TMA where
// tokens lie side by side.
template <class Traits>
class NarrowEpilogue {
    using Element = typename Traits::Element;
    static constexpr int kLine = 128;  // bytes over which feature-major boxes are swizzled

  public:
    using Sums = float[Traits::kRows][Traits::kHalves][Traits::kRowSums];

    __device__ NarrowEpilogue(const NarrowArguments& arguments, typename Traits::Shared& shared, int group)
        : arguments_(arguments),
          buffers_(shared.output[group]),
          group_(group),
          thread_(threadIdx.x % 128),
          lane_(threadIdx.x % 32) {}

    // Reads early what the next tile's results need: a warp stops where it uses what has not arrived. `rows`:
    // the block rows of the warpgroup.
    __device__ void prepare(const int* rows) { next_row_ = lane_ < kBlockRows ? __ldg(rows + lane_) : -1; }

    __device__ void begin(int token) {
        token_ = token;
        row_ = next_row_;
    }

    __device__ void store(Sums& sums) const {
        if (arguments_.output_layout == Layout::row_major)
            store_rows(sums);
        else
            store_columns(sums);
    }

    // Before the CTA ends, its stores must have read shared memory.
    __device__ void finish_stores() const { cute::tma_store_wait<0>(); }

  private:
    static constexpr int kBlockRows = Traits::kRows * Traits::kParts;
    static constexpr int kAll = Traits::kRows * Traits::kHalves;

    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + group_); }

    // The block row of some features of a row of the warpgroup, negative if there is none.
    __device__ int block_row(int row, int feature) const {
        return __shfl_sync(~0u, row_, row * Traits::kParts + feature / Traits::kBlock);
    }

    __device__ int first_token(int half) const { return token_ + half * Traits::kHalfTokens; }

    __device__ void store_rows(Sums& sums) const {
        auto* const output = static_cast<Element*>(arguments_.output_data);
        const int feature = lane_ % 4 * 8;
#pragma unroll
        for (int i = 0; i < kAll; ++i) {
            const int row = i / Traits::kHalves, half = i % Traits::kHalves;
            finish(sums[row][half], row, half);
            const int block = block_row(row, feature);
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {  // tokens on
                const uint4 results = eight_features(sums[row][half] + 2 * eight);
                const int token = first_token(half) + thread_ / 32 * 16 + lane_ / 4 + 8 * eight;
                if (block < 0 || token >= arguments_.tokens) continue;
                const int64_t at =
                    token * arguments_.output_ld + block * Traits::kBlock + feature % Traits::kBlock;
                *reinterpret_cast<uint4*>(output + at) = results;
            }
        }
    }

    // Of a token's 32 features the four lanes that have them, each two of every eight, get eight each.
    __device__ static uint4 eight_features(const float* sums) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = rounded<typename Traits::Math>(sums[4 * i], sums[4 * i + 1]);
        exchange(words);
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ void store_columns(Sums& sums) const {
        static_assert(kAll % Traits::kBuffers == 0);
#pragma unroll
        for (int first = 0; first < kAll; first += Traits::kBuffers) {
            if (thread_ == 0) cute::tma_store_wait<0>();
            sync();
#pragma unroll
            for (int i = 0; i < Traits::kBuffers; ++i) {
                const int row = (first + i) / Traits::kHalves, half = (first + i) % Traits::kHalves;
                finish(sums[row][half], row, half);
                stage(sums[row][half], buffers_[i]);
            }
            cutlass::arch::fence_view_async_shared();
            sync();
            store_boxes(first);
        }
    }

    // Bias, activation and residual of one row's features and half of the tokens.
    __device__ void finish(float (&sums)[Traits::kRowSums], int row, int half) const {
        if (arguments_.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < Traits::kRowSums; ++i) {
                if (i % 4 >= 2) continue;  // the same features, eight tokens on
                const int feature = i / 4 * 8 + thread_ % 4 * 2 + i % 2;
                const float bias = bias_at(block_row(row, feature), feature % Traits::kBlock);
                sums[i] += bias;
                sums[i + 2] += bias;
            }
        }
        activate_all<Element>(sums, arguments_.activation);
        if (arguments_.residual != nullptr) add_residual(sums, row, first_token(half));
    }

    __device__ void add_residual(float (&sums)[Traits::kRowSums], int row, int first_token) const {
        const auto* const residual = static_cast<const Element*>(arguments_.residual);
        const int64_t ld = arguments_.residual_ld;
#pragma unroll
        for (int i = 0; i < Traits::kRowSums; i += 2) {
            const int within = i / 4 * 8 + thread_ % 4 * 2;
            const int block = block_row(row, within);
            const int token = first_token + thread_ / 32 * 16 + thread_ % 32 / 4 + i / 2 % 2 * 8;
            if (block < 0 || token >= arguments_.tokens) continue;
            const int64_t feature = block * Traits::kBlock + within % Traits::kBlock;
            const bool row_major = arguments_.output_layout == Layout::row_major;
            const Element* const from = residual + (row_major ? token * ld + feature : feature * ld + token);
            sums[i] += to_float(from[0]);
            sums[i + 1] += to_float(from[row_major ? 1 : ld]);
        }
    }

    __device__ float bias_at(int row, int feature) const {
        if (row < 0) return 0.0f;
        return to_float(static_cast<const Element*>(arguments_.bias)[row * Traits::kBlock + feature]);
    }

    // Rounds 64 tokens of a row's features and puts them into a buffer, which holds a box for each block
    // row, swizzled as TMA wants it. A lane gives the address of one line of four 8 x 8 matrices.
    __device__ void stage(const float (&sums)[Traits::kRowSums], char* buffer) const {
        const int matrix = thread_ / 8 % 4;
        const int token = thread_ / 32 * 16 + matrix % 2 * 8;
#pragma unroll
        for (int i = 0; i < Traits::kRowSums / 8; ++i) {
            const int feature = i * 16 + matrix / 2 * 8 + thread_ % 8;
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words[j] = rounded<typename Traits::Math>(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
            char* const line = buffer + swizzled(feature * kLine + token * 2);
            cute::SM90_U16x8_STSM_T::copy(words[0], words[1], words[2], words[3],
                                          *reinterpret_cast<cute::uint128_t*>(line));
        }
    }

    __device__ static int swizzled(int offset) { return offset ^ (offset / kLine & 7) * 16; }

    // All that is in the buffers, a box for each block row. `first`: what the first buffer holds.
    __device__ void store_boxes(int first) const {
        for (int i = 0; i < Traits::kBuffers * Traits::kParts; ++i) {
            const int buffer = i / Traits::kParts, part = i % Traits::kParts;
            const int row = (first + buffer) / Traits::kHalves, half = (first + buffer) % Traits::kHalves;
            const int block = block_row(row, part * Traits::kBlock);
            if (block < 0 || thread_ != 0) continue;
            const char* const source = buffers_[buffer] + part * (Traits::kBufferBytes / Traits::kParts);
            cute::SM90_TMA_STORE_2D::copy(&arguments_.output, source, first_token(half),
                                          block * Traits::kBlock);
        }
        if (thread_ == 0) cute::tma_store_arrive();
    }

    const NarrowArguments& arguments_;
    char (&buffers_)[Traits::kBuffers][Traits::kBufferBytes];
    int group_;
    int thread_;
    int lane_;
    int token_ = 0;
    int row_ = -1;  // the block row whose place in the warpgroup is the lane's number
    int next_row_ = -1;
};

}  // namespace ts::sm90
