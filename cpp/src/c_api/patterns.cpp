// The public functions on patterns.

#include "abi.h"
#include "c_api/guard.h"
#include "descriptors.h"
#include "pattern.h"
#include "plan/device_plan.h"

using namespace ts;

ts_status_t ts_pattern_validate(const ts_pattern* pattern) {
    return guard([&] { validate_pattern(check_pattern(pattern)); });
}

ts_status_t ts_pattern_transpose(const ts_pattern* source, int32_t* col_ptr, int32_t* row_idx,
                                 int32_t* col_slot) {
    return guard([&] {
        Pattern pattern = check_pattern(source);
        pattern.cols = {};
        validate_pattern(pattern);
        check_transpose(pattern, {col_ptr, row_idx, col_slot});
        transpose_pattern(pattern, col_ptr, row_idx, col_slot);
    });
}

ts_status_t ts_pattern_device_transpose_size(const ts_pattern* pattern, size_t* workspace_bytes) {
    return guard([&] {
        const Pattern checked = check_pattern(pattern);
        check_pointer(workspace_bytes, "workspace_bytes");
        *workspace_bytes = device_transpose_bytes(checked);
    });
}

ts_status_t ts_pattern_device_transpose(const ts_pattern* pattern, int32_t* col_ptr, int32_t* row_idx,
                                        int32_t* col_slot, void* workspace, size_t workspace_bytes,
                                        ts_stream_t stream) {
    return guard([&] {
        transpose_on_device(check_pattern(pattern), col_ptr, row_idx, col_slot, workspace, workspace_bytes,
                            stream);
    });
}

ts_status_t ts_arrays_compare(ts_array_pair* pairs, int32_t count, int64_t mark, ts_stream_t stream) {
    return guard([&] {
        check_pointer(pairs, "pairs");
        require(count >= 0 && count <= kMaxPairs, "count must be 0 to ", kMaxPairs, ", got ", count);
        require(mark != 0, "mark must not be 0, which means that a pair does not differ");
        compare_arrays(pairs, count, mark, stream);
    });
}
