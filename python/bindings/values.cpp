// Compression of values, and element by element what goes with a product: gradients of activations, gates.
#include <nanobind/stl/pair.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "support.h"

namespace bindings {
namespace {

void values_compress(const ts_pattern& pattern, int32_t device, int32_t dtype, uintptr_t values,
                     uintptr_t mask, bool transposed, uintptr_t compressed, uintptr_t metadata,
                     uintptr_t stream) {
    check(ts_values_compress(&pattern, device, dtype, pointer<void>(values), pointer<uint8_t>(mask),
                             transposed, pointer<void>(compressed), pointer<uint32_t>(metadata),
                             pointer<CUstream_st>(stream)));
}

size_t activation_gradient_workspace_size(int32_t dtype, int64_t tokens, int64_t features) {
    size_t bytes = 0;
    check(ts_activation_gradient_workspace_size(dtype, tokens, features, &bytes));
    return bytes;
}

void activation_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, uintptr_t z,
                         uintptr_t gradient, uintptr_t result, uintptr_t bias_gradient, uintptr_t workspace,
                         size_t workspace_bytes, uintptr_t stream) {
    check(ts_activation_gradient(dtype, activation, tokens, features, pointer<void>(z),
                                 pointer<void>(gradient), pointer<void>(result), pointer<void>(bias_gradient),
                                 pointer<void>(workspace), workspace_bytes, pointer<CUstream_st>(stream)));
}

// The address of a row-major matrix, and the elements from one row to the next.
using Rows = std::pair<uintptr_t, int64_t>;

ts_matrix row_major(const Rows& rows) { return {pointer<void>(rows.first), rows.second, TS_ROW_MAJOR, 0}; }

void gate(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, Rows gate, Rows factor,
          Rows result, uintptr_t stream) {
    const ts_matrix matrices[] = {row_major(gate), row_major(factor), row_major(result)};
    check(ts_gate(dtype, activation, tokens, features, &matrices[0], &matrices[1], &matrices[2],
                  pointer<CUstream_st>(stream)));
}

void gate_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, Rows gate,
                   Rows factor, Rows gradient, Rows gate_gradient, Rows factor_gradient, uintptr_t stream) {
    const ts_matrix matrices[] = {row_major(gate), row_major(factor), row_major(gradient),
                                  row_major(gate_gradient), row_major(factor_gradient)};
    check(ts_gate_gradient(dtype, activation, tokens, features, &matrices[0], &matrices[1], &matrices[2],
                           &matrices[3], &matrices[4], pointer<CUstream_st>(stream)));
}

void group_sums(int32_t device, int32_t dtype, int32_t result_dtype, int64_t tokens, int64_t features,
                int64_t groups, Rows y, uintptr_t group_offsets, uintptr_t sums, uintptr_t stream) {
    const ts_matrix matrix = row_major(y);
    check(ts_group_sums(device, dtype, result_dtype, tokens, features, groups, &matrix,
                        pointer<int32_t>(group_offsets), pointer<void>(sums), pointer<CUstream_st>(stream)));
}

void combine(int32_t device, int32_t dtype, int64_t tokens, int64_t choices, int64_t features, Rows y,
             uintptr_t rows, uintptr_t weights, Rows result, uintptr_t stream) {
    const ts_matrix matrices[] = {row_major(y), row_major(result)};
    check(ts_combine(device, dtype, tokens, choices, features, &matrices[0], pointer<int64_t>(rows),
                     pointer<void>(weights), &matrices[1], pointer<CUstream_st>(stream)));
}

// Matrices without an address are not there.
void combine_gradient(int32_t device, int32_t dtype, int64_t tokens, int64_t choices, int64_t features,
                      Rows y, uintptr_t rows, uintptr_t weights, Rows gradient, Rows y_gradient,
                      uintptr_t weights_gradient, uintptr_t stream) {
    const ts_matrix matrices[] = {row_major(y), row_major(gradient), row_major(y_gradient)};
    const auto given = [](const ts_matrix& matrix) { return matrix.data == nullptr ? nullptr : &matrix; };
    check(ts_combine_gradient(device, dtype, tokens, choices, features, given(matrices[0]),
                              pointer<int64_t>(rows), pointer<void>(weights), &matrices[1],
                              given(matrices[2]), pointer<void>(weights_gradient),
                              pointer<CUstream_st>(stream)));
}

}  // namespace

void bind_values(nb::module_& m) {
    m.def("values_compress", &values_compress, "pattern"_a, "device"_a, "dtype"_a, "values"_a, "mask"_a,
          "transposed"_a, "compressed"_a, "metadata"_a, "stream"_a);
    m.def("activation_gradient_workspace_size", &activation_gradient_workspace_size, "dtype"_a, "tokens"_a,
          "features"_a);
    m.def("activation_gradient", &activation_gradient, "dtype"_a, "activation"_a, "tokens"_a, "features"_a,
          "z"_a, "gradient"_a, "result"_a, "bias_gradient"_a, "workspace"_a, "workspace_bytes"_a, "stream"_a);
    m.def("gate", &gate, "dtype"_a, "activation"_a, "tokens"_a, "features"_a, "gate"_a, "factor"_a,
          "result"_a, "stream"_a);
    m.def("gate_gradient", &gate_gradient, "dtype"_a, "activation"_a, "tokens"_a, "features"_a, "gate"_a,
          "factor"_a, "gradient"_a, "gate_gradient"_a, "factor_gradient"_a, "stream"_a);
    m.def("group_sums", &group_sums, "device"_a, "dtype"_a, "result_dtype"_a, "tokens"_a, "features"_a,
          "groups"_a, "y"_a, "group_offsets"_a, "sums"_a, "stream"_a);
    m.def("combine", &combine, "device"_a, "dtype"_a, "tokens"_a, "choices"_a, "features"_a, "y"_a, "rows"_a,
          "weights"_a, "result"_a, "stream"_a);
    m.def("combine_gradient", &combine_gradient, "device"_a, "dtype"_a, "tokens"_a, "choices"_a, "features"_a,
          "y"_a, "rows"_a, "weights"_a, "gradient"_a, "y_gradient"_a, "weights_gradient"_a, "stream"_a);
}

}  // namespace bindings
