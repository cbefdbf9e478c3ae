// Calls on values, activations, gates and quantization.
#ifndef TILESPARSE_TESTS_FUZZ_VALUES_H_
#define TILESPARSE_TESTS_FUZZ_VALUES_H_

#include <tilesparse/tilesparse.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "fuzz_arguments.h"
#include "fuzz_memory.h"
#include "fuzz_rules.h"

namespace fuzz {

inline void call_dequantize() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, true);
    const wide count = wide(bounded(pattern.nnz)) * pattern.block_rows * pattern.block_cols;
    wide bytes = std::clamp<wide>(count * size_of(input_of(desc).dtype), 0, kMostBytes + 1);
    if (chance(5)) bytes = draw(0, 4096);
    const Result dense(static_cast<size_t>(bytes));
    if (chance(5)) desc.values.data = dense.data;
    if (desc.device == TS_CUDA) desc.values.data = for_device(desc.values.data);
    const ts_matmul_desc* const given = followed_product(desc, pattern);
    const bool done = check_status(
        "ts_values_dequantize", ts_values_dequantize(given, dense.data, static_cast<size_t>(bytes), nullptr));
    dense.check_untouched("ts_values_dequantize", done);
    check_without_gpu("ts_values_dequantize", given, done);
}

inline void call_compress() {
    const ts_pattern pattern = some_pattern();
    const auto device = static_cast<int32_t>(chance(80) ? 0 : draw(-1, 2));
    const auto dtype = static_cast<int32_t>(chance(97) ? draw(1, 6) : wild_number());
    const auto transposed = static_cast<int32_t>(chance(97) ? draw(0, 1) : wild_number());
    const wide count = wide(bounded(pattern.nnz)) * pattern.block_rows * pattern.block_cols;
    const wide bytes = count * size_of(dtype);
    unsigned char *const values = take_some(bytes), *const mask = take_some(count),
                         *compressed = take_some(bytes / 2), *metadata = take_some(count / 8);
    for (int64_t i = 0; mask != nullptr && i < static_cast<int64_t>(count); ++i) mask[i] = chance(50);
    if (chance(3)) compressed = values;
    if (chance(3)) metadata = compressed;
    const bool on_device = device == TS_CUDA;
    unsigned char* const to = on_device ? for_device(compressed) : compressed;
    const bool done =
        check_status("ts_values_compress",
                     ts_values_compress(as_caller_has_it(pattern), device, dtype, values, mask, transposed,
                                        to, reinterpret_cast<uint32_t*>(metadata), nullptr));
    check("ts_values_compress", !done || !on_device || has_gpu);
    check("ts_values_compress", done || (is_untouched(compressed) && is_untouched(metadata)));
    check("ts_values_compress", is_untouched(values));
}

// Tokens or features, as they are or near the end of what fits.
inline int64_t some_extent(int64_t most, int64_t multiple) {
    static constexpr int64_t kLarge[] = {INT32_MAX, 1ll << 30, (1ll << 31) - (1 << 16), 1ll << 31, 1ll << 24};
    if (chance(85)) return multiple * draw(0, most);
    return chance(50) ? one_of(kLarge) / multiple * multiple : wild_number();
}

inline wide bytes_of(int64_t lines, int64_t line, int32_t dtype) {
    return wide(bounded(lines)) * bounded(line) * size_of(dtype);
}

inline int32_t some_dtype() { return static_cast<int32_t>(chance(90) ? draw(2, 4) : wild_number()); }
inline int32_t some_activation() { return static_cast<int32_t>(chance(90) ? draw(0, 3) : wild_number()); }

inline void call_activation_gradient() {
    const int32_t dtype = some_dtype(), activation = some_activation();
    const int64_t tokens = some_extent(40, 1), features = some_extent(8, 16);
    const Result size(8);
    const bool sized =
        check_status("ts_activation_gradient_workspace_size",
                     ts_activation_gradient_workspace_size(dtype, tokens, features, size.as<size_t>()));
    size.check_untouched("ts_activation_gradient_workspace_size", sized);
    const wide bytes = bytes_of(tokens, features, dtype);
    const Result result(static_cast<size_t>(std::clamp<wide>(bytes, 0, kMostBytes + 1)));
    unsigned char *const z = take_some(bytes), *const gradient = chance(80) ? take_some(bytes) : result.data,
                         *const of_bias = take_some(bytes_of(1, features, dtype));
    const auto workspace_bytes = static_cast<size_t>(chance(80) ? 1 << 16 : draw(0, 256));
    unsigned char* const workspace = chance(80) ? take_some(wide(workspace_bytes)) : z;
    const bool done =
        check_status("ts_activation_gradient",
                     ts_activation_gradient(dtype, activation, tokens, features, z, gradient, result.data,
                                            for_device(of_bias), workspace, workspace_bytes, nullptr));
    result.check_untouched("ts_activation_gradient", done);
    check("ts_activation_gradient", is_untouched(of_bias) && (!done || has_gpu));
    check("ts_activation_gradient_workspace_size", !sized || has_gpu);
}

