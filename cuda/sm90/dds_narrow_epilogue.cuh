// How the sums of the dds kernel for narrow blocks become results.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "common/epilogue.cuh"
#include "sm90/dds_narrow_traits.cuh"

namespace ts::sm90 {

// The epilogue of one warpgroup: bias and activation in registers, then through shared memory by TMA.
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
          row_major_(arguments.output_layout == Layout::row_major) {}

    // `rows`: the block rows of the warpgroup.
    __device__ void store(Sums& sums, const int* rows, int token) const {
        constexpr int kAll = Traits::kRows * Traits::kHalves;
        static_assert(kAll % Traits::kBuffers == 0);
#pragma unroll
        for (int first = 0; first < kAll; first += Traits::kBuffers) {
            if (thread_ == 0) cute::tma_store_wait<0>();
            sync();
#pragma unroll
            for (int i = 0; i < Traits::kBuffers; ++i) {
                auto& half = sums[(first + i) / Traits::kHalves][(first + i) % Traits::kHalves];
                const int* const block_rows = rows + (first + i) / Traits::kHalves * Traits::kParts;
                finish(half, block_rows);
                if (arguments_.residual != nullptr)
                    add_residual(half, block_rows,
                                 token + (first + i) % Traits::kHalves * Traits::kHalfTokens);
                stage(half, buffers_[i]);
            }
            cutlass::arch::fence_view_async_shared();
            sync();
            if (thread_ == 0) store_boxes(rows, token, first);
        }
    }

    // Before the CTA ends, its stores must have read shared memory.
    __device__ void finish_stores() const { cute::tma_store_wait<0>(); }

  private:
    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + group_); }

    // `rows`: the block rows of these features.
    __device__ void finish(float (&sums)[Traits::kRowSums], const int* rows) const {
        if (arguments_.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < Traits::kRowSums; ++i) {
                if (i % 4 >= 2) continue;  // the same features, eight tokens on
                const int feature = i / 4 * 8 + thread_ % 4 * 2 + i % 2;
                const float bias = bias_at(__ldg(rows + feature / Traits::kBlock), feature % Traits::kBlock);
                sums[i] += bias;
                sums[i + 2] += bias;
            }
        }
        activate_all<Element>(sums, arguments_.activation);
    }

    __device__ void add_residual(float (&sums)[Traits::kRowSums], const int* rows, int first_token) const {
        const auto* const residual = static_cast<const Element*>(arguments_.residual);
        const int64_t ld = arguments_.residual_ld;
#pragma unroll
        for (int i = 0; i < Traits::kRowSums; i += 2) {
            const int within = i / 4 * 8 + thread_ % 4 * 2;
            const int row = __ldg(rows + within / Traits::kBlock);
            const int token = first_token + thread_ / 32 * 16 + thread_ % 32 / 4 + i / 2 % 2 * 8;
            if (row < 0 || token >= arguments_.tokens) continue;
            const int64_t feature = row * Traits::kBlock + within % Traits::kBlock;
            const Element* const from = residual + (row_major_ ? token * ld + feature : feature * ld + token);
            sums[i] += to_float(from[0]);
            sums[i + 1] += to_float(from[row_major_ ? 1 : ld]);
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
        const int token = thread_ / 32 * 16 + (row_major_ ? matrix % 2 * 8 + thread_ % 8 : matrix % 2 * 8);
#pragma unroll
        for (int i = 0; i < Traits::kRowSums / 8; ++i) {
            const int feature = i * 16 + matrix / 2 * 8 + (row_major_ ? 0 : thread_ % 8);
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto pair = Traits::Math::round(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
                words[j] = reinterpret_cast<const uint32_t&>(pair);
            }
            if (row_major_)
                copy<cute::SM90_U32x4_STSM_N>(words, buffer + row_major_place(feature, token));
            else
                copy<cute::SM90_U16x8_STSM_T>(words, buffer + swizzled(feature * kLine + token * 2, kLine));
        }
    }

    __device__ static int row_major_place(int feature, int token) {
        constexpr int kWidth = 2 * Traits::kBlock;
        return swizzled(
            (feature / Traits::kBlock * Traits::kHalfTokens + token) * kWidth + feature % Traits::kBlock * 2,
            kWidth);
    }
    __device__ static int swizzled(int offset, int line) {
        return offset ^ (offset / kLine & line / 16 - 1) * 16;
    }

    template <class Store>
    __device__ static void copy(const uint32_t (&words)[4], char* target) {
        Store::copy(words[0], words[1], words[2], words[3], *reinterpret_cast<cute::uint128_t*>(target));
    }

    // All that is in the buffers, a box for each block row. `first`: what the first buffer holds.
    __device__ void store_boxes(const int* rows, int first_token, int first) const {
        for (int i = 0; i < Traits::kBuffers * Traits::kParts; ++i) {
            const int buffer = i / Traits::kParts, part = i % Traits::kParts;
            const int row = (first + buffer) / Traits::kHalves, half = (first + buffer) % Traits::kHalves;
            const int block_row = __ldg(rows + row * Traits::kParts + part);
            if (block_row < 0) continue;
            const char* const source = buffers_[buffer] + part * (Traits::kBufferBytes / Traits::kParts);
            const int token = first_token + half * Traits::kHalfTokens, feature = block_row * Traits::kBlock;
            if (row_major_)
                cute::SM90_TMA_STORE_2D::copy(&arguments_.output, source, feature, token);
            else
                cute::SM90_TMA_STORE_2D::copy(&arguments_.output, source, token, feature);
        }
        cute::tma_store_arrive();
    }

    const NarrowArguments& arguments_;
    char (&buffers_)[Traits::kBuffers][Traits::kBufferBytes];
    int group_;
    int thread_;
    bool row_major_;
};

}  // namespace ts::sm90
