// How the sums of a dds kernel become results.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "common/epilogue.cuh"
#include "sm90/dds_traits.cuh"

namespace ts::sm90 {

// The epilogue of one warpgroup: bias and activation in registers, then through shared memory by TMA. A
// residual comes through the same buffers, into which the results that it is added to are put.
template <class Traits>
class DdsEpilogue {
    using Element = typename Traits::Element;
    using Math = typename Traits::Math;
    static constexpr int kLine = 128;  // bytes

  public:
    __device__ DdsEpilogue(const DdsArguments& arguments, typename Traits::Shared& shared, int group)
        : arguments_(arguments),
          buffers_(shared.output[group]),
          arrived_(shared.residual[group]),
          group_(group),
          thread_(threadIdx.x % 128),
          parts_(arguments.row_parts),
          staged_(place()) {}

    // Called once for each tile, before its sums are stored: asks for the residual of the first chunks.
    // `rows`: the block rows of the CTA's tile.
    __device__ void begin(const int* rows, int token) {
        rows_ = rows;
        token_ = token;
        if (arguments_.has_residual && thread_ == 0) {
            cute::tma_store_wait<0>();
            for (int chunk = 0; chunk < Traits::kChunks; ++chunk) load_residual(chunk);
        }
    }

    __device__ void store(float (&sums)[kSums]) {
        finish(sums);
        if (!arguments_.has_residual) wait_for_buffers<0>();  // of the tile before
#pragma unroll
        for (int chunk = 0; chunk < kAllChunks; ++chunk) {
            char* const buffer = buffers_[chunk % Traits::kChunks];
            float* const chunk_sums = sums + chunk * kSumsOfChunk;
            if (arguments_.has_residual)
                add_residual(chunk_sums, chunk % Traits::kChunks);
            else if (chunk >= Traits::kChunks)
                wait_for_buffers<Traits::kChunks - 1>();
            stage(chunk_sums, buffer);
            cutlass::arch::fence_view_async_shared();
            sync();
            if (thread_ == 0) store_chunk(chunk);
        }
    }

    // Before the CTA ends, its stores must have read shared memory.
    __device__ void finish_stores() const { cute::tma_store_wait<0>(); }

