// How the sums of a dds kernel become results.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "sm90/dds_staging.cuh"
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
    static constexpr bool kFloat = sizeof(Element) == 4;
    using Staging = std::conditional_t<kFloat, FloatStaging, HalfStaging<Math>>;
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
          staging_(arguments, threadIdx.x % 128),
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
    static constexpr int kSumsOfChunk = Traits::kChunkTokens / 2;
    static constexpr int kMaxRows = Traits::kWarpgroupFeatures / 16;

    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup_); }

    // Chunks take the buffers in turn. As many as there are buffers are rounded at a time, since waiting for
    // one another takes longer, and then the next ones: those from kFirst on.
    template <bool kRowMajor, int kFirst = 0>
    __device__ void store_as(float (&sums)[kSums]) {
        constexpr int kCount = chunks_from(kFirst), kNext = chunks_from(kFirst + kCount);
        // All but so many of the last stores have then read their buffers.
        constexpr int kPending = kFirst == 0 ? 0 : Traits::kChunks - kCount;
        if (!arguments_.has_residual) {
            if (thread_ == 0) cute::tma_store_wait<kPending>();
            sync();
        }
        if (arguments_.gate_activation != Activation::none) activate_gate<kRowMajor>(kFirst, kCount);
#pragma unroll
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk) {
            float* const chunk_sums = sums + chunk * kSumsOfChunk;
            if (arguments_.has_residual) combine<kRowMajor>(chunk_sums, chunk % Traits::kChunks);
            staging_.template put<kRowMajor>(chunk_sums, buffers_[chunk % Traits::kChunks]);
        }
        cutlass::arch::fence_view_async_shared();
        sync();
        if (thread_ == 0) {
            for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk) store_chunk(chunk);
            if (arguments_.has_residual && kNext > 0) {
                cute::tma_store_wait<Traits::kChunks - kNext>();
                for (int chunk = kFirst + kCount; chunk < kFirst + kCount + kNext; ++chunk)
                    load_residual(chunk);
            }
        }
        if constexpr (kNext > 0) store_as<kRowMajor, kFirst + kCount>(sums);
    }
    static constexpr int chunks_from(int first) {
        return kAllChunks - first < Traits::kChunks ? kAllChunks - first : Traits::kChunks;
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

    // Activates the gate of some chunks, as soon as it is there, where it lies. A warp does so for itself.
    template <bool kRowMajor>
    __device__ void activate_gate(int first, int count) const {
#pragma unroll 1
        for (int chunk = first; chunk < first + count; ++chunk) {
            const int buffer = chunk % Traits::kChunks;
            wait(arrived_[buffer], residual_parity_ >> buffer & 1);
            staging_.template activate<kRowMajor>(buffers_[buffer], arguments_.gate_activation);
        }
        __syncwarp();
    }

    // Adds a buffer's residual, as soon as it is there, to the sums of a chunk, or multiplies them by its
    // gate.
    template <bool kRowMajor>
    __device__ void combine(float* sums, int buffer) {
        wait(arrived_[buffer], residual_parity_ >> buffer & 1);
        residual_parity_ ^= 1 << buffer;
        staging_.template combine<kRowMajor>(sums, buffers_[buffer], arguments_.gated);
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
            if (kFloat && arguments_.output_layout == Layout::row_major)
                cute::SM90_TMA_STORE_3D::copy(&arguments_.output, box, 0, y, x / 32);
            else
                cute::SM90_TMA_STORE_2D::copy(&arguments_.output, box, x, y);
        });
        cute::tma_store_arrive();
    }

    __device__ void load_residual(int chunk) const {
        const Barrier& arrived = arrived_[chunk % Traits::kChunks];
        int boxes = 0;
        each_box(chunk, [&](int x, int y, char* box) {
            if (kFloat && arguments_.output_layout == Layout::row_major)
                load_box(&arguments_.residual, arrived, Multicast{1}, box, 0, y, x / 32);
            else
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
    int row_count_;  // block rows of the warpgroup
    Staging staging_;
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
    constexpr int kWidth = 32;  // features of float32 that lie side by side
    if (matrix.layout == Layout::row_major && sizeof(typename Traits::Element) == 4)
        return encode(map, problem.dtype, matrix.data,
                      {{kWidth, 1, kWidth},
                       {problem.tokens, matrix.ld, Traits::kChunkTokens},
                       {problem.features() / kWidth, kWidth, rows / kWidth}});
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
