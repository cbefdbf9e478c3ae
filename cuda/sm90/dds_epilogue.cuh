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
          parts_(arguments.row_parts),
          staged_(place()) {}

    // `rows`: the block rows of the CTA's tile.
    __device__ void store(float (&sums)[kSums], const int* rows, int token) const {
        constexpr int kAllChunks = Traits::kTileTokens / Traits::kChunkTokens;
        finish(sums, rows);
#pragma unroll
        for (int chunk = 0; chunk < kAllChunks; ++chunk) {
            // The buffers of the tile before have been read; later on only those of this tile are awaited.
            if (chunk == 0) wait_for_buffers<0>();
            if (chunk >= Traits::kChunks) wait_for_buffers<Traits::kChunks - 1>();
            char* const buffer = buffers_[chunk % Traits::kChunks];
            stage(sums + chunk * kSumsOfChunk, buffer);
            cutlass::arch::fence_view_async_shared();
            sync();
            if (thread_ == 0) store_chunk(rows, token + chunk * Traits::kChunkTokens, buffer);
        }
    }

    // Before the CTA ends, its stores must have read shared memory.
    __device__ void finish_stores() const { cute::tma_store_wait<0>(); }

  private:
    static constexpr int kSumsOfChunk = Traits::kChunkTokens / 2;

    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + group_); }

    // Waits until all but the last kPending stores have read their buffers.
    template <int kPending>
    __device__ void wait_for_buffers() const {
        if (thread_ == 0) cute::tma_store_wait<kPending>();
        sync();
    }

    // Feature of the output of a feature of the warpgroup, negative if the tile has none there.
    __device__ int output_feature(const int* rows, int feature) const {
        const int within_tile = group_ * Traits::kGroupFeatures + feature;
        const int row = __ldg(rows + (within_tile >> arguments_.row_shift));
        return row < 0 ? row : (row << arguments_.row_shift) + (within_tile & arguments_.row_block - 1);
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

    // Where this lane's line of the first four 8 x 8 matrices goes in a buffer, which holds a box for each
    // block row, swizzled as TMA wants it.
    __device__ uint32_t place() const {
        const int warp = thread_ / 32, lane = thread_ % 32, matrix = lane / 8;
        const int feature = 16 * warp + matrix % 2 * 8, token = matrix / 2 * 8;
        if (arguments_.output_layout == Layout::feature_major)
            return swizzled((feature + lane % 8) * kLine + token * 2, kLine);
        const int width = arguments_.row_width;
        return swizzled((feature / width * Traits::kChunkTokens + token + lane % 8) * 2 * width +
                            feature % width * 2,
                        2 * width);
    }
    __device__ static uint32_t swizzled(uint32_t offset, uint32_t line) {
        return offset ^ (offset / kLine & line / 16 - 1) * 16;
    }

    // Rounds the sums of a chunk and puts them into a buffer.
    __device__ void stage(const float* sums, char* buffer) const {
        const uint32_t line = 2 * arguments_.row_width;
#pragma unroll
        for (int i = 0; i < Traits::kChunkTokens / 16; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto pair = Math::round(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
                words[j] = reinterpret_cast<const uint32_t&>(pair);
            }
            // 16 tokens on, neither swizzle changes.
            if (arguments_.output_layout == Layout::row_major)
                copy<cute::SM90_U16x8_STSM_T>(words, buffer + staged_ + 16 * i * line);
            else
                copy<cute::SM90_U32x4_STSM_N>(words, buffer + (staged_ ^ 32 * i));
        }
    }

    template <class Store>
    __device__ static void copy(const uint32_t (&words)[4], char* target) {
        Store::copy(words[0], words[1], words[2], words[3], *reinterpret_cast<cute::uint128_t*>(target));
    }

    // A box for each block row.
    __device__ void store_chunk(const int* rows, int token, const char* buffer) const {
        for (int part = 0; part < parts_; ++part) {
            const int feature = output_feature(rows, part << arguments_.row_shift);
            if (feature < 0) continue;
            const char* const source = buffer + (part << arguments_.row_shift) * kLine;
            if (arguments_.output_layout == Layout::row_major)
                cute::SM90_TMA_STORE_2D::copy(&arguments_.output, source, feature, token);
            else
                cute::SM90_TMA_STORE_2D::copy(&arguments_.output, source, token, feature);
        }
        cute::tma_store_arrive();
    }

    const DdsArguments& arguments_;
    char (&buffers_)[Traits::kChunks][Traits::kChunkBytes];
    int group_;
    int thread_;
    int parts_;        // block rows of the warpgroup
    uint32_t staged_;  // see place()
};

}  // namespace ts::sm90
