// How the sums of a dds kernel become results.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "common/epilogue.cuh"
#include "sm90/dds_traits.cuh"

namespace ts::sm90 {

// The epilogue of one warpgroup: bias and activation in registers, then through shared memory by TMA.
template <class Traits>
class DdsEpilogue {
    using Element = typename Traits::Element;
    using Math = typename Traits::Math;
    static constexpr int kLine = 128;  // bytes

  public:
    __device__ DdsEpilogue(const DdsArguments& arguments, typename Traits::Shared& shared, int group)
        : arguments_(arguments),
          buffers_(shared.output[group]),
          group_(group),
          thread_(threadIdx.x % 128),
          parts_(max(1, Traits::kGroupFeatures / arguments.row_block)) {}

    // `rows`: the block rows of the CTA's tile.
    __device__ void store(float (&sums)[kSums], const int* rows, int token) const {
        finish(sums, rows);
#pragma unroll
        for (int chunk = 0; chunk < Traits::kTileTokens / Traits::kChunkTokens; ++chunk) {
            if (chunk % Traits::kChunks == 0) wait_for_buffers();
            stage(sums, chunk);
            if (chunk % Traits::kChunks == Traits::kChunks - 1) {
                cutlass::arch::fence_view_async_shared();
                sync();
                store_chunks(rows, token, chunk);
            }
        }
    }

    // Before the CTA ends, its stores must have read shared memory.
    __device__ void finish_stores() const { cute::tma_store_wait<0>(); }

  private:
    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + group_); }

    __device__ void wait_for_buffers() const {
        if (thread_ == 0) cute::tma_store_wait<0>();
        sync();
    }

    // Feature of the output of a feature of the warpgroup, negative if the tile has none there.
    __device__ int output_feature(const int* rows, int feature) const {
        const int within_tile = group_ * Traits::kGroupFeatures + feature;
        const int row = __ldg(rows + within_tile / arguments_.row_block);
        return row < 0 ? row : row * arguments_.row_block + within_tile % arguments_.row_block;
    }

    __device__ void finish(float (&sums)[kSums], const int* rows) const {
        if (arguments_.bias != nullptr) {
            const int feature = thread_ / 32 * 16 + thread_ % 32 / 4;
            const float bias[2] = {bias_at(output_feature(rows, feature)),
                                   bias_at(output_feature(rows, feature + 8))};
#pragma unroll
            for (int i = 0; i < kSums; ++i) sums[i] += bias[i / 2 % 2];
        }
        if (arguments_.activation == Activation::none) return;
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = activate(sums[i], arguments_.activation);
    }

    __device__ float bias_at(int feature) const {
        return feature < 0 ? 0.0f : to_float(static_cast<const Element*>(arguments_.bias)[feature]);
    }

    // Rounds the sums of 64 tokens and puts them into their buffer, laid out as TMA swizzles them.
    __device__ void stage(const float (&sums)[kSums], int chunk) const {
        char* const buffer = buffers_[chunk % Traits::kChunks];
        const int warp = thread_ / 32, lane = thread_ % 32, matrix = lane / 8, line = lane % 8;
        const bool row_major = arguments_.output_layout == Layout::row_major;
#pragma unroll
        for (int pair = 0; pair < Traits::kChunkTokens / 16; ++pair) {
            const float* sum = sums + 32 * chunk + 8 * pair;
            const int feature = 16 * warp + matrix % 2 * 8, token = 16 * pair + matrix / 2 * 8;
            if (row_major)
                store_matrices<cute::SM90_U16x8_STSM_T>(sum, buffer, token + line, feature,
                                                        min(arguments_.row_block, Traits::kGroupFeatures));
            else
                store_matrices<cute::SM90_U32x4_STSM_N>(sum, buffer, feature + line, token,
                                                        Traits::kChunkTokens);
        }
    }

    // Four 8 x 8 matrices; this lane names the place of one line of them. Boxes of `width` elements a line
    // follow one another.
    template <class Store>
    __device__ static void store_matrices(const float* sums, char* buffer, int line, int column, int width) {
        const int box = column / width, bytes = 2 * width;
        uint32_t offset = box * Traits::kChunkTokens * bytes + line * bytes + column % width * 2;
        offset ^= (offset / kLine & bytes / 16 - 1) * 16;
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const auto rounded = Math::round(sums[2 * i], sums[2 * i + 1]);
            words[i] = reinterpret_cast<const uint32_t&>(rounded);
        }
        Store::copy(words[0], words[1], words[2], words[3],
                    *reinterpret_cast<cute::uint128_t*>(buffer + offset));
    }

    // One thread stores all buffers, the last of which holds `chunk`: a box for each block row.
    __device__ void store_chunks(const int* rows, int token, int chunk) const {
        if (thread_ != 0) return;
        const int features = Traits::kGroupFeatures / parts_;
        for (int part = 0; part < parts_; ++part) {
            const int feature = output_feature(rows, part * features);
            if (feature < 0) continue;
#pragma unroll
            for (int i = 0; i < Traits::kChunks; ++i) {
                const int first = token + (chunk - Traits::kChunks + 1 + i) * Traits::kChunkTokens;
                const char* const source = buffers_[i] + part * (Traits::kChunkBytes / parts_);
                if (arguments_.output_layout == Layout::row_major)
                    cute::SM90_TMA_STORE_2D::copy(&arguments_.output, source, feature, first);
                else
                    cute::SM90_TMA_STORE_2D::copy(&arguments_.output, source, first, feature);
            }
        }
        cute::tma_store_arrive();
    }

    const DdsArguments& arguments_;
    char (&buffers_)[Traits::kChunks][Traits::kChunkBytes];
    int group_;
    int thread_;
    int parts_;
};

}  // namespace ts::sm90
