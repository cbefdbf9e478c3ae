#include "operands.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "abi.h"
#include "descriptors.h"
#include "error.h"

namespace ts {
namespace {

// The most bytes of an operand in device memory, so that a grid has enough thread blocks for it.
constexpr uint64_t kMaxDeviceBytes = uint64_t{1} << 42;

constexpr int64_t kMaxLd = std::numeric_limits<int32_t>::max();

Span span_of(const void* data, uint64_t bytes, const char* name, DeviceType device = DeviceType::cpu) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    require(bytes <= std::numeric_limits<uintptr_t>::max() - begin, name,
            " must end within the address space, got ", bytes, " bytes from address ", data);
    require(device == DeviceType::cpu || bytes <= kMaxDeviceBytes, name, " must have at most ",
            kMaxDeviceBytes, " bytes on a CUDA device, got ", bytes);
    return {begin, begin + bytes, std::max<uint64_t>(bytes, 1), bytes};
}

bool overlap(const Span& a, const Span& b) {
    if (a.begin == a.end || b.begin == b.end || a.begin >= b.end || b.begin >= a.end) return false;
    if (a.stride != b.stride) return true;
    // Column slices of one buffer interleave without sharing an element.
    const Span& low = a.begin <= b.begin ? a : b;
    const Span& high = a.begin <= b.begin ? b : a;
    const uint64_t offset = (high.begin - low.begin) % low.stride;
    return offset < low.length || high.length > low.stride - offset;
}

void check_alignment(const void* data, int element_bytes, const char* name, DeviceType device) {
    check_aligned(data, device == DeviceType::cuda ? kDeviceAlignment : element_bytes, name);
}

Span check_operand(const Matrix& matrix, int64_t features, DType dtype, const char* name,
                   const Problem& problem) {
    const bool in_lines = problem.device == DeviceType::cuda && problem.pattern.is_regular();
    return check_operand(matrix, problem.tokens, features, dtype, name, problem.device, in_lines);
}

// A vector that kernels read element by element, so an element's alignment is enough.
Span vector_span(const void* data, int64_t elements, DType dtype, const char* name) {
    if (data == nullptr) return {};
    check_aligned(data, element_size(dtype), name);
    return span_of(data, elements * element_size(dtype), name);
}

// An array whose size follows from the pattern.
Span array_span(const void* data, int64_t bytes, int element_bytes, const char* name, DeviceType device) {
    if (bytes == 0) return {};
    require(data != nullptr, name, " must not be null");
    check_alignment(data, element_bytes, name, device);
    return span_of(data, bytes, name, device);
}

// Lines of scales of tokens.
Span scale_span(const float* scales, int64_t lines, int64_t ld, int64_t tokens, const char* name,
                DeviceType device) {
    const int64_t elements = lines == 0 || tokens == 0 ? 0 : (lines - 1) * ld + tokens;
    return array_span(scales, elements * int64_t{sizeof(float)}, sizeof(float), name, device);
}

Span x_scale_span(const Problem& problem) {
    if (!is_quantized(problem.input_dtype)) return {};
    const int64_t lines = problem.scales_inside() ? problem.k_size() / kScaleGroup : 1;
    return scale_span(problem.x_scales, lines, problem.x_scales_ld, problem.tokens, "x.scales",
                      problem.device);
}

Span offset_span(const int32_t* offsets, int64_t groups) {
    if (offsets == nullptr) return {};
    check_aligned(offsets, sizeof(int32_t), "group_offsets");
    return span_of(offsets, (groups + 1) * sizeof(int32_t), "group_offsets");
}

using ValueSpans = std::array<Operand, 3>;

ValueSpans value_spans(const Problem& problem) {
    const Values& values = problem.values;
    const Pattern& pattern = problem.pattern;
    const int64_t scale_bytes = values.scale_bytes(pattern);
    if (scale_bytes > 0)
        require(values.scales != nullptr, "values.scales must not be null for values of ",
                to_string(values.dtype));
    return {{{"values", array_span(values.data, values.bytes(pattern), element_size(values.dtype),
                                   "values.data", problem.device)},
             {"values.metadata", array_span(values.metadata, values.metadata_bytes(pattern), sizeof(uint32_t),
                                            "values.metadata", problem.device)},
             {"values.scales",
              vector_span(scale_bytes > 0 ? values.scales : nullptr, scale_bytes / int64_t{sizeof(float)},
                          DType::float32, "values.scales")}}};
}

// Memory written from the values must not overlap them.
void check_apart_from_values(const Problem& problem, const Operand& written) {
    for (const Operand& read : value_spans(problem)) check_apart(read, written);
}

std::array<Operand, 4> operands_of(const ActivationGradient& gradient) {
    const int64_t bytes = gradient.tokens * gradient.features * element_size(gradient.dtype);
    const auto operand = [&](const char* name, const void* data) -> Operand {
        return {name, array_span(data, bytes, 1, name, DeviceType::cuda)};
    };
    return {operand("z", gradient.z),
            operand("gradient", gradient.gradient),
            operand("result", gradient.result),
            {"bias_gradient",
             vector_span(gradient.bias_gradient, gradient.features, gradient.dtype, "bias_gradient")}};
}

}  // namespace

