// The rows that belong to a token added up, and the gradients of the sum; on either device.
#pragma once

#include "elementwise/combine.h"
#include "tilesparse/tilesparse.h"

namespace ts {

using combine::Combination;

// Checks sizes, and the matrix of the tokens: the result, or its gradient.
Combination check_combination(int32_t device, int32_t dtype, int64_t tokens, int64_t choices,
                              int64_t features, const ts_matrix* result, const char* result_name);

// A matrix with the rows of all tokens.
Matrix check_row_matrix(const Combination& of, const ts_matrix* source, const char* name);

// Check memory and, on the CPU, what is in `rows`.
void check_sum(const Combination& of);
void check_gradients(const Combination& of);

void combine_rows(const Combination& of, void* stream);
void differentiate_combination(const Combination& of, void* stream);

}  // namespace ts
