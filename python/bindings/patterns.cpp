// Patterns in host and device memory.
#include <algorithm>
#include <cstdint>

#include "support.h"

namespace bindings {
namespace {

ts_pattern make_pattern(int32_t block_rows, int32_t block_cols, int64_t out_features, int64_t in_features,
                        int64_t nnz, uintptr_t row_ptr, uintptr_t col_idx, uintptr_t row_slot,
                        uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot, int32_t groups) {
    auto pattern = make<ts_pattern>();
    pattern.block_rows = block_rows;
    pattern.block_cols = block_cols;
    pattern.out_features = out_features;
    pattern.in_features = in_features;
    pattern.nnz = nnz;
    pattern.row_ptr = pointer<int32_t>(row_ptr);
    pattern.col_idx = pointer<int32_t>(col_idx);
    pattern.row_slot = pointer<int32_t>(row_slot);
    pattern.col_ptr = pointer<int32_t>(col_ptr);
    pattern.row_idx = pointer<int32_t>(row_idx);
    pattern.col_slot = pointer<int32_t>(col_slot);
    pattern.groups = groups;
    return pattern;
}

// Returns true if arrays in host memory equal the pattern's own.
bool pattern_holds(const ts_pattern& pattern, uintptr_t row_ptr, uintptr_t col_idx, uintptr_t row_slot) {
    const auto same = [](const int32_t* own, uintptr_t other, int64_t count) {
        return std::equal(own, own + count, pointer<int32_t>(other));
    };
    return same(pattern.row_ptr, row_ptr,
                (pattern.out_features + pattern.block_rows - 1) / pattern.block_rows + 1) &&
           same(pattern.col_idx, col_idx, pattern.nnz) && same(pattern.row_slot, row_slot, pattern.nnz);
}

// `pairs`: the address of ts_array_pairs in pinned memory.
void arrays_compare(uintptr_t pairs, int32_t count, int64_t mark, uintptr_t stream) {
    check(ts_arrays_compare(pointer<ts_array_pair>(pairs), count, mark, pointer<CUstream_st>(stream)));
}

// Returns true if one of the pairs has a mark.
bool arrays_differ(uintptr_t pairs, int32_t count) {
    const auto* first = pointer<const volatile ts_array_pair>(pairs);
    return std::any_of(first, first + count,
                       [](const volatile ts_array_pair& pair) { return pair.differs != 0; });
}

void pattern_transpose(const ts_pattern& pattern, uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot) {
    check(ts_pattern_transpose(&pattern, pointer<int32_t>(col_ptr), pointer<int32_t>(row_idx),
                               pointer<int32_t>(col_slot)));
}

size_t pattern_device_transpose_size(const ts_pattern& pattern) {
    size_t bytes = 0;
    check(ts_pattern_device_transpose_size(&pattern, &bytes));
    return bytes;
}

void pattern_device_transpose(const ts_pattern& pattern, uintptr_t col_ptr, uintptr_t row_idx,
                              uintptr_t col_slot, uintptr_t workspace, size_t workspace_bytes,
                              uintptr_t stream) {
    check(ts_pattern_device_transpose(&pattern, pointer<int32_t>(col_ptr), pointer<int32_t>(row_idx),
                                      pointer<int32_t>(col_slot), pointer<void>(workspace), workspace_bytes,
                                      pointer<CUstream_st>(stream)));
}

}  // namespace

void bind_patterns(nb::module_& m) {
    nb::class_<ts_pattern>(m, "Pattern")
        .def(
            "__init__",
            [](ts_pattern* self, int32_t block_rows, int32_t block_cols, int64_t out_features,
               int64_t in_features, int64_t nnz, uintptr_t row_ptr, uintptr_t col_idx, uintptr_t row_slot,
               uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot, int32_t groups) {
                new (self)
                    ts_pattern(make_pattern(block_rows, block_cols, out_features, in_features, nnz, row_ptr,
                                            col_idx, row_slot, col_ptr, row_idx, col_slot, groups));
            },
            "block_rows"_a, "block_cols"_a, "out_features"_a, "in_features"_a, "nnz"_a, "row_ptr"_a,
            "col_idx"_a, "row_slot"_a, "col_ptr"_a = 0, "row_idx"_a = 0, "col_slot"_a = 0, "groups"_a = 0);

    m.def(
        "pattern_validate", [](const ts_pattern& pattern) { check(ts_pattern_validate(&pattern)); },
        "pattern"_a);
    m.def("arrays_compare", &arrays_compare, "pairs"_a, "count"_a, "mark"_a, "stream"_a);
    m.def("arrays_differ", &arrays_differ, "pairs"_a, "count"_a);
    m.def("pattern_holds", &pattern_holds, "pattern"_a, "row_ptr"_a, "col_idx"_a, "row_slot"_a);
    m.def("pattern_transpose", &pattern_transpose, "pattern"_a, "col_ptr"_a, "row_idx"_a, "col_slot"_a);
    m.def("pattern_device_transpose_size", &pattern_device_transpose_size, "pattern"_a);
    m.def("pattern_device_transpose", &pattern_device_transpose, "pattern"_a, "col_ptr"_a, "row_idx"_a,
          "col_slot"_a, "workspace"_a, "workspace_bytes"_a, "stream"_a);
}

}  // namespace bindings
