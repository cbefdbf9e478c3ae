// Shared by the builders of plans: one direction of a pattern, its block rows as sets of columns, and sums
// over a thread block.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "common/launch.cuh"
#include "common/plan.h"
#include "common/problem.h"

namespace ts::plans {

// A pattern seen from the features whose block rows are grouped.
struct View {
    Adjacency blocks;
    int rows;  // of all weights
    int cols;  // of one; `diagonal`: of all, so that no two weights have a column in common
    int row_block;
    int col_block;
    int64_t nnz;
    int weights;  // see Pattern::groups
    bool diagonal;

    __host__ __device__ int weight_rows() const { return rows / weights; }
    __host__ __device__ int weight_cols() const { return diagonal ? cols / weights : cols; }
    // Offset of the columns of a row's entries.
    __device__ int first_col(int row) const { return diagonal ? row / weight_rows() * weight_cols() : 0; }

    View as_diagonal() const {
        View view = *this;
        view.cols *= weights;
        view.diagonal = weights > 1;
        return view;
    }
};

// The first entry of a row whose column is not less than `col`, or the row's end.
__device__ inline int find_entry(const View& view, int row, int col) {
    int begin = __ldg(view.blocks.ptr + row), end = __ldg(view.blocks.ptr + row + 1);
    const int before = col - view.first_col(row);
    while (begin < end) {
        const int middle = begin + (end - begin) / 2;
        if (__ldg(view.blocks.idx + middle) < before)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

// Slot of a block's values, -1 if it is not kept.
__device__ inline int find_slot(const View& view, int row, int col) {
    const int entry = find_entry(view, row, col);
    const bool found = entry < __ldg(view.blocks.ptr + row + 1) &&
                       __ldg(view.blocks.idx + entry) == col - view.first_col(row);
    return found ? __ldg(view.blocks.slot + entry) : -1;
}

// Sets of small numbers as bits: word w of set i is at words[w * count + i].
struct Sets {
    uint32_t* words;
    int count;
    int width;  // words of a set

    __host__ __device__ size_t size() const { return static_cast<size_t>(count) * width; }
    __device__ uint32_t& word(int set, int w) const { return words[static_cast<size_t>(w) * count + set]; }
};

// Meaning of a set and its elements: a set is `rows` block rows, an element `cols` columns, or one of
// `per_column` in a column.
struct Elements {
    int rows = 1;
    int cols = 1;
    int per_column = 1;
};

// One thread for each word.
static __global__ void fill_sets(View view, Sets sets, Elements elements) {
    const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (index >= static_cast<int64_t>(sets.size())) return;
    const int set = static_cast<int>(index % sets.count), first = static_cast<int>(index / sets.count) * 32;
    uint32_t bits = 0;
    for (int row = set * elements.rows; row < min((set + 1) * elements.rows, view.rows); ++row) {
        const int end = __ldg(view.blocks.ptr + row + 1), first_col = view.first_col(row);
        for (int e = find_entry(view, row, first * elements.cols / elements.per_column); e < end; ++e) {
            const int col = __ldg(view.blocks.idx + e) + first_col;
            const int element = col * elements.per_column / elements.cols - first;
            if (element >= 32) break;
            bits |= ((1u << elements.per_column) - 1) << element;
        }
    }
    sets.words[index] = bits;
}

// One thread for each set.
static __global__ void count_elements(Sets sets, int* counts) {
    const int set = blockIdx.x * blockDim.x + threadIdx.x;
    if (set >= sets.count) return;
    int count = 0;
    for (int w = 0; w < sets.width; ++w) count += __popc(sets.word(set, w));
    counts[set] = count;
}

// order: the numbers from the largest count on. One thread for each.
static __global__ void sort_by_count(const int* counts, int size, int* order) {
    const int own = blockIdx.x * blockDim.x + threadIdx.x;
    if (own >= size) return;
    const int count = __ldg(counts + own);
    int before = 0;
    for (int i = 0; i < size; ++i) {
        const int other = __ldg(counts + i);
        before += other > count || (other == count && i < own);
    }
    order[before] = own;
}

// The sum over the lanes up to this one. Called by all of a warp.
__device__ inline int warp_scan(int value, int lane) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, value, distance);
        if (lane >= distance) value += other;
    }
    return value;
}

