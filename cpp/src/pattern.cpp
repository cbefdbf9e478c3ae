#include "pattern.h"

#include <algorithm>
#include <vector>

#include "abi.h"
#include "descriptors.h"
#include "error.h"
#include "threads.h"

namespace ts {
namespace {

void require_pattern(bool holds, const auto&... words) {
    if (!holds) fail(TS_INVALID_PATTERN, words...);
}

void validate_rows(const Pattern& pattern) {
    const auto& [ptr, idx, slot] = pattern.rows;
    check_pointer(ptr, "pattern.row_ptr");
    if (pattern.nnz > 0) check_pointer(idx, "pattern.col_idx");
    if (pattern.nnz > 0) check_pointer(slot, "pattern.row_slot");
    const int64_t rows = block_row_count(pattern), cols = block_col_count(pattern);
    require_pattern(ptr[0] == 0, "row_ptr[0] must be 0, got ", ptr[0]);
    require_pattern(ptr[rows] == pattern.nnz, "row_ptr[", rows, "] must be nnz, ", pattern.nnz, ", got ",
                    ptr[rows]);
    for (int64_t row = 0; row < rows; ++row)
        require_pattern(ptr[row] <= ptr[row + 1], "row_ptr[", row + 1, "] must not be less than row_ptr[",
                        row, "], ", ptr[row], ", got ", ptr[row + 1]);
    // Only now is every entry known to lie inside the arrays.
    for (int64_t row = 0; row < rows; ++row) {
        for (int32_t e = ptr[row]; e < ptr[row + 1]; ++e) {
            require_pattern(idx[e] >= 0 && idx[e] < cols, "col_idx[", e, "] must be 0 to ", cols - 1,
                            ", got ", idx[e]);
            require_pattern(e == ptr[row] || idx[e - 1] < idx[e],
                            "col_idx must ascend without duplicates in block row ", row, ", got ", idx[e],
                            " after ", idx[e == ptr[row] ? e : e - 1], " at entry ", e);
        }
    }
}

void validate_slots(const Pattern& pattern) {
    std::vector<bool> used(pattern.nnz);
    for (int64_t e = 0; e < pattern.nnz; ++e) {
        const int32_t slot = pattern.rows.slot[e];
        require_pattern(slot >= 0 && slot < pattern.nnz, "slot[", e, "] must be 0 to ", pattern.nnz - 1,
                        ", got ", slot);
        require_pattern(!used[slot], "slot[", e, "] must be unique, got ", slot, " twice");
        used[slot] = true;
    }
}

void validate_transpose(const Pattern& pattern) {
    const auto& [ptr, idx, slot] = pattern.cols;
    check_pointer(ptr, "pattern.col_ptr");
    if (pattern.nnz > 0) check_pointer(idx, "pattern.row_idx");
    if (pattern.nnz > 0) check_pointer(slot, "pattern.col_slot");
    const int64_t cols = column_count(pattern);
    std::vector<int32_t> col_ptr(cols + 1), row_idx(pattern.nnz), col_slot(pattern.nnz);
    transpose_pattern(pattern, col_ptr.data(), row_idx.data(), col_slot.data());
    require_pattern(std::equal(col_ptr.begin(), col_ptr.end(), ptr), "col_ptr must be that of the transpose");
    if (pattern.nnz == 0) return;
    require_pattern(std::equal(row_idx.begin(), row_idx.end(), idx), "row_idx must be that of the transpose");
    require_pattern(std::equal(col_slot.begin(), col_slot.end(), slot),
                    "col_slot must be that of the transpose");
}

// All in one pass without a branch: this runs before every product.
void check_entries(const int32_t* entries, const Pattern& pattern, int64_t limit, const char* name) {
    constexpr int64_t kPart = 1 << 20;
    const auto most_of = [&](int64_t begin) {
        uint32_t most = 0;  // a negative entry counts as a large one
        const int64_t end = std::min(begin + kPart, pattern.nnz);
        for (int64_t e = begin; e < end; ++e) most = std::max(most, static_cast<uint32_t>(entries[e]));
        return most;
    };
    uint32_t most = pattern.nnz > kPart ? 0 : most_of(0);
    if (pattern.nnz > kPart) {
        std::vector<uint32_t> parts((pattern.nnz + kPart - 1) / kPart);
        for_each(static_cast<int64_t>(parts.size()), [&](int64_t i) { parts[i] = most_of(i * kPart); });
        most = *std::max_element(parts.begin(), parts.end());
    }
    require_pattern(pattern.nnz == 0 || most < limit, name, " must have entries 0 to ", limit - 1, ", got ",
                    static_cast<int32_t>(most));
}

struct Array {
    const int32_t* data;
    int64_t size;
    const char* name;
};

bool overlap(const Array& a, const Array& b) {
    const auto begin = [](const Array& array) { return reinterpret_cast<uintptr_t>(array.data); };
    const auto bytes = [](const Array& array) { return array.size * sizeof(int32_t); };
    if (a.size == 0 || b.size == 0) return false;
    return begin(a) <= begin(b) ? begin(b) - begin(a) < bytes(a) : begin(a) - begin(b) < bytes(b);
}

}  // namespace

void check_bounds(const Pattern& pattern, bool by_column) {
    const auto& [ptr, idx, slot] = by_column ? pattern.cols : pattern.rows;
    const int64_t lines = by_column ? column_count(pattern) : block_row_count(pattern);
    const int64_t most = by_column ? group_row_count(pattern) : block_col_count(pattern);
    bool fits = ptr[0] == 0 && ptr[lines] == pattern.nnz;
    for (int64_t line = 0; line < lines; ++line)
        fits &= (ptr[line] <= ptr[line + 1]) & (int64_t{ptr[line + 1]} - ptr[line] <= most);
    require_pattern(fits, by_column ? "col_ptr" : "row_ptr", " must ascend from 0 to nnz, ", pattern.nnz,
                    ", by at most ", most, " per entry");
    check_entries(idx, pattern, most, by_column ? "row_idx" : "col_idx");
    check_entries(slot, pattern, pattern.nnz, by_column ? "col_slot" : "row_slot");
}

void check_transpose(const Pattern& pattern, const Adjacency& cols) {
    const Adjacency& rows = pattern.rows;
    const int64_t nnz = pattern.nnz;
    const Array results[] = {{cols.ptr, column_count(pattern) + 1, "col_ptr"},
                             {cols.idx, nnz, "row_idx"},
                             {cols.slot, nnz, "col_slot"}};
    const Array sources[] = {{rows.ptr, block_row_count(pattern) + 1, "pattern.row_ptr"},
                             {rows.idx, nnz, "pattern.col_idx"},
                             {rows.slot, nnz, "pattern.row_slot"}};
    for (const Array& result : results) {
        if (result.size > 0) check_pointer(result.data, result.name);
        for (const Array& source : sources)
            require(!overlap(result, source), result.name, " and ", source.name,
                    " must not overlap in memory");
        for (const Array& other : results)
            require(&other == &result || !overlap(result, other), result.name, " and ", other.name,
                    " must not overlap in memory");
    }
}

void validate_pattern(const Pattern& pattern) {
    validate_rows(pattern);
    validate_slots(pattern);
    if (pattern.cols.ptr != nullptr) validate_transpose(pattern);
}

void transpose_pattern(const Pattern& pattern, int32_t* col_ptr, int32_t* row_idx, int32_t* col_slot) {
    const auto& [ptr, idx, slot] = pattern.rows;
    const int64_t rows = block_row_count(pattern), group_rows = group_row_count(pattern);
    const int64_t cols = column_count(pattern), group_cols = block_col_count(pattern);
    // Calls visit(line of the column arrays, row within the group, entry) in the order of rows.
    const auto for_each_entry = [&](const auto& visit) {
        for (int64_t row = 0; row < rows; ++row)
            for (int32_t e = ptr[row]; e < ptr[row + 1]; ++e)
                visit(row / group_rows * group_cols + idx[e], row % group_rows, e);
    };
    std::fill_n(col_ptr, cols + 1, 0);
    for_each_entry([&](int64_t line, int64_t, int32_t) { ++col_ptr[line + 1]; });
    for (int64_t line = 0; line < cols; ++line) col_ptr[line + 1] += col_ptr[line];
    std::vector<int32_t> next(col_ptr, col_ptr + cols);
    for_each_entry([&](int64_t line, int64_t row, int32_t e) {
        const int32_t at = next[line]++;
        row_idx[at] = static_cast<int32_t>(row);
        col_slot[at] = slot[e];
    });
}

}  // namespace ts
