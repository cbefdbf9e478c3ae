// Building plans on the GPU, from a pattern in its memory: for patterns that change there.
//
// The layouts are those of the host's plans; how block rows are grouped may differ. Everything is enqueued
// on a stream: nothing waits for the GPU, nothing is allocated, and the result depends on the pattern alone.
// The sections of a plan lie where the largest plan of that shape and number of blocks has them.
#pragma once

#include "common/problem.h"

namespace ts::plans {

struct Bytes {
    size_t plan;
    size_t workspace;
};

// Enough for every pattern of that shape and number of blocks. The kernel computes `op` on the pattern.
Bytes bytes_of(const Pattern& pattern, Op op, PlanShape shape);

// Only the arrays of the direction that `op` walks are read: by column for dds_nn, otherwise by row. Returns
// 0 or the CUDA error of a launch.
int32_t build(const Pattern& pattern, Op op, PlanShape shape, void* plan, void* workspace, void* stream);

// The arrays by column from those by row.
size_t transpose_workspace(const Pattern& pattern);
int32_t transpose(const Pattern& pattern, int32_t* col_ptr, int32_t* row_idx, int32_t* col_slot,
                  void* workspace, void* stream);

// As ts_array_pair.
struct ArrayPair {
    const int32_t* first;
    const int32_t* second;
    int64_t count;
    int64_t differs;
};

// Marks the pairs that differ and have no mark.
int32_t compare(ArrayPair* pairs, int32_t count, int64_t mark, void* stream);

// True if an address is in memory of a GPU.
bool is_on_device(const void* address);

// True if a GPU and the host reach memory by the same address.
bool is_shared_with_host(const void* address);

}  // namespace ts::plans
