// The transpose of a pattern: of each weight, the one after the other.
#pragma once

#include <cub/device/device_radix_sort.cuh>

#include "plans/sets.cuh"

namespace ts::plans {

// columns: of each column the rows that have a block there. One warp for each word of 32 columns by 32 rows.
static __global__ void transpose_sets(Sets rows, Sets columns) {
    const int lane = threadIdx.x % 32;
    const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
    if (warp >= int64_t{rows.width} * columns.width) return;
    const int w = static_cast<int>(warp % rows.width), chunk = static_cast<int>(warp / rows.width);
    const int row = 32 * chunk + lane, column = 32 * w + lane;
    const uint32_t own = row < rows.count ? rows.word(row, w) : 0;
    uint32_t result = 0;
    for (int i = 0; i < 32; ++i) {
        const uint32_t bits = __ballot_sync(~0u, own >> i & 1);
        if (i == lane) result = bits;
    }
    if (column < columns.count) columns.word(column, chunk) = result;
}

// One thread for each word of `columns`.
static __global__ void write_transpose(View view, Sets columns, const int* col_ptr, int* row_idx,
                                       int* col_slot) {
    const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (index >= static_cast<int64_t>(columns.size())) return;
    const int column = static_cast<int>(index % columns.count);
    const int chunk = static_cast<int>(index / columns.count);
    int at = col_ptr[column];
    for (int w = 0; w < chunk; ++w) at += __popc(columns.word(column, w));
    for (uint32_t bits = columns.word(column, chunk); bits != 0; bits &= bits - 1, ++at) {
        const int row = 32 * chunk + __ffs(bits) - 1;
        row_idx[at] = row % view.weight_rows();
        col_slot[at] = __ldg(view.blocks.slot + find_entry(view, row, column));
    }
}

class Transposer {
  public:
    Transposer(Arena& arena, const View& view) : view_(view) {
        rows_ = {nullptr, view.rows, (view.cols + 31) / 32};
        columns_ = {nullptr, view.cols, (view.rows + 31) / 32};
        rows_.words = arena.take<uint32_t>(rows_.size());
        columns_.words = arena.take<uint32_t>(columns_.size());
    }

    void run(int* col_ptr, int* row_idx, int* col_slot, Stream& stream) {
        launch(fill_sets, rows_.size(), 256, stream, view_, rows_, Elements{});
        launch(transpose_sets, int64_t{32} * rows_.width * columns_.width, 256, stream, rows_, columns_);
        launch(count_elements, columns_.count, 128, stream, columns_, col_ptr);
        launch(scan_counts, 0, 1024, stream, col_ptr, columns_.count);
        launch(write_transpose, columns_.size(), 128, stream, view_, columns_, col_ptr, row_idx, col_slot);
    }

  private:
    View view_;
    Sets rows_;
    Sets columns_;
};

// One warp for each row: its number, and the column of all weights, of each of its entries.
static __global__ void list_entries(View view, int* entry_rows, int* columns, int* entries) {
    const int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
    if (row >= view.rows) return;
    const int first = view.first_col(static_cast<int>(row)), end = __ldg(view.blocks.ptr + row + 1);
    for (int e = __ldg(view.blocks.ptr + row) + threadIdx.x % 32; e < end; e += 32) {
        entry_rows[e] = static_cast<int>(row) % view.weight_rows();
        columns[e] = first + __ldg(view.blocks.idx + e);
        entries[e] = e;
    }
}

// One thread for each entry in the order of columns, and one more.
static __global__ void write_sorted(View view, const int* entry_rows, const int* columns, const int* entries,
                                    int* col_ptr, int* row_idx, int* col_slot) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i > view.nnz) return;
    const int before = i == 0 ? -1 : columns[i - 1], column = i == view.nnz ? view.cols : columns[i];
    for (int c = before + 1; c <= column; ++c) col_ptr[c] = static_cast<int>(i);
    if (i == view.nnz) return;
    row_idx[i] = entry_rows[entries[i]];
    col_slot[i] = __ldg(view.blocks.slot + entries[i]);
}

// The same by sorting the entries, which keep their order in a column: for patterns whose sets of all blocks,
// kept or not, would take more memory and time.
class SortingTransposer {
  public:
    SortingTransposer(Arena& arena, const View& view) : view_(view) {
        entry_rows_ = arena.take<int>(view.nnz);
        for (int** area : {&columns_, &sorted_columns_, &entries_, &sorted_entries_})
            *area = arena.take<int>(view.nnz);
        sort(nullptr, nullptr);
        scratch_ = arena.take<char>(scratch_bytes_);
    }

    // Sets of more than 64 MiB.
    static bool suits(const View& view) { return int64_t{view.rows} * view.cols > int64_t{1} << 29; }

    void run(int* col_ptr, int* row_idx, int* col_slot, Stream& stream) {
        launch(list_entries, int64_t{32} * view_.rows, 256, stream, view_, entry_rows_, columns_, entries_);
        if (stream.error == cudaSuccess && view_.nnz > 0) stream.error = sort(scratch_, stream.handle);
        launch(write_sorted, view_.nnz + 1, 256, stream, view_, entry_rows_, sorted_columns_, sorted_entries_,
               col_ptr, row_idx, col_slot);
    }

  private:
    // Without scratch memory it counts the bytes.
    cudaError_t sort(void* scratch, cudaStream_t stream) {
        int bits = 1;
        while (bits < 31 && view_.cols >> bits != 0) ++bits;
        return cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes_, columns_, sorted_columns_, entries_,
                                               sorted_entries_, static_cast<int>(view_.nnz), 0, bits, stream);
    }

    View view_;
    int *entry_rows_, *columns_, *sorted_columns_, *entries_, *sorted_entries_;
    char* scratch_;
    size_t scratch_bytes_ = 0;
};

}  // namespace ts::plans
