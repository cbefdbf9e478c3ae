// Patterns on the host: validation and transpose.
#pragma once

#include "common/problem.h"

namespace ts {

// Throws TS_INVALID_PATTERN naming the first entry that breaks an invariant of ts_pattern.
void validate_pattern(const Pattern& pattern);

// Writes the transpose of a valid pattern.
void transpose_pattern(const Pattern& pattern, int32_t* col_ptr, int32_t* row_idx, int32_t* col_slot);

}  // namespace ts
