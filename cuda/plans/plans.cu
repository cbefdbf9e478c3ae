#include "plans/plans.h"

#include "plans/aligned.cuh"
#include "plans/blocks.cuh"
#include "plans/compare.cuh"
#include "plans/lists.cuh"
#include "plans/strips.cuh"
#include "plans/tiles.cuh"
#include "plans/transpose.cuh"

namespace ts::plans {
namespace {

View view_of(const Pattern& pattern, Op op) {
    const auto rows = static_cast<int>(pattern.row_count());
    const auto cols = static_cast<int>(pattern.col_count());
    const int weights = pattern.groups;
    if (op == Op::dds_nn)
        return {pattern.cols,       cols * weights, rows / weights, pattern.block_cols,
                pattern.block_rows, pattern.nnz,    weights,        false};
    return {pattern.rows, rows, cols, pattern.block_rows, pattern.block_cols, pattern.nnz, weights, false};
}

// Calls `visit` with the builder of plans of that kind, which takes its memory from the arena.
template <class Visit>
void with_builder(Arena& arena, const Pattern& pattern, Op op, PlanShape shape, Visit visit) {
    const View view = view_of(pattern, op);
    const int32_t key = plan_key(pattern, op, shape);
    if (shape.kind == PlanKind::aligned) {
        AlignedBuilder builder(arena, view, shape, key);
        visit(builder);
    } else if (shape.kind == PlanKind::lists) {
        ListBuilder builder(arena, view, pattern, key);
        visit(builder);
    } else if (shape.kind == PlanKind::strips && are_wide_blocks(pattern)) {
        BlockBuilder builder(arena, view.as_diagonal(), pattern, key);
        visit(builder);
    } else if (shape.kind == PlanKind::strips) {
        StripBuilder builder(arena, view, pattern, key);
        visit(builder);
    } else {
        TileBuilder builder(arena, view, shape, op == Op::sdd_tn, key);
        visit(builder);
    }
}

// The attributes of an address; those of host memory where CUDA does not know it.
cudaPointerAttributes attributes_of(const void* address) {
    cudaPointerAttributes attributes{};
    if (const cudaError_t error = cudaPointerGetAttributes(&attributes, address)) {
        if (cudaPeekAtLastError() == error) cudaGetLastError();  // which is reported in other words
        return {};
    }
    return attributes;
}

}  // namespace

Bytes bytes_of(const Pattern& pattern, Op op, PlanShape shape) {
    Arena arena(nullptr);
    int64_t words = 0;
    with_builder(arena, pattern, op, shape, [&](const auto& builder) { words = builder.words(); });
    return {words * sizeof(int32_t), arena.used()};
}

int32_t build(const Pattern& pattern, Op op, PlanShape shape, void* plan, void* workspace, void* stream) {
    Arena arena(workspace);
    Stream enqueued{static_cast<cudaStream_t>(stream)};
    with_builder(arena, pattern, op, shape, [&](auto& builder) { builder.build(plan, enqueued); });
    return enqueued.error;
}

size_t transpose_workspace(const Pattern& pattern) {
    Arena arena(nullptr);
    const View view = view_of(pattern, Op::dds_nt).as_diagonal();
    if (SortingTransposer::suits(view))
        SortingTransposer(arena, view);
    else
        Transposer(arena, view);
    return arena.used();
}

int32_t transpose(const Pattern& pattern, int32_t* col_ptr, int32_t* row_idx, int32_t* col_slot,
                  void* workspace, void* stream) {
    Arena arena(workspace);
    Stream enqueued{static_cast<cudaStream_t>(stream)};
    const View view = view_of(pattern, Op::dds_nt).as_diagonal();
    if (SortingTransposer::suits(view))
        SortingTransposer(arena, view).run(col_ptr, row_idx, col_slot, enqueued);
    else
        Transposer(arena, view).run(col_ptr, row_idx, col_slot, enqueued);
    return enqueued.error;
}

int32_t compare(ArrayPair* pairs, int32_t count, int64_t mark, void* stream) {
    Stream enqueued{static_cast<cudaStream_t>(stream)};
    launch(compare_arrays, int64_t{kComparers} * count, kComparers, enqueued, pairs, mark);
    return enqueued.error;
}

bool is_on_device(const void* address) {
    const cudaPointerAttributes attributes = attributes_of(address);
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

bool is_shared_with_host(const void* address) {
    const cudaPointerAttributes attributes = attributes_of(address);
    return attributes.type == cudaMemoryTypeHost && attributes.devicePointer == address;
}

}  // namespace ts::plans
