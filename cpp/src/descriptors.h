// From the public descriptors to checked problems.
#pragma once

#include <cstddef>

#include "activations.h"
#include "bias_gradient.h"
#include "common/problem.h"
#include "device.h"
#include "tilesparse/tilesparse.h"

namespace ts {

// Checks the shapes of a pattern. The arrays are not read.
Pattern check_pattern(const ts_pattern* source);

// Throws unless blocks have sides of 16, 32, 64 or 128 that divide the matrix. `what` needs them.
void check_regular(const Pattern& pattern, const char* what);

// Checks everything that can be known without following a pointer to operands; for these see operands.h.
Problem check_problem(const ts_matmul_desc& desc);

DeviceType check_device_type(int32_t device);
DType check_value_dtype(int32_t dtype);

// Checks the side of a block along which it is cut into groups of four.
void check_compressed(int32_t side, const char* name);

// Checks a row-major matrix but for its memory.
Matrix check_rows(const ts_matrix* source, int64_t tokens, int64_t features, const char* name);

// Checks the arguments of ts_activation_gradient.
ActivationGradient check_activation_gradient(int32_t dtype, int32_t activation, int64_t tokens,
                                             int64_t features);

// Checks what ts_gate and ts_gate_gradient both read, and one more of their matrices.
Gate check_gate(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, const ts_matrix* gate,
                const ts_matrix* factor);
Matrix check_gate_matrix(const Gate& gate, const ts_matrix* source, const char* name);

// Checks the arguments of ts_group_sums but for their memory.
GroupSums check_group_sums(int32_t device, int32_t dtype, int32_t result_dtype, int64_t tokens,
                           int64_t features, int64_t groups, const ts_matrix* y);

// Checks the arguments of ts_quantize but for their memory.
Quantization check_quantization(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens,
                                int64_t features, const ts_matrix* x, const ts_matrix* quantized);

// Likewise of ts_quantize_groups.
Quantization check_group_quantization(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens,
                                      int64_t features, const ts_matrix* x, const ts_matrix* quantized,
                                      int64_t scales_ld);

// Checks the properties of a device that a caller describes.
NamedDevice check_device(const ts_device_info& info);

// Blocks along each dimension.
inline int64_t block_row_count(const Pattern& pattern) { return pattern.row_count(); }
inline int64_t block_col_count(const Pattern& pattern) { return pattern.col_count(); }

// Block rows of one group; and lines of the column arrays, which go by group.
inline int64_t group_row_count(const Pattern& pattern) { return block_row_count(pattern) / pattern.groups; }
inline int64_t column_count(const Pattern& pattern) { return block_col_count(pattern) * pattern.groups; }

const char* to_string(Op op);
const char* to_string(DType dtype);

}  // namespace ts