// One of those of a gate.
inline ts_matrix some_matrix(int32_t dtype, int64_t tokens, int64_t features) {
    ts_matrix matrix{};
    matrix.ld = chance(90) ? bounded(features) + 8 * draw(0, 2) : wild_number();
    if (chance(3)) matrix.layout = static_cast<int32_t>(wild_number());
    if (chance(3)) matrix.reserved = static_cast<int32_t>(wild_number());
    const bool empty = tokens <= 0 || features <= 0;
    matrix.data =
        take_some(empty ? 0 : bytes_of(tokens - 1, matrix.ld, dtype) + bytes_of(1, features, dtype));
    return matrix;
}

inline void call_gate() {
    const int32_t dtype = some_dtype(), activation = some_activation();
    const int64_t tokens = some_extent(40, 1), features = some_extent(8, 16);
    ts_matrix read[3], written[2];
    for (ts_matrix& matrix : read) matrix = some_matrix(dtype, tokens, features);
    for (ts_matrix& matrix : written) matrix = some_matrix(dtype, tokens, features);
    if (chance(5)) written[1] = read[0];
    const void* const results[] = {written[0].data, written[1].data};
    for (ts_matrix& matrix : written) matrix.data = for_device(matrix.data);
    const auto given = [](const ts_matrix& matrix) { return chance(2) ? nullptr : &matrix; };
    const bool done = check_status("ts_gate", ts_gate(dtype, activation, tokens, features, given(read[0]),
                                                      given(read[1]), given(written[0]), nullptr));
    const bool differentiated =
        check_status("ts_gate_gradient",
                     ts_gate_gradient(dtype, activation, tokens, features, given(read[0]), given(read[1]),
                                      given(read[2]), given(written[0]), given(written[1]), nullptr));
    check("ts_gate", is_untouched(results[0]) && (!done || has_gpu));
    check("ts_gate_gradient", is_untouched(results[1]) && (!differentiated || has_gpu));
}

inline void call_group_sums() {
    const auto device = static_cast<int32_t>(chance(80) ? 0 : draw(-1, 2));
    const int32_t dtype = static_cast<int32_t>(chance(90) ? draw(1, 4) : wild_number()),
                  to = chance(80) ? dtype : some_dtype();
    const int64_t tokens = some_extent(40, 1), features = some_extent(8, 16),
                  groups = chance(90) ? draw(1, 6) : wild_number();
    ts_matrix y = some_matrix(dtype, tokens, features);
    const wide bytes = wide(bounded(groups)) * bytes_of(1, features, to);
    unsigned char* sums = take_some(bytes);
    if (chance(3) && wide(held_at(y.data)) >= bytes) sums = static_cast<unsigned char*>(y.data);
    const int32_t* const offsets = some_offsets(groups, tokens);
    const bool on_device = device == TS_CUDA, given = !chance(2);
    void* const written = on_device ? for_device(sums) : sums;
    const bool done =
        check_status("ts_group_sums", ts_group_sums(device, dtype, to, tokens, features, groups,
                                                    given ? &y : nullptr, offsets, written, nullptr));
    check("ts_group_sums", !done || !on_device || has_gpu);
    check("ts_group_sums", done || is_untouched(sums));
}

// Rows of y: each once, or any.
inline const int64_t* some_rows(int64_t count) {
    const int64_t entries = std::clamp<int64_t>(count, 0, 1024);
    if (entries != count) return nullptr;
    std::vector<int64_t> rows(static_cast<size_t>(entries));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = entries - 1 - static_cast<int64_t>(i);
    if (entries > 0 && chance(5)) rows[static_cast<size_t>(draw(0, entries - 1))] = wild_number();
    unsigned char* const memory = take_some(wide(entries) * sizeof(int64_t));
    if (memory != nullptr && entries > 0) std::memcpy(memory, rows.data(), rows.size() * sizeof(int64_t));
    return reinterpret_cast<int64_t*>(memory);
}