Span check_operand(const Matrix& matrix, int64_t tokens, int64_t features, DType dtype, const char* name,
                   DeviceType device, bool in_lines) {
    if (tokens == 0 || features == 0) return {};
    const int size = element_size(dtype);
    require(matrix.data != nullptr, name, ".data must not be null");
    check_alignment(matrix.data, size, name, in_lines ? device : DeviceType::cpu);
    const bool row_major = matrix.layout == Layout::row_major;
    const int64_t contiguous = row_major ? features : tokens, vectors = row_major ? tokens : features;
    require(matrix.ld >= contiguous, name, ".ld must be at least ", contiguous, ", got ", matrix.ld);
    require(matrix.ld <= kMaxLd, name, ".ld must be at most ", kMaxLd, ", got ", matrix.ld);
    const int64_t stride = matrix.ld * size, length = contiguous * size;
    require(!in_lines || stride % 16 == 0, name, ".ld must be a multiple of 16 bytes, got ", matrix.ld,
            " elements of ", size, " bytes");
    require(vectors <= std::numeric_limits<int64_t>::max() / stride, name,
            ".ld must let the matrix fit into the address space, got ", matrix.ld, " for ", vectors,
            row_major ? " rows" : " columns");
    Span span = span_of(matrix.data, (vectors - 1) * stride + length, name, device);
    span.stride = stride;
    span.length = length;
    return span;
}

Operand area(const char* name, const void* data, uint64_t bytes) {
    return {name, span_of(data, data == nullptr ? 0 : bytes, name)};
}

void check_apart(const Operand& one, const Operand& other) {
    require(!overlap(one.span, other.span), one.name, " and ", other.name, " must not overlap in memory");
}

void check_offsets(const int32_t* offsets, int64_t groups, int64_t tokens, const char* name) {
    require(offsets[0] == 0, name, "[0] must be 0, got ", offsets[0]);
    for (int64_t group = 0; group < groups; ++group)
        require(offsets[group] <= offsets[group + 1], name, " must ascend, got ", offsets[group + 1],
                " after ", offsets[group], " at ", group + 1);
    require(offsets[groups] == tokens, name, "[", groups, "] must be tokens, ", tokens, ", got ",
            offsets[groups]);
}

