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
// there: code for all sums in registers would be as long as that of all else. Each buffer belongs to a warp,
// whose first lane asks for what is read into it and stores from it.
//
// Wide tiles of 16 bits have one chunk more than there are buffers. If row-major, it goes to memory from
// registers: a buffer is free again only when what was stored from it has been read.
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
          warp_(threadIdx.x % 128 / 32),
          first_lane_(threadIdx.x % 32 == 0),
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
        next_warp_row_ = __ldg(rows + row_of(kWarpFeatures * warp_));
    }

    // Called before the sums are computed; asks for the residual of the first chunks.
    __device__ void begin(int token) {
        token_ = token;
#pragma unroll
        for (int i = 0; i < kMaxRows; ++i) rows_[i] = next_rows_[i];
        first_feature_ = output_feature(next_warp_row_, kWarpFeatures * warp_);
        if (arguments_.bias != nullptr) {
            // Of a row that the tile does not have any will do: choosing zero would wait for what is read.
            const auto* const bias = static_cast<const Element*>(arguments_.bias) + max(first_feature_, 0);
            bias_[0] = bias[threadIdx.x % 32 / 4];
            bias_[1] = bias[threadIdx.x % 32 / 4 + 8];
        }
        if (arguments_.has_residual) load_residual(0, Traits::kChunks);
    }

    // Called when the last products are under way: what need not wait for the sums.
    __device__ void ready() {
        if (arguments_.has_residual)
            await_residual<0, chunks_from(0)>();
        else
            wait_for_buffers();
    }

    __device__ void store(float (&sums)[kSums]) {
        if (arguments_.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) sums[i] += to_float(bias_[i / 2 % 2]);
        }
        activate_all<Element>(sums, arguments_.activation);
        if (arguments_.output_layout != Layout::row_major)
            store_as<false>(sums);
        else if constexpr (kStoresDirectly)
            store_last_directly(sums);
        else
            store_as<true>(sums);
    }

    // Before the CTA ends, its stores must have read shared memory.
    __device__ void finish_stores() const { cute::tma_store_wait<0>(); }

  private:
    static constexpr int kAllChunks = Traits::kAllChunks;
    static constexpr int kSumsOfChunk = Traits::kChunkTokens / 2;
    static constexpr int kWarpFeatures = 16;
    static constexpr int kMaxRows = Traits::kWarpgroupFeatures / kWarpFeatures;
    static constexpr bool kStoresDirectly = !kFloat && Traits::kChunks > 1 && kAllChunks == Traits::kChunks + 1;
    static_assert(Traits::kChunks <= 4, "a warp for each");

    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup_); }

    // Chunks take the buffers in turn. As many as there are buffers are rounded at a time, since waiting for
    // one another takes longer, and then the next ones: those from kFirst on.
    template <bool kRowMajor, int kFirst = 0>
    __device__ void store_as(float (&sums)[kSums]) {
        constexpr int kCount = chunks_from(kFirst), kNext = chunks_from(kFirst + kCount);
        put_chunks<kRowMajor, kFirst, kCount>(sums);
        store_buffers(kFirst, kCount);
        if constexpr (kNext > 0) {
            if (arguments_.has_residual) {
                load_residual(kFirst + kCount, kNext);
                await_residual<kFirst + kCount, kNext>();
            } else {
                wait_for_buffers();
            }
            store_as<kRowMajor, kFirst + kCount>(sums);
        }
    }
    static constexpr int chunks_from(int first) {
        return kAllChunks - first < Traits::kChunks ? kAllChunks - first : Traits::kChunks;
    }

    // The residual of the last chunk is read into the first buffer as soon as that of the first has been
    // added, and the first chunk is stored directly, too.
    __device__ void store_last_directly(float (&sums)[kSums]) {
        constexpr int kLast = kAllChunks - 1;
        if (!arguments_.has_residual) {
            put_chunks<true, 0, kLast>(sums);
            store_buffers(0, kLast);
        } else {
            combine_chunks<true, 0, 1>(sums);
            cutlass::arch::fence_view_async_shared();
            sync();
            load_residual(kLast, 1);
            put_chunks<true, 1, kLast - 1>(sums);
            store_buffers(1, kLast - 1);
            store_directly(sums, 0);
            await_residual<kLast, 1>();
            combine_chunks<true, kLast, 1>(sums);
            sync();  // all have read the first buffer, which the next tile's residual is read into
        }
        store_directly(sums, kLast);
    }

    __device__ void store_directly(const float* sums, int chunk) const {
        const int token = token_ + chunk * Traits::kChunkTokens;
        const int tokens = first_feature_ < 0 ? 0 : arguments_.tokens - token;
        auto* const target =
            static_cast<Element*>(arguments_.results) + token * arguments_.results_ld + first_feature_;
        staging_.store(sums + chunk * kSumsOfChunk, target, arguments_.results_ld, tokens);
    }

    // Waits until all that was stored from buffers has been read.
    __device__ void wait_for_buffers() const {
        if (first_lane_) cute::tma_store_wait<0>();
        sync();
    }

    // Puts the results of kCount chunks into their buffers.
    template <bool kRowMajor, int kFirst, int kCount>
    __device__ void put_chunks(float (&sums)[kSums]) {
        combine_chunks<kRowMajor, kFirst, kCount>(sums);
#pragma unroll
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk)
            staging_.template put<kRowMajor>(sums + chunk * kSumsOfChunk, buffer_of(chunk));
    }

    // Stores them from there.
    __device__ void store_buffers(int first, int count) const {
        cutlass::arch::fence_view_async_shared();
        sync();
        each_own_chunk(first, count, [&](int chunk) { store_chunk(chunk); });
    }

    // Asks for the residual of as many chunks.
    __device__ void load_residual(int first, int count) const {
        each_own_chunk(first, count, [&](int chunk) {
            cute::tma_store_wait<0>();
            load_chunk(chunk);
        });
    }

    // Calls visit(chunk) in one lane for the chunk, of some, whose buffer belongs to the warp.
    template <class Visit>
    __device__ void each_own_chunk(int first, int count, Visit visit) const {
        const int begin = first % Traits::kChunks;
        if (first_lane_ && warp_ >= begin && warp_ < begin + count) visit(first - begin + warp_);
    }

    __device__ char* buffer_of(int chunk) const { return buffers_[chunk % Traits::kChunks]; }

    // The place in the tile of the block row of a feature of the warpgroup.
    __device__ int row_of(int feature) const {
        return warpgroup_ * Traits::kWarpgroupFeatures + feature >> arguments_.row_shift;
    }

    // The feature of the output that is a feature of the warpgroup, negative if the tile has none there.
    __device__ int output_feature(int row, int feature) const {
        const int within_tile = warpgroup_ * Traits::kWarpgroupFeatures + feature;
        return row < 0 ? row : (row << arguments_.row_shift) + (within_tile & arguments_.row_block - 1);
    }

    // Waits for the residual of kCount chunks. A gate is activated where it lies; a warp does so for itself.
    template <int kFirst, int kCount>
    __device__ void await_residual() {
#pragma unroll 1
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk) {
            const int buffer = chunk % Traits::kChunks;
            wait(arrived_[buffer], residual_parity_ >> buffer & 1);
            residual_parity_ ^= 1 << buffer;
            if (arguments_.gate_activation != Activation::none) {
                if (arguments_.output_layout == Layout::row_major)
                    staging_.template activate<true>(buffer_of(chunk), arguments_.gate_activation);
                else
                    staging_.template activate<false>(buffer_of(chunk), arguments_.gate_activation);
            }
        }
        __syncwarp();
    }

    // Adds the residual of kCount chunks to their sums, or multiplies them by their gate.
    template <bool kRowMajor, int kFirst, int kCount>
    __device__ void combine_chunks(float (&sums)[kSums]) const {
        if (!arguments_.has_residual) return;
        if (arguments_.gated)
            join_chunks<kRowMajor, kFirst, kCount>(sums, [](float sum, float gate) { return sum * gate; });
        else
            join_chunks<kRowMajor, kFirst, kCount>(sums, [](float sum, float other) { return sum + other; });
    }

    template <bool kRowMajor, int kFirst, int kCount, class Join>
    __device__ void join_chunks(float (&sums)[kSums], Join join) const {
#pragma unroll
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk)
            staging_.template combine<kRowMajor>(sums + chunk * kSumsOfChunk, buffer_of(chunk), join);
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
            char* const box = buffer_of(chunk) + (i << arguments_.row_shift) * kLine;
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

    __device__ void load_chunk(int chunk) const {
        const Barrier& arrived = arrived_[chunk % Traits::kChunks];
        int boxes = 0;
        each_box(chunk, [&](int x, int y, char* box) {
            if (kFloat && arguments_.output_layout == Layout::row_major)
                load_box(&arguments_.residual, arrived, Multicast{1}, box, 0, y, x / 32);
            else
                load_box(&arguments_.residual, arrived, Multicast{1}, box, x, y);
            ++boxes;
        });
        arrived.arrive_and_expect_tx(boxes * arguments_.row_width * kLine);
    }

    const DdsArguments& arguments_;
    Buffers& buffers_;
    const Arrived& arrived_;
    int warpgroup_;
    int warp_;         // of the warpgroup
    bool first_lane_;  // of the warp
    int row_count_;  // block rows of the warpgroup
    Staging staging_;
    uint32_t residual_parity_ = 0;
    int token_ = 0;
    int first_row_;       // of the warpgroup in a tile
    int rows_[kMaxRows];  // block rows of the warpgroup; -1: none
    int first_feature_;   // of the output, of those of the warp; negative: none
    Element bias_[2];     // of the features of a thread's sums
    int next_rows_[kMaxRows] = {-1, -1, -1, -1};
    int next_warp_row_;  // that has the features of the warp
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
    arguments.results = problem.output().data;
    arguments.results_ld = problem.output().ld;
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
