#include "plan/device_plan.h"

#include "abi.h"
#include "error.h"

#ifdef TILESPARSE_CUDA

#include <cstddef>
#include <limits>

#include "descriptors.h"
#include "device.h"
#include "operands.h"
#include "pattern.h"
#include "plan/host_plan.h"
#include "plans/plans.h"

namespace ts {
namespace {

// Sets of blocks are held as bits, and numbered in 32 bits.
void check_size(const Pattern& pattern) {
    const int64_t blocks = block_row_count(pattern) * block_col_count(pattern);
    if (blocks > std::numeric_limits<int32_t>::max())
        fail(TS_UNSUPPORTED, "the weight must have at most ", std::numeric_limits<int32_t>::max(),
             " blocks, kept or not, to make its plan on the GPU, got ", blocks);
}

void check_device_array(const void* array, const char* name, size_t alignment = alignof(int32_t)) {
    require(array != nullptr, name, " must not be null");
    check_aligned(array, alignment, name);
    require(plans::is_on_device(array), name, " must be in memory of a CUDA device, got address ", array);
}

void check_arrays(const Adjacency& arrays, int64_t nnz, const char* ptr, const char* idx, const char* slot) {
    check_device_array(arrays.ptr, ptr);
    if (nnz == 0) return;
    check_device_array(arrays.idx, idx);
    check_device_array(arrays.slot, slot);
}

// An area of device memory that is written.
void check_area(const void* area, size_t bytes, size_t needed, const char* name, size_t alignment) {
    if (bytes < needed)
        fail(TS_WORKSPACE_TOO_SMALL, name, "_bytes must be at least ", needed, ", got ", bytes);
    check_device_array(area, name, alignment);
}

}  // namespace

DevicePlanBytes device_plan_bytes(const Pattern& pattern, Op op, const Kernel& kernel) {
    if (kernel.plan.tile == 0) return {0, 0};
    check_plan_shape(pattern, op, kernel.plan);
    check_size(pattern);
    const auto [plan, workspace] = plans::bytes_of(pattern, op, kernel.plan);
    if (plan / sizeof(int32_t) >= size_t{std::numeric_limits<int32_t>::max()})
        fail(TS_UNSUPPORTED, "the plan must take less than 8 GiB, got up to ", plan, " bytes");
    return {plan, workspace};
}

void build_device_plan(const Pattern& pattern, Op op, const Kernel& kernel, void* plan, size_t plan_bytes,
                       void* workspace, size_t workspace_bytes, void* stream) {
    const DevicePlanBytes needed = device_plan_bytes(pattern, op, kernel);
    if (needed.plan == 0) return;
    if (op == Op::dds_nn)
        check_arrays(pattern.cols, pattern.nnz, "pattern.col_ptr", "pattern.row_idx", "pattern.col_slot");
    else
        check_arrays(pattern.rows, pattern.nnz, "pattern.row_ptr", "pattern.col_idx", "pattern.row_slot");
    check_area(plan, plan_bytes, needed.plan, "plan", kDeviceAlignment);
    check_area(workspace, workspace_bytes, needed.workspace, "workspace", kDeviceAreaAlignment);
    const Operand written = area("plan", plan, needed.plan),
                  scratch = area("workspace", workspace, needed.workspace);
    check_apart(written, scratch);
    for (const Operand& array : arrays_of(pattern, op))
        check_apart(array, written), check_apart(array, scratch);
    launch_checked("building a plan",
                   [&] { return plans::build(pattern, op, kernel.plan, plan, workspace, stream); });
}

size_t device_transpose_bytes(const Pattern& pattern) { return plans::transpose_workspace(pattern); }

void transpose_on_device(const Pattern& pattern, int32_t* col_ptr, int32_t* row_idx, int32_t* col_slot,
                         void* workspace, size_t workspace_bytes, void* stream) {
    const size_t needed = device_transpose_bytes(pattern);
    check_arrays(pattern.rows, pattern.nnz, "pattern.row_ptr", "pattern.col_idx", "pattern.row_slot");
    check_arrays({col_ptr, row_idx, col_slot}, pattern.nnz, "col_ptr", "row_idx", "col_slot");
    check_transpose(pattern, {col_ptr, row_idx, col_slot});
    if (needed > 0) check_area(workspace, workspace_bytes, needed, "workspace", kDeviceAreaAlignment);
    Pattern both = pattern;
    both.cols = {col_ptr, row_idx, col_slot};
    const Operand scratch = area("workspace", workspace, needed);
    for (const Op op : {Op::dds_nt, Op::dds_nn})
        for (const Operand& array : arrays_of(both, op)) check_apart(array, scratch);
    launch_checked("transposing a pattern",
                   [&] { return plans::transpose(pattern, col_ptr, row_idx, col_slot, workspace, stream); });
}

void compare_arrays(ts_array_pair* pairs, int32_t count, int64_t mark, void* stream) {
    static_assert(sizeof(ts_array_pair) == sizeof(plans::ArrayPair) &&
                  offsetof(ts_array_pair, differs) == offsetof(plans::ArrayPair, differs));
    if (count == 0) return;
    check_aligned(pairs, alignof(ts_array_pair), "pairs");
    require(plans::is_shared_with_host(pairs), "pairs must be in pinned memory of the host, got address ",
            static_cast<const void*>(pairs));
    launch_checked("comparing arrays", [&] {
        return plans::compare(reinterpret_cast<plans::ArrayPair*>(pairs), count, mark, stream);
    });
}

}  // namespace ts

#else

namespace ts {
namespace {

[[noreturn]] void refuse() {
    fail(TS_UNSUPPORTED,
         "this library was built without CUDA kernels; it makes plans and transposes on the host alone");
}

}  // namespace

DevicePlanBytes device_plan_bytes(const Pattern&, Op, const Kernel&) { refuse(); }
void build_device_plan(const Pattern&, Op, const Kernel&, void*, size_t, void*, size_t, void*) { refuse(); }
size_t device_transpose_bytes(const Pattern&) { refuse(); }
void transpose_on_device(const Pattern&, int32_t*, int32_t*, int32_t*, void*, size_t, void*) { refuse(); }
void compare_arrays(ts_array_pair*, int32_t, int64_t, void*) { refuse(); }

}  // namespace ts

#endif