std::array<Operand, 3> arrays_of(const Pattern& pattern, Op op) {
    const auto array = [](const char* name, const int32_t* data, int64_t size) {
        return area(name, data, size * sizeof(int32_t));
    };
    if (op == Op::dds_nn)
        return {array("pattern.col_ptr", pattern.cols.ptr, column_count(pattern) + 1),
                array("pattern.row_idx", pattern.cols.idx, pattern.nnz),
                array("pattern.col_slot", pattern.cols.slot, pattern.nnz)};
    return {array("pattern.row_ptr", pattern.rows.ptr, block_row_count(pattern) + 1),
            array("pattern.col_idx", pattern.rows.idx, pattern.nnz),
            array("pattern.row_slot", pattern.rows.slot, pattern.nnz)};
}

Operands::Operands(const Problem& problem, const ts_matmul_desc& desc) {
    const Pattern& pattern = problem.pattern;
    const int64_t of_y = pattern.group_out_features();
    const bool writes_x = problem.op == Op::dds_nn, writes_y = problem.op == Op::dds_nt;
    const DType result = problem.result_dtype;
    const char* const other = problem.gated ? "gate" : "residual";
    const auto [values, metadata, scales] = value_spans(problem);
    operands_ = {{{"x", check_operand(problem.x, pattern.in_features, problem.x_dtype(), "x", problem)},
                  {"y", check_operand(problem.y, of_y, problem.y_dtype(), "y", problem)},
                  values,
                  {"bias", vector_span(problem.bias, pattern.out_features, result, "bias.data")},
                  {other, problem.residual.data != nullptr
                              ? check_operand(problem.residual, of_y, result, other, problem)
                              : Span{}},
                  area("plan", desc.plan.data, desc.plan.bytes),
                  area("prepacked", desc.prepacked.data, desc.prepacked.bytes),
                  metadata,
                  scales,
                  {"x.scales", x_scale_span(problem)},
                  {"group_offsets", offset_span(problem.offsets, pattern.groups)},
                  {"bias", vector_span(problem.bias_gradient.data, pattern.out_features,
                                       problem.bias_gradient.dtype, "bias.data")}}};
    if (problem.device == DeviceType::cuda) {
        check_aligned(desc.plan.data, kDeviceAlignment, "plan.data");
        check_aligned(desc.prepacked.data, kDeviceAreaAlignment, "prepacked.data");
    }
    // The gradient of the bias is nothing where it is not written, and overlaps nothing then.
    const Operand &of_result = operands_[writes_x ? 0 : writes_y ? 1 : 2], &of_bias = operands_.back();
    for (const Operand* const written : {&of_result, &of_bias})
        for (const Operand& operand : operands_)
            if (&operand != written) check_apart(*std::min(written, &operand), *std::max(written, &operand));
    written_ = {of_result, of_bias, {}};
    if (problem.grouped() && problem.device == DeviceType::cpu)
        check_offsets(problem.offsets, pattern.groups, problem.tokens);
}

void Operands::add_workspace(const void* data, size_t bytes) {
    written_[2] = area("workspace", data, bytes);
    check_written(written_[2]);
}

void Operands::check_written(const Operand& written) const {
    for (const Operand& operand : operands_) check_apart(operand, written);
}

void Operands::check_read(const Operand& read) const {
    for (const Operand& written : written_) check_apart(read, written);
}

void check_prepacking(const Problem& problem, size_t plan_bytes, const void* prepacked, size_t bytes) {
    if (problem.device == DeviceType::cuda) check_aligned(problem.plan, kDeviceAlignment, "plan.data");
    const Operand written = area("prepacked", prepacked, bytes);
    check_apart_from_values(problem, written);
    check_apart(area("plan", problem.plan, plan_bytes), written);
}

void check_dequantization(const Problem& problem, const void* dense, size_t bytes) {
    const auto needed = static_cast<size_t>(problem.dense_bytes());
    if (bytes < needed)
        fail(TS_WORKSPACE_TOO_SMALL, "dense_bytes must be at least ", needed, ", got ", bytes);
    if (needed > 0) {
        require(dense != nullptr, "dense must not be null");
        check_alignment(dense, element_size(problem.input_dtype), "dense", problem.device);
    }
    check_apart_from_values(problem, {"dense", span_of(dense, needed, "dense", problem.device)});
}

