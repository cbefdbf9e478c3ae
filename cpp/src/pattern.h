// Patterns on the host: validation and transpose.
#pragma once

#include "common/problem.h"

namespace ts {

// Throws TS_INVALID_PATTERN naming the first entry that breaks an invariant of ts_pattern.
void validate_pattern(const Pattern& pattern);

// Throws where one direction of a pattern, whose arrays are there, leads out of the arrays or the weight.
void check_bounds(const Pattern& pattern, bool by_column);

// Throws where these arrays cannot take the transpose of a valid pattern.
void check_transpose(const Pattern& pattern, const Adjacency& cols);

// Writes the transpose of a valid pattern.
void transpose_pattern(const Pattern& pattern, int32_t* col_ptr, int32_t* row_idx, int32_t* col_slot);

}  // namespace ts
