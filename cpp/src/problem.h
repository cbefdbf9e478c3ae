// From the public descriptors to checked problems.
#pragma once

#include "common/problem.h"
#include "tilesparse/tilesparse.h"

namespace ts {

// Copies a structure of the ABI after checking that it is not null and has this library's size.
template <class T>
T read_struct(const T* source, const char* name);

// Checks the shapes of a pattern. The arrays are not read.
Pattern check_pattern(const ts_pattern* source);

// Checks everything that can be known without following a pointer to operands. With `operands`,
// also the operands' pointers, leading dimensions, alignment and overlap.
Problem check_problem(const ts_matmul_desc& desc, bool operands);

// Blocks along each dimension.
inline int64_t block_row_count(const Pattern& pattern) { return pattern.out_features / pattern.block_rows; }
inline int64_t block_col_count(const Pattern& pattern) { return pattern.in_features / pattern.block_cols; }

const char* to_string(Op op);
const char* to_string(DType dtype);

}  // namespace ts