  private:
    static constexpr int kAllChunks = Traits::kTileTokens / Traits::kChunkTokens;
    static constexpr int kSumsOfChunk = Traits::kChunkTokens / 2;

    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + group_); }

    // Waits until all but the last kPending stores have read their buffers.
    template <int kPending>
    __device__ void wait_for_buffers() const {
        if (thread_ == 0) cute::tma_store_wait<kPending>();
        sync();
    }

    // Feature of the output of a feature of the warpgroup, negative if the tile has none there.
    __device__ int output_feature(int feature) const {
        const int within_tile = group_ * Traits::kGroupFeatures + feature;
        const int row = __ldg(rows_ + (within_tile >> arguments_.row_shift));
        return row < 0 ? row : (row << arguments_.row_shift) + (within_tile & arguments_.row_block - 1);
    }

    __device__ void finish(float (&sums)[kSums]) const {
        if (arguments_.bias != nullptr) {
            const int feature = thread_ / 32 * 16 + thread_ % 32 / 4;
            const float bias[2] = {bias_at(output_feature(feature)), bias_at(output_feature(feature + 8))};
#pragma unroll
            for (int i = 0; i < kSums; ++i) sums[i] += bias[i / 2 % 2];
        }
        // One loop for each: a choice for each sum would take longer than the products.
        switch (arguments_.activation) {
            case Activation::relu:
                return activate_all<Activation::relu>(sums);
            case Activation::gelu:
                return activate_all<Activation::gelu>(sums);
            case Activation::silu:
                return activate_all<Activation::silu>(sums);
            default:
                return;
        }
    }

    template <Activation kActivation>
    __device__ static void activate_all(float (&sums)[kSums]) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = activate(sums[i], kActivation);
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
        return swizzled(
            (feature / width * Traits::kChunkTokens + token + lane % 8) * 2 * width + feature % width * 2,
            2 * width);
    }
    __device__ static uint32_t swizzled(uint32_t offset, uint32_t line) {
        return offset ^ (offset / kLine & line / 16 - 1) * 16;
    }

    // Where the lane's line of the i-th four matrices of a chunk goes. 16 tokens on, neither swizzle changes.
    __device__ char* line_of(char* buffer, int i) const {
        return arguments_.output_layout == Layout::row_major
                   ? buffer + staged_ + 32 * i * arguments_.row_width
                   : buffer + (staged_ ^ 32 * i);
    }

    // Rounds the sums of a chunk and puts them into a buffer.
    __device__ void stage(const float* sums, char* buffer) const {
#pragma unroll
        for (int i = 0; i < Traits::kChunkTokens / 16; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto pair = Math::round(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
                words[j] = reinterpret_cast<const uint32_t&>(pair);
            }
            auto& line = *reinterpret_cast<cute::uint128_t*>(line_of(buffer, i));
            if (arguments_.output_layout == Layout::row_major)
                cute::SM90_U16x8_STSM_T::copy(words[0], words[1], words[2], words[3], line);
            else
                cute::SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3], line);
        }
    }

    // Adds a buffer's residual, as soon as it is there, to the sums of a chunk.
    __device__ void add_residual(float* sums, int buffer) {
        wait(arrived_[buffer], residual_parity_ >> buffer & 1);
        residual_parity_ ^= 1 << buffer;
#pragma unroll
        for (int i = 0; i < Traits::kChunkTokens / 16; ++i) {
            uint32_t words[4];
            const auto& line = *reinterpret_cast<const cute::uint128_t*>(line_of(buffers_[buffer], i));
            if (arguments_.output_layout == Layout::row_major)
                cute::SM75_U16x8_LDSM_T::copy(line, words[0], words[1], words[2], words[3]);
            else
                cute::SM75_U32x4_LDSM_N::copy(line, words[0], words[1], words[2], words[3]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto& pair = reinterpret_cast<const Pair<Element>&>(words[j]);
                sums[8 * i + 2 * j] += to_float(pair.first);
                sums[8 * i + 2 * j + 1] += to_float(pair.second);
            }
        }
    }

    // Calls visit(x, y, shared memory) for the box of each block row of a chunk.
    template <class Visit>
    __device__ void each_box(int chunk, Visit visit) const {
        const int token = token_ + chunk * Traits::kChunkTokens;
        for (int part = 0; part < parts_; ++part) {
            const int feature = output_feature(part << arguments_.row_shift);
            if (feature < 0) continue;
            char* const box = buffers_[chunk % Traits::kChunks] + (part << arguments_.row_shift) * kLine;
            const bool row_major = arguments_.output_layout == Layout::row_major;
            visit(row_major ? feature : token, row_major ? token : feature, box);
        }
    }

    // One thread. The residual of the chunk that takes the buffer next follows it there.
    __device__ void store_chunk(int chunk) const {
        each_box(chunk, [&](int x, int y, const char* box) {
            cute::SM90_TMA_STORE_2D::copy(&arguments_.output, box, x, y);
        });
        cute::tma_store_arrive();
        if (!arguments_.has_residual || chunk + Traits::kChunks >= kAllChunks) return;
        cute::tma_store_wait<0>();
        load_residual(chunk + Traits::kChunks);
    }

    __device__ void load_residual(int chunk) const {
        const Barrier& arrived = arrived_[chunk % Traits::kChunks];
        int boxes = 0;
        each_box(chunk, [&](int x, int y, char* box) {
            load_box(&arguments_.residual, arrived, Multicast{1}, box, x, y);
            ++boxes;
        });
        arrived.arrive_and_expect_tx(boxes * Traits::kChunkBytes / parts_);
    }

    const DdsArguments& arguments_;
    char (&buffers_)[Traits::kChunks][Traits::kChunkBytes];
    const Barrier (&arrived_)[Traits::kChunks];  // of the residual in a buffer
    int group_;
    int thread_;
    int parts_;        // block rows of the warpgroup
    uint32_t staged_;  // see place()
    uint32_t residual_parity_ = 0;
    const int* rows_ = nullptr;
    int token_ = 0;
};

}  // namespace ts::sm90