void check_compression(const Compression& compression) {
    const auto& [pattern, device, dtype, transposed, values, mask, compressed, metadata] = compression;
    check_regular(pattern, "values in 2:4");
    check_compressed(transposed ? pattern.block_rows : pattern.block_cols,
                     transposed ? "pattern.block_rows" : "pattern.block_cols");
    const int size = element_size(dtype);
    const int64_t count = pattern.value_count();
    const Operand read[] = {{"values", array_span(values, count * size, size, "values", device)},
                            {"mask", array_span(mask, count, 1, "mask", device)}};
    const Operand written[] = {
        {"compressed", array_span(compressed, count / 2 * size, size, "compressed", device)},
        {"metadata", array_span(metadata, count / 8, sizeof(uint32_t), "metadata", device)}};
    for (const Operand& to : written)
        for (const Operand& from : read) check_apart(from, to);
    check_apart(written[0], written[1]);
}

void check_operands(const ActivationGradient& gradient) {
    require(gradient.features == 0 || gradient.bias_gradient != nullptr, "bias_gradient must not be null");
    const auto [z, given, result, of_bias] = operands_of(gradient);
    if (given.span.begin != result.span.begin) check_apart(given, result);  // otherwise in place
    check_apart(z, result);
    for (const Operand& operand : {z, given, result}) check_apart(operand, of_bias);
}

void check_workspace(const ActivationGradient& gradient, const void* workspace, size_t bytes) {
    const Operand scratch = area("workspace", workspace, bytes);
    for (const Operand& operand : operands_of(gradient)) check_apart(operand, scratch);
}

void check_operands(const Gate& gate, bool gradients) {
    const auto span = [&](const char* name, const Matrix& matrix) -> Operand {
        return {name, check_operand(matrix, gate.tokens, gate.features, gate.dtype, name, DeviceType::cuda)};
    };
    const Operand of_gate = span("gate", gate.gate), of_factor = span("factor", gate.factor);
    const Operand result = span(gradients ? "gradient" : "result", gate.result);
    if (!gradients) return check_apart(of_gate, result), check_apart(of_factor, result);
    const Operand written[] = {span("gate_gradient", gate.of_gate), span("factor_gradient", gate.of_factor)};
    for (const Operand& to : written)
        for (const Operand* const from : {&of_gate, &of_factor, &result}) check_apart(*from, to);
    check_apart(written[0], written[1]);
}

void check_operands(const Quantization& of) {
    const auto span = [&](const char* name, const Matrix& matrix, DType dtype) -> Operand {
        return {name, check_operand(matrix, of.tokens, of.features, dtype, name, of.device)};
    };
    const Operand x = span("x", of.x, of.dtype),
                  quantized = span("quantized", of.quantized, of.quantized_dtype);
    const int64_t lines = of.in_groups() ? of.features / kScaleGroup : 1;
    const Operand scales{"scales", scale_span(of.scales, lines, of.scales_ld, of.tokens, "scales",
                                              DeviceType::cpu)};  // aligned to one element
    check_apart(x, quantized);
    check_apart(x, scales);
    check_apart(quantized, scales);
}

void check_operands(const GroupSums& of) {
    const Operand y{"y", check_operand(of.y, of.tokens, of.features, of.dtype, "y", of.device)};
    require(of.offsets != nullptr, "group_offsets must not be null");
    const Operand offsets{"group_offsets", offset_span(of.offsets, of.groups)};
    require(of.features == 0 || of.sums != nullptr, "sums must not be null");
    const Operand sums{"sums", vector_span(of.sums, of.groups * of.features, of.result_dtype, "sums")};
    check_apart(y, sums);
    check_apart(offsets, sums);
    if (of.device == DeviceType::cpu) check_offsets(of.offsets, of.groups, of.tokens);
}

}  // namespace ts