// The sum over the threads before this one, and over all. Called by all threads of a block.
__device__ inline int2 block_scan(int value) {
    __shared__ int sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int sum = warp_scan(value, lane);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < warps; ++w) {
        if (w == warp) before = all;
        all += sums[w];
    }
    __syncthreads();
    return make_int2(before + sum - value, all);
}

__device__ inline int block_sum(int value) { return block_scan(value).y; }

__device__ inline int steps_of(int cost) { return cost; }
__device__ inline int steps_of(int2 cost) { return cost.x; }

// The place of a tile, and its first step, after those of which earlier(cost, tile) is true. Called by a
// block.
template <class Cost, class Earlier>
__device__ inline int2 place_of_tile(const Cost* costs, int tiles, Earlier earlier) {
    int place = 0, first = 0;
    for (int i = threadIdx.x; i < tiles; i += blockDim.x) {
        const Cost other = costs[i];
        const bool before = earlier(other, i);
        place += before;
        first += before ? steps_of(other) : 0;
    }
    place = block_sum(place);
    return make_int2(place, block_sum(first));
}

// Turns counts into the sums of those before, with the sum of all at the end. One block.
static __global__ void __launch_bounds__(1024) scan_counts(int* counts, int size) {
    int before = 0;
    for (int first = 0; first < size; first += blockDim.x) {
        const int i = first + threadIdx.x;
        const int2 sums = block_scan(i < size ? counts[i] : 0);
        if (i < size) counts[i] = before + sums.x;
        before += sums.y;
    }
    if (threadIdx.x == 0) counts[size] = before;
}

// Header of a plan whose sections have these largest sizes in int32.
inline PlanHeader lay_out(int32_t key, const std::array<int64_t, 6>& sizes) {
    PlanHeader header{};
    header.key = key;
    int32_t* const offsets[] = {&header.tiles_at, &header.rows_at,  &header.masks_at,
                                &header.k_at,     &header.slots_at, &header.starts_at};
    int64_t at = sizeof(PlanHeader) / sizeof(int32_t);
    for (size_t i = 0; i < sizes.size(); ++i) {
        *offsets[i] = static_cast<int32_t>(at);
        at += (sizes[i] + 3) / 4 * 4;  // each section 16-byte aligned
    }
    header.words = static_cast<int32_t>(std::min<int64_t>(at, INT32_MAX));  // the most stands for too many
    return header;
}

// Addresses of a plan's arrays, as its header says.
struct Sections {
    PlanHeader header;
    int* words;  // of the plan

    __device__ int* tiles() const { return words + header.tiles_at; }
    __device__ int* rows() const { return words + header.rows_at; }
    __device__ unsigned* masks() const { return reinterpret_cast<unsigned*>(words + header.masks_at); }
    __device__ int* k() const { return words + header.k_at; }
    __device__ int* slots() const { return words + header.slots_at; }
    __device__ int* starts() const { return words + header.starts_at; }
};

// Hands out areas of the workspace; without one, it only counts them.
class Arena {
  public:
    explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

    template <class T>
    T* take(size_t count) {
        T* const result = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += (count * sizeof(T) + 255) / 256 * 256;
        return result;
    }
    size_t used() const { return used_; }

  private:
    char* base_;
    size_t used_ = 0;
};

// Enqueues work in order, up to the first error.
struct Stream {
    cudaStream_t handle;
    cudaError_t error = cudaSuccess;
};

// A kernel of at least `threads` threads in all, which it checks for itself.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), int64_t threads, int block, Stream& stream,
            typename Same<Parameters>::Type... arguments) {
    if (stream.error != cudaSuccess) return;
    const int64_t blocks = threads == 0 ? 1 : (threads + block - 1) / block;
    stream.error = launch_kernel(kernel, blocks, block, stream.handle, arguments...);
}

inline void fill(void* memory, int byte, size_t bytes, Stream& stream) {
    if (stream.error == cudaSuccess) stream.error = cudaMemsetAsync(memory, byte, bytes, stream.handle);
}

}  // namespace ts::plans