inline void call_combine() {
    const auto device = static_cast<int32_t>(chance(80) ? 0 : draw(-1, 2));
    const int32_t dtype = some_dtype();
    const int64_t tokens = some_extent(40, 1), choices = some_extent(4, 1), features = some_extent(8, 16);
    const wide lines = wide(bounded(tokens)) * bounded(choices);
    const auto count = static_cast<int64_t>(std::min<wide>(lines, 1 << 20));
    const int64_t* const rows = some_rows(count);
    ts_matrix y = some_matrix(dtype, count, features), of_y = some_matrix(dtype, count, features),
              result = some_matrix(dtype, tokens, features), gradient = some_matrix(dtype, tokens, features);
    unsigned char *const weights = chance(80) ? take_some(bytes_of(1, count, dtype)) : nullptr,
                         *const of_weights = chance(80) ? take_some(bytes_of(1, count, dtype)) : nullptr;
    if (choices > 0 && chance(3)) result = y;  // which has as many rows then
    if (chance(3)) of_y = gradient;
    const void* const written[] = {result.data, of_y.data, of_weights};
    const bool on_device = device == TS_CUDA;
    if (on_device) result.data = for_device(result.data), of_y.data = for_device(of_y.data);
    void* const to_weights = on_device && of_weights != nullptr ? for_device(of_weights) : of_weights;
    const auto given = [](const ts_matrix& matrix) { return chance(3) ? nullptr : &matrix; };
    const bool done = check_status("ts_combine", ts_combine(device, dtype, tokens, choices, features,
                                                            given(y), rows, weights, given(result), nullptr));
    check("ts_combine", (done && !on_device) || is_untouched(written[0]));
    const bool differentiated =
        check_status("ts_combine_gradient",
                     ts_combine_gradient(device, dtype, tokens, choices, features, given(y), rows, weights,
                                         given(gradient), chance(20) ? nullptr : &of_y, to_weights, nullptr));
    check("ts_combine", (!done && !differentiated) || !on_device || has_gpu);
    if (!differentiated || on_device)
        check("ts_combine_gradient", is_untouched(written[1]) && is_untouched(written[2]));
}

inline void call_quantize() {
    const auto device = static_cast<int32_t>(chance(80) ? 0 : draw(-1, 2));
    const int32_t dtype = some_dtype(),
                  to = static_cast<int32_t>(chance(90) ? draw(TS_INT8, TS_FLOAT8_E4M3FN) : wild_number());
    const bool in_groups = chance(40);
    const int64_t tokens = some_extent(40, 1),
                  features = some_extent(in_groups ? 4 : 8, in_groups ? 128 : 16);
    const int64_t ld = chance(90) ? std::max<int64_t>(bounded(tokens), 1) + draw(0, 3) : wild_number();
    const ts_matrix x = some_matrix(dtype, tokens, features);
    ts_matrix quantized = some_matrix(to, tokens, features);
    const wide lines = in_groups ? bounded(features) / 128 : 1;
    unsigned char* scales = take_some((wide(lines > 0 ? lines - 1 : 0) * bounded(ld) + bounded(tokens)) * 4);
    if (chance(3)) quantized.data = x.data;
    if (features > 0 && chance(3)) scales = static_cast<unsigned char*>(quantized.data);
    const void* const written = quantized.data;
    const bool on_device = device == TS_CUDA;
    if (on_device) quantized.data = for_device(quantized.data);
    float* const to_scales = reinterpret_cast<float*>(on_device ? for_device(scales) : scales);
    const ts_matrix *const from = chance(2) ? nullptr : &x, *const target = chance(2) ? nullptr : &quantized;
    const ts_status_t status =
        in_groups
            ? ts_quantize_groups(device, dtype, to, tokens, features, from, target, to_scales, ld, nullptr)
            : ts_quantize(device, dtype, to, tokens, features, from, target, to_scales, nullptr);
    const bool done = check_status("ts_quantize", status);
    check("ts_quantize", !done || !on_device || has_gpu);
    check("ts_quantize", done || (is_untouched(written) && is_untouched(scales)));
    check("ts_quantize", is_untouched(x.data));
}

}  // namespace fuzz

#endif  // TILESPARSE_TESTS_FUZZ_VALUES_H_
