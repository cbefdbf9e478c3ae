// How the sums of a dds kernel become results.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include <algorithm>

#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "sm90/dds_traits.cuh"
#include "sm90/tensor_map.h"

namespace ts::sm90 {

// The epilogue of one warpgroup: bias and activation in registers, then through shared memory by TMA. A
// residual or gate comes through the same buffers, into which the results of it are put. A gate is activated
// there: code for all sums in registers would be as long as that of all else.
template <class Traits>
class DdsEpilogue {
    using Element = typename Traits::Element;
    using Math = typename Traits::Math;
    static constexpr int kLine = 128;  // bytes
    static constexpr int kSums = Traits::kSums;

  public:
    using Buffers = char[Traits::kChunks][Traits::kChunkBytes];
    using Arrived = Barrier[Traits::kChunks];  // of the residual in a buffer

    __device__ DdsEpilogue(const DdsArguments& arguments, Buffers& buffers, const Arrived& arrived,
                           int warpgroup)
        : arguments_(arguments),
          buffers_(buffers),
          arrived_(arrived),
          warpgroup_(warpgroup),
          thread_(threadIdx.x % 128),
          row_count_(arguments.warpgroup_rows),
          staged_(place()),
          first_row_(row_of(0)) {}

    // What is read of a tile is read early and used late: a warp stops where it uses what has not arrived.
    //
    // Called before the results of the tile before are stored. `rows`: the block rows of the CTA's tile.
    __device__ void prepare(const int* rows) {
#pragma unroll
        for (int i = 0; i < kMaxRows; ++i)
            if (i < row_count_) next_rows_[i] = __ldg(rows + first_row_ + i);
        if (arguments_.bias == nullptr) return;
        next_bias_rows_[0] = __ldg(rows + row_of(bias_feature()));
        next_bias_rows_[1] = __ldg(rows + row_of(bias_feature() + 8));
    }

    // Called before the sums are computed; asks for the residual of the first chunks.
    __device__ void begin(int token) {
        token_ = token;
#pragma unroll
        for (int i = 0; i < kMaxRows; ++i) rows_[i] = next_rows_[i];
        if (arguments_.bias != nullptr) {
            bias_[0] = bias_at(output_feature(next_bias_rows_[0], bias_feature()));
            bias_[1] = bias_at(output_feature(next_bias_rows_[1], bias_feature() + 8));
        }
        if (arguments_.has_residual && thread_ == 0) {
            cute::tma_store_wait<0>();
            for (int chunk = 0; chunk < Traits::kChunks; ++chunk) load_residual(chunk);
        }
    }

    __device__ void store(float (&sums)[kSums]) {
        if (arguments_.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) sums[i] += to_float(bias_[i / 2 % 2]);
        }
        activate_all<Element>(sums, arguments_.activation);
        if (arguments_.output_layout == Layout::row_major)
            store_as<true>(sums);
        else
            store_as<false>(sums);
    }

    // Before the CTA ends, its stores must have read shared memory.
    __device__ void finish_stores() const { cute::tma_store_wait<0>(); }

