#include "pattern.h"

#include <algorithm>
#include <vector>

#include "error.h"
#include "problem.h"

namespace ts {
namespace {

void require_pattern(bool holds, const auto&... parts) {
    if (!holds) fail(TS_INVALID_PATTERN, parts...);
}

void validate_rows(const Pattern& pattern) {
    const auto& [ptr, idx, slot] = pattern.rows;
    require(ptr != nullptr, "pattern.row_ptr is null");
    require(pattern.nnz == 0 || idx != nullptr, "pattern.col_idx is null");
    require(pattern.nnz == 0 || slot != nullptr, "pattern.row_slot is null");
    const int64_t rows = block_row_count(pattern), cols = block_col_count(pattern);
    require_pattern(ptr[0] == 0, "row_ptr[0] is ", ptr[0], "; it must be 0");
    require_pattern(ptr[rows] == pattern.nnz, "row_ptr[", rows, "] is ", ptr[rows],
                    "; it must be nnz = ", pattern.nnz);
    for (int64_t row = 0; row < rows; ++row)
        require_pattern(ptr[row] <= ptr[row + 1], "row_ptr[", row + 1, "] is ", ptr[row + 1],
                        ", less than row_ptr[", row, "] = ", ptr[row]);
    // Only now is every entry known to lie inside the arrays.
    for (int64_t row = 0; row < rows; ++row) {
        for (int32_t e = ptr[row]; e < ptr[row + 1]; ++e) {
            require_pattern(idx[e] >= 0 && idx[e] < cols, "col_idx[", e, "] is ", idx[e],
                            "; allowed are 0 to ", cols - 1);
            require_pattern(e == ptr[row] || idx[e - 1] < idx[e], "col_idx[", e, "] is ", idx[e], " after ",
                            idx[e == ptr[row] ? e : e - 1],
                            "; the columns of a block row must ascend without duplicates");
        }
    }
}

void validate_slots(const Pattern& pattern) {
    std::vector<bool> used(pattern.nnz);
    for (int64_t e = 0; e < pattern.nnz; ++e) {
        const int32_t slot = pattern.rows.slot[e];
        require_pattern(slot >= 0 && slot < pattern.nnz, "slot[", e, "] is ", slot, "; allowed are 0 to ",
                        pattern.nnz - 1);
        require_pattern(!used[slot], "slot[", e, "] is ", slot, ", which another block has already");
        used[slot] = true;
    }
}

void validate_transpose(const Pattern& pattern) {
    const auto& [ptr, idx, slot] = pattern.cols;
    const int64_t cols = block_col_count(pattern);
    std::vector<int32_t> col_ptr(cols + 1), row_idx(pattern.nnz), col_slot(pattern.nnz);
    transpose_pattern(pattern, col_ptr.data(), row_idx.data(), col_slot.data());
    require_pattern(std::equal(col_ptr.begin(), col_ptr.end(), ptr), "col_ptr is not that of the transpose");
    if (pattern.nnz == 0) return;
    require(idx != nullptr, "pattern.row_idx is null");
    require(slot != nullptr, "pattern.col_slot is null");
    require_pattern(std::equal(row_idx.begin(), row_idx.end(), idx), "row_idx is not that of the transpose");
    require_pattern(std::equal(col_slot.begin(), col_slot.end(), slot),
                    "col_slot is not that of the transpose");
}

}  // namespace

void validate_pattern(const Pattern& pattern) {
    validate_rows(pattern);
    validate_slots(pattern);
    if (pattern.cols.ptr != nullptr) validate_transpose(pattern);
}

void transpose_pattern(const Pattern& pattern, int32_t* col_ptr, int32_t* row_idx, int32_t* col_slot) {
    const auto& [ptr, idx, slot] = pattern.rows;
    const int64_t rows = block_row_count(pattern), cols = block_col_count(pattern);
    std::fill_n(col_ptr, cols + 1, 0);
    for (int64_t e = 0; e < pattern.nnz; ++e) ++col_ptr[idx[e] + 1];
    for (int64_t col = 0; col < cols; ++col) col_ptr[col + 1] += col_ptr[col];
    std::vector<int32_t> next(col_ptr, col_ptr + cols);
    for (int64_t row = 0; row < rows; ++row) {
        for (int32_t e = ptr[row]; e < ptr[row + 1]; ++e) {
            const int32_t at = next[idx[e]]++;
            row_idx[at] = static_cast<int32_t>(row);
            col_slot[at] = slot[e];
        }
    }
}

}  // namespace ts