  private:
    static constexpr int kAllChunks = Traits::kAllChunks;
    static constexpr int kRest = kAllChunks - Traits::kChunks;
    static_assert(kRest <= Traits::kChunks);
    static constexpr int kSumsOfChunk = Traits::kChunkTokens / 2;
    static constexpr int kMaxRows = Traits::kWarpgroupFeatures / 16;

    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup_); }

    // Chunks take the buffers in turn. As many as there are buffers are rounded at a time, since waiting for
    // one another takes longer, and then the others.
    template <bool kRowMajor>
    __device__ void store_as(float (&sums)[kSums]) {
        store_chunks<kRowMajor, 0, Traits::kChunks, 0>(sums);
        if constexpr (kRest > 0)
            store_chunks<kRowMajor, Traits::kChunks, kRest, Traits::kChunks - kRest>(sums);
    }

    // Stores kCount chunks from kFirst on, when all but the last kPending stores have read their buffers.
    template <bool kRowMajor, int kFirst, int kCount, int kPending>
    __device__ void store_chunks(float (&sums)[kSums]) {
        if (!arguments_.has_residual) {
            if (thread_ == 0) cute::tma_store_wait<kPending>();
            sync();
        }
        if (arguments_.gate_activation != Activation::none) activate_gate<kRowMajor>(kFirst, kCount);
#pragma unroll
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk) {
            float* const chunk_sums = sums + chunk * kSumsOfChunk;
            if (arguments_.has_residual) combine<kRowMajor>(chunk_sums, chunk % Traits::kChunks);
            stage<kRowMajor>(chunk_sums, buffers_[chunk % Traits::kChunks]);
        }
        cutlass::arch::fence_view_async_shared();
        sync();
        if (thread_ != 0) return;
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk) store_chunk(chunk);
        if (!arguments_.has_residual || kFirst > 0 || kRest == 0) return;
        cute::tma_store_wait<Traits::kChunks - kRest>();
        for (int chunk = Traits::kChunks; chunk < kAllChunks; ++chunk) load_residual(chunk);
    }

    // The first of the features of the warpgroup that a thread has sums of; the other is 8 on.
    __device__ int bias_feature() const { return thread_ / 32 * 16 + thread_ % 32 / 4; }

    // The place in the tile of the block row of a feature of the warpgroup.
    __device__ int row_of(int feature) const {
        return warpgroup_ * Traits::kWarpgroupFeatures + feature >> arguments_.row_shift;
    }

    // The feature of the output that is a feature of the warpgroup, negative if the tile has none there.
    __device__ int output_feature(int row, int feature) const {
        const int within_tile = warpgroup_ * Traits::kWarpgroupFeatures + feature;
        return row < 0 ? row : (row << arguments_.row_shift) + (within_tile & arguments_.row_block - 1);
    }

    __device__ Element bias_at(int feature) const {
        return feature < 0 ? Element(0.0f) : static_cast<const Element*>(arguments_.bias)[feature];
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
    template <bool kRowMajor>
    __device__ cute::uint128_t& line_of(char* buffer, int i) const {
        const uint32_t offset = kRowMajor ? staged_ + 32 * i * arguments_.row_width : staged_ ^ 32 * i;
        return *reinterpret_cast<cute::uint128_t*>(buffer + offset);
    }

    // Rounds the sums of a chunk and puts them into a buffer.
    template <bool kRowMajor>
    __device__ void stage(const float* sums, char* buffer) const {
#pragma unroll
        for (int i = 0; i < Traits::kChunkTokens / 16; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words[j] = rounded<Math>(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
            using Copy = std::conditional_t<kRowMajor, cute::SM90_U16x8_STSM_T, cute::SM90_U32x4_STSM_N>;
            Copy::copy(words[0], words[1], words[2], words[3], line_of<kRowMajor>(buffer, i));
        }
    }

    // Activates the gate of some chunks, as soon as it is there, where it lies. A warp does so for itself.
    template <bool kRowMajor>
    __device__ void activate_gate(int first, int count) const {
#pragma unroll 1
        for (int chunk = first; chunk < first + count; ++chunk) {
            const int buffer = chunk % Traits::kChunks;
            wait(arrived_[buffer], residual_parity_ >> buffer & 1);
#pragma unroll 1
            for (int i = 0; i < Traits::kChunkTokens / 16; ++i)
                activate_elements(reinterpret_cast<Element*>(&line_of<kRowMajor>(buffers_[buffer], i)),
                                  arguments_.gate_activation);
        }
        __syncwarp();
    }

    // Adds a buffer's residual, as soon as it is there, to the sums of a chunk, or multiplies them by its
    // gate.
    template <bool kRowMajor>
    __device__ void combine(float* sums, int buffer) {
        wait(arrived_[buffer], residual_parity_ >> buffer & 1);
        residual_parity_ ^= 1 << buffer;
#pragma unroll
        for (int i = 0; i < Traits::kChunkTokens / 16; ++i) {
            uint32_t words[4];
            using Copy = std::conditional_t<kRowMajor, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
            Copy::copy(line_of<kRowMajor>(buffers_[buffer], i), words[0], words[1], words[2], words[3]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto& pair = reinterpret_cast<const Pair<Element>&>(words[j]);
                const float first = to_float(pair.first), second = to_float(pair.second);
                float* const to = sums + 8 * i + 2 * j;
                to[0] = arguments_.gated ? to[0] * first : to[0] + first;
                to[1] = arguments_.gated ? to[1] * second : to[1] + second;
            }
        }
    }

    // Calls visit(x, y, shared memory) for the box of each block row of a chunk.
    template <class Visit>
    __device__ void each_box(int chunk, Visit visit) const {
        const int token = token_ + chunk * Traits::kChunkTokens;
        const bool row_major = arguments_.output_layout == Layout::row_major;
#pragma unroll
        for (int i = 0; i < kMaxRows; ++i) {
            if (rows_[i] < 0) continue;
            const int feature = output_feature(rows_[i], i << arguments_.row_shift);
            char* const box = buffers_[chunk % Traits::kChunks] + (i << arguments_.row_shift) * kLine;
            visit(row_major ? feature : token, row_major ? token : feature, box);
        }
    }

    // One thread.
    __device__ void store_chunk(int chunk) const {
        each_box(chunk, [&](int x, int y, const char* box) {
            cute::SM90_TMA_STORE_2D::copy(&arguments_.output, box, x, y);
        });
        cute::tma_store_arrive();
    }

    __device__ void load_residual(int chunk) const {
        const Barrier& arrived = arrived_[chunk % Traits::kChunks];
        int boxes = 0;
        each_box(chunk, [&](int x, int y, char* box) {
            load_box(&arguments_.residual, arrived, Multicast{1}, box, x, y);
            ++boxes;
        });
        arrived.arrive_and_expect_tx(boxes * Traits::kChunkBytes / row_count_);
    }

    const DdsArguments& arguments_;
    Buffers& buffers_;
    const Arrived& arrived_;
    int warpgroup_;
    int thread_;
    int row_count_;    // block rows of the warpgroup
    uint32_t staged_;  // see place()
    uint32_t residual_parity_ = 0;
    int token_ = 0;
    int first_row_;       // of the warpgroup in a tile
    int rows_[kMaxRows];  // block rows of the warpgroup; -1: none
    Element bias_[2];     // of the features of a thread's sums
    int next_rows_[kMaxRows] = {-1, -1, -1, -1};
    int next_bias_rows_[2];
};

// Host side: the output, or the residual or gate, which is laid out like it.
template <class Traits>
cudaError_t map_results(CUtensorMap& map, const Matrix& matrix, const Problem& problem) {
    const int rows = std::min(problem.row_block(), Traits::kWarpgroupFeatures);
    if (matrix.layout == Layout::row_major)
        return encode(map, problem.dtype, matrix.data,
                      {{problem.features(), 1, rows}, {problem.tokens, matrix.ld, Traits::kChunkTokens}});
    return encode(map, problem.dtype, matrix.data,
                  {{problem.tokens, 1, Traits::kChunkTokens}, {problem.features(), matrix.ld, rows}});
}

// All arguments that the epilogue reads.
template <class Traits>
cudaError_t describe_results(DdsArguments& arguments, const Problem& problem) {
    arguments.bias = problem.bias;
    arguments.row_block = problem.row_block();
    arguments.row_shift = log2_of_block(arguments.row_block);
    arguments.row_width = std::min(arguments.row_block, Traits::kWarpgroupFeatures);
    arguments.warpgroup_rows = Traits::kWarpgroupFeatures / arguments.row_width;
    arguments.output_layout = problem.output().layout;
    arguments.activation = problem.activation;
    arguments.gate_activation = problem.gate_activation;
    arguments.gated = problem.gated;
    arguments.has_residual = problem.residual.data != nullptr;
    if (arguments.has_residual)
        if (const cudaError_t error = map_results<Traits>(arguments.residual, problem.residual, problem))
            return error;
    return map_results<Traits>(arguments.output, problem.output(), problem);
}

}  // namespace ts::sm90
