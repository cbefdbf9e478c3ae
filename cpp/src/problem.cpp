#include "problem.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "abi.h"
#include "error.h"

namespace ts {
namespace {

constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();

constexpr std::array<const char*, 3> kOps{"dds_nt", "dds_nn", "sdd_tn"};
constexpr std::array<const char*, 6> kDTypes{"float64",  "float32", "float16",
                                             "bfloat16", "int8",    "float8_e4m3fn"};
constexpr int32_t kActivationDTypes = 4;  // of them, the first ones

template <class Enum, class... Name>
Enum check_enum(int32_t value, int32_t count, const Name&... name) {
    require(value >= 0 && value < count, name..., " is ", value, "; allowed are 0 to ", count - 1);
    return static_cast<Enum>(value);
}

void check_block(int32_t extent, const char* name) {
    require(extent == 16 || extent == 32 || extent == 64 || extent == 128, name, " is ", extent,
            "; allowed are 16, 32, 64 and 128");
}

void check_features(int64_t features, int32_t block, const char* name, const char* block_name) {
    require(features >= 0 && features <= kMaxExtent, name, " is ", features, "; allowed are 0 to ",
            kMaxExtent);
    require(features % block == 0, name, " is ", features, ", not a multiple of ", block_name, " = ", block);
}

// Memory from `begin` to `end` in which lines of `length` bytes begin every `pitch` bytes.
struct Span {
    uintptr_t begin;
    uintptr_t end;
    uint64_t pitch;
    uint64_t length;
};

Span span_of(const void* data, uint64_t bytes, const char* name) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    require(bytes <= std::numeric_limits<uintptr_t>::max() - begin, name, " has ", bytes,
            " bytes from address ", data, " on, more than there is memory behind it");
    return {begin, begin + bytes, std::max<uint64_t>(bytes, 1), bytes};
}

bool overlap(const Span& a, const Span& b) {
    if (a.begin == a.end || b.begin == b.end || a.begin >= b.end || b.begin >= a.end) return false;
    if (a.pitch != b.pitch) return true;
    // Column slices of one buffer interleave without sharing an element.
    const Span& low = a.begin <= b.begin ? a : b;
    const Span& high = a.begin <= b.begin ? b : a;
    const uint64_t offset = (high.begin - low.begin) % low.pitch;
    return offset < low.length || high.length > low.pitch - offset;
}

// No address space holds more elements, and nothing that is worked out from so many overflows.
constexpr int64_t kMaxElements = int64_t{1} << 47;

// Of an empty matrix nothing is read or written, wherever it is said to lie.
Matrix check_matrix(const ts_matrix& source, int64_t tokens, int64_t features, const char* name) {
    require(source.reserved == 0, name, ".reserved is ", source.reserved, "; it must be 0");
    const auto layout = check_enum<Layout>(source.layout, 2, name, ".layout");
    if (tokens == 0 || features == 0) return {nullptr, 0, layout};
    require(tokens <= kMaxElements / features, name, " has ", tokens, " tokens of ", features,
            " features; at most ", kMaxElements, " elements are allowed");
    return {source.data, source.ld, layout};
}

// 0: the dtype of the activations; d + 1: the dtype d.
DType check_own_dtype(int32_t value, DType activations, int32_t count, const char* name) {
    const auto own = check_enum<int32_t>(value, count + 1, name);
    return own == 0 ? activations : static_cast<DType>(own - 1);
}

void check_alignment(const void* data, int element_bytes, const char* name, DeviceType device) {
    check_aligned(data, device == DeviceType::cuda ? kDeviceAlignment : element_bytes, name);
}

// What a matrix takes of memory, after checking that it can.
Span check_operand(const Matrix& matrix, int64_t tokens, int64_t features, DType dtype, const char* name,
                   DeviceType device) {
    if (tokens == 0 || features == 0) return {};
    const int size = element_size(dtype);
    require(matrix.data != nullptr, name, ".data is null");
    check_alignment(matrix.data, size, name, device);
    const bool row_major = matrix.layout == Layout::row_major;
    const int64_t line = row_major ? features : tokens, lines = row_major ? tokens : features;
    require(matrix.ld >= line, name, ".ld is ", matrix.ld, ", less than the ", line, " elements of a line");
    require(matrix.ld <= kMaxExtent, name, ".ld is ", matrix.ld, "; at most ", kMaxExtent, " is allowed");
    const int64_t pitch = matrix.ld * size, length = line * size;
    require(device == DeviceType::cpu || pitch % 16 == 0, name, ".ld is ", matrix.ld, " elements of ", size,
            " bytes, not a multiple of 16 bytes");
    require(lines <= std::numeric_limits<int64_t>::max() / pitch, name, ".ld is ", matrix.ld, " for ", lines,
            " lines, more than there is memory for");
    Span span = span_of(matrix.data, (lines - 1) * pitch + length, name);
    span.pitch = pitch;
    span.length = length;
    return span;
}

Span check_operand(const Matrix& matrix, int64_t features, DType dtype, const char* name,
                   const Problem& problem) {
    return check_operand(matrix, problem.tokens, features, dtype, name, problem.device);
}

// The side of a block along which it is cut into groups of four.
void check_compressed(int32_t side, const char* name) {
    require(side % 32 == 0, name, " is ", side, "; TS_STORAGE_2_4 is for 32, 64 and 128");
}

Values check_storage(const ts_matmul_desc& desc, const Problem& problem) {
    const auto storage = check_enum<Storage>(desc.storage, 2, "storage");
    const DType dtype = check_own_dtype(desc.values_dtype, problem.dtype,
                                        static_cast<int32_t>(kDTypes.size()), "values_dtype");
    const bool row_scales = check_enum<int32_t>(desc.row_scales, 2, "row_scales") == 1;
    if (storage == Storage::two_of_four) {
        check_compressed(problem.pattern.block_cols, "pattern.block_cols");
    } else {
        require(desc.metadata == nullptr, "metadata is given; only TS_STORAGE_2_4 has any");
    }
    if (!is_quantized(dtype)) {
        require(desc.scales == nullptr, "scales is given; values of ", to_string(dtype), " have none");
        require(!row_scales, "row_scales is 1; values of ", to_string(dtype), " have no scales");
    }
    if (problem.op == Op::sdd_tn) {
        require(storage == Storage::plain, "storage is ", desc.storage, "; sdd_tn writes plain values");
        require(dtype == problem.result_dtype, "values_dtype stands for ", to_string(dtype),
                " and result_dtype for ", to_string(problem.result_dtype),
                "; the values are what sdd_tn writes");
    } else {
        require(dtype == problem.dtype || is_quantized(dtype), "values_dtype stands for ", to_string(dtype),
                " and dtype is ", to_string(problem.dtype),
                "; allowed are that of the activations, int8 and float8_e4m3fn");
    }
    return {desc.values, static_cast<const uint32_t*>(desc.metadata), desc.scales, row_scales, dtype,
            storage};
}

// What kernels read element by element, so that it needs no more than an element's alignment.
Span vector_span(const void* data, int64_t elements, DType dtype, const char* name) {
    if (data == nullptr) return {};
    check_aligned(data, element_size(dtype), name);
    return span_of(data, elements * element_size(dtype), name);
}

// An array that lies beside a pattern, as large as the pattern makes it.
Span array_span(const void* data, int64_t bytes, int element_bytes, const char* name, DeviceType device) {
    if (bytes == 0) return {};
    require(data != nullptr, name, " is null");
    check_alignment(data, element_bytes, name, device);
    return span_of(data, bytes, name);
}

struct Operand {
    const char* name;
    Span span;
};

using ValueSpans = std::array<Operand, 3>;

ValueSpans value_spans(const Problem& problem) {
    const Values& values = problem.values;
    const Pattern& pattern = problem.pattern;
    const int64_t scale_bytes = values.scale_bytes(pattern);
    if (scale_bytes > 0) require(values.scales != nullptr, "scales is null; values of 8 bits have some");
    return {{{"values", array_span(values.data, values.bytes(pattern), element_size(values.dtype), "values",
                                   problem.device)},
             {"metadata", array_span(values.metadata, values.metadata_bytes(pattern), sizeof(uint32_t),
                                     "metadata", problem.device)},
             {"scales", vector_span(scale_bytes > 0 ? values.scales : nullptr,
                                    scale_bytes / int64_t{sizeof(float)}, DType::float32, "scales")}}};
}

void check_operands(const Problem& problem, const ts_matmul_desc& desc) {
    const Pattern& pattern = problem.pattern;
    const bool writes_x = problem.op == Op::dds_nn, writes_y = problem.op == Op::dds_nt;
    const DType result = problem.result_dtype;
    const char* const other = problem.gated ? "gate" : "residual";
    const auto [values, metadata, scales] = value_spans(problem);
    const Operand operands[] = {
        {"x", check_operand(problem.x, pattern.in_features, writes_x ? result : problem.dtype, "x", problem)},
        {"y",
         check_operand(problem.y, pattern.out_features, writes_y ? result : problem.dtype, "y", problem)},
        values,
        {"bias", vector_span(problem.bias, pattern.out_features, problem.dtype, "bias")},
        {other, problem.residual.data != nullptr
                    ? check_operand(problem.residual, pattern.out_features, result, other, problem)
                    : Span{}},
        {"plan", span_of(desc.plan, desc.plan == nullptr ? 0 : desc.plan_bytes, "plan")},
        {"packed", span_of(desc.packed, desc.packed == nullptr ? 0 : desc.packed_bytes, "packed")},
        metadata,
        scales,
        {"bias_gradient", vector_span(problem.bias_gradient.data, pattern.out_features,
                                      problem.bias_gradient.dtype, "bias_gradient")}};
    if (problem.device == DeviceType::cuda) {
        check_aligned(desc.plan, kDeviceAlignment, "plan");
        check_aligned(desc.packed, kDeviceAreaAlignment, "packed");
    }
    // The gradient of the bias is nothing where it is not written, and overlaps nothing then.
    for (const Operand* const written : {&operands[writes_x ? 0 : writes_y ? 1 : 2], std::end(operands) - 1})
        for (const Operand& other : operands)
            require(&other == written || !overlap(written->span, other.span), std::min(written, &other)->name,
                    " and ", std::max(written, &other)->name, " overlap in memory");
}

// Of a residual or gate, if it is given.
void check_other(const Matrix& other, const Problem& problem, const char* name) {
    if (other.data == nullptr) return;
    require(problem.forward(), name, " is given; only dds_nt has a ", name);
    require(other.layout == problem.y.layout, name, ".layout is ", static_cast<int32_t>(other.layout),
            "; it must be y.layout, ", static_cast<int32_t>(problem.y.layout));
}

BiasGradient check_bias_gradient(const ts_matmul_desc& desc, const Problem& problem) {
    const DType dtype =
        check_own_dtype(desc.bias_gradient_dtype, problem.dtype, kActivationDTypes, "bias_gradient_dtype");
    const bool accumulate = check_enum<int32_t>(desc.accumulate_bias, 2, "accumulate_bias") == 1;
    if (desc.bias_gradient == nullptr) {
        require(desc.bias_gradient_dtype == 0 && !accumulate, "bias_gradient is null; without it ",
                accumulate ? "accumulate_bias" : "bias_gradient_dtype", " must be 0");
        return {};
    }
    require(problem.op == Op::sdd_tn, "bias_gradient is given; only sdd_tn has one");
    require(dtype == problem.dtype || (dtype == DType::float32 && element_size(problem.dtype) == 2),
            "bias_gradient_dtype stands for ", to_string(dtype), " and dtype is ", to_string(problem.dtype),
            "; allowed are that of the activations, and float32 for 16 bits");
    return {desc.bias_gradient, dtype, accumulate};
}

// Memory that is made from the values must not be theirs.
void check_apart(const Problem& problem, const void* data, size_t bytes, const char* name) {
    const Span written = span_of(data, bytes, name);
    for (const Operand& read : value_spans(problem))
        require(!overlap(read.span, written), read.name, " and ", name, " overlap in memory");
}

}  // namespace

Pattern check_pattern(const ts_pattern* source) {
    const ts_pattern pattern = read_struct(source, "pattern");
    check_block(pattern.block_rows, "pattern.block_rows");
    check_block(pattern.block_cols, "pattern.block_cols");
    require(pattern.reserved == 0, "pattern.reserved is ", pattern.reserved, "; it must be 0");
    check_features(pattern.out_features, pattern.block_rows, "pattern.out_features", "block_rows");
    check_features(pattern.in_features, pattern.block_cols, "pattern.in_features", "block_cols");
    const int64_t blocks =
        (pattern.out_features / pattern.block_rows) * (pattern.in_features / pattern.block_cols);
    const int64_t most = std::min(blocks, kMaxExtent);
    require(pattern.nnz >= 0 && pattern.nnz <= most, "pattern.nnz is ", pattern.nnz, "; allowed are 0 to ",
            most);
    return {pattern.block_rows,
            pattern.block_cols,
            pattern.out_features,
            pattern.in_features,
            pattern.nnz,
            {pattern.row_ptr, pattern.col_idx, pattern.row_slot},
            {pattern.col_ptr, pattern.row_idx, pattern.col_slot}};
}

Problem check_problem(const ts_matmul_desc& desc, bool operands) {
    Problem problem{};
    problem.op = check_enum<Op>(desc.op, static_cast<int32_t>(kOps.size()), "op");
    problem.dtype = check_enum<DType>(desc.dtype, kActivationDTypes, "dtype");
    problem.device = check_enum<DeviceType>(desc.device, 2, "device");
    problem.result_dtype =
        check_own_dtype(desc.result_dtype, problem.dtype, kActivationDTypes, "result_dtype");
    problem.activation = check_enum<Activation>(desc.activation, 4, "activation");
    problem.precision = check_enum<Precision>(desc.precision, 2, "precision");
    problem.accumulate = check_enum<int32_t>(desc.accumulate, 2, "accumulate") == 1;
    check_enum<int32_t>(desc.policy, 3, "policy");
    require(std::memchr(desc.prefer, 0, sizeof desc.prefer) != nullptr, "prefer has ", sizeof desc.prefer,
            " characters without a zero; the last one must be zero");
    require(desc.reserved == 0, "reserved is ", desc.reserved, "; it must be 0");
    require(desc.tokens >= 0 && desc.tokens <= kMaxExtent, "tokens is ", desc.tokens, "; allowed are 0 to ",
            kMaxExtent);
    problem.tokens = desc.tokens;
    problem.pattern = check_pattern(desc.pattern);
    const int64_t ins = problem.pattern.in_features, outs = problem.pattern.out_features;
    problem.x = check_matrix(desc.x, problem.tokens, ins, "x");
    problem.y = check_matrix(desc.y, problem.tokens, outs, "y");
    problem.values = check_storage(desc, problem);
    problem.packed = desc.packed;
    problem.bias = desc.bias;
    problem.plan = desc.plan;
    const Matrix residual = check_matrix(desc.residual, problem.tokens, outs, "residual");
    const Matrix gate = check_matrix(desc.gate, problem.tokens, outs, "gate");

    const bool forward = problem.forward();
    require(forward || problem.activation == Activation::none, "activation is ", desc.activation,
            "; only dds_nt has an activation");
    require(forward || problem.bias == nullptr, "bias is given; only dds_nt has a bias");
    check_other(residual, problem, "residual");
    check_other(gate, problem, "gate");
    require(residual.data == nullptr || gate.data == nullptr,
            "gate is given beside residual; a product has one of them");
    problem.gated = gate.data != nullptr;
    problem.residual = problem.gated ? gate : residual;
    if (problem.gated) std::swap(problem.activation, problem.gate_activation);
    require(problem.op == Op::sdd_tn || !problem.accumulate, "accumulate is 1; only sdd_tn accumulates");
    problem.bias_gradient = check_bias_gradient(desc, problem);
    if (operands) check_operands(problem, desc);
    return problem;
}

void check_packing(const Problem& problem, const void* packed, size_t bytes) {
    if (problem.device == DeviceType::cuda) check_aligned(problem.plan, kDeviceAlignment, "plan");
    check_apart(problem, packed, bytes, "packed");
}

void check_expansion(const Problem& problem, const void* plain, size_t bytes) {
    const auto needed = static_cast<size_t>(problem.expanded_bytes());
    if (bytes < needed) fail(TS_WORKSPACE_TOO_SMALL, "plain_bytes is ", bytes, "; ", needed, " are needed");
    if (needed > 0) {
        require(plain != nullptr, "plain is null");
        check_alignment(plain, element_size(problem.dtype), "plain", problem.device);
    }
    check_apart(problem, plain, needed, "plain");
}

DeviceType check_device_type(int32_t device) { return check_enum<DeviceType>(device, 2, "device"); }

DType check_value_dtype(int32_t dtype) {
    return check_enum<DType>(dtype, static_cast<int32_t>(kDTypes.size()), "dtype");
}

void check_compression(const Compression& compression) {
    const auto& [pattern, device, dtype, transposed, values, mask, compressed, metadata] = compression;
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
        for (const Operand& from : read)
            require(!overlap(from.span, to.span), from.name, " and ", to.name, " overlap in memory");
    require(!overlap(written[0].span, written[1].span), "compressed and metadata overlap in memory");
}

ActivationGradient check_activation_gradient(int32_t dtype, int32_t activation, int64_t tokens,
                                             int64_t features) {
    ActivationGradient gradient{};
    gradient.dtype = check_enum<DType>(dtype, kActivationDTypes, "dtype");
    if (gradient.dtype == DType::float64)
        fail(TS_UNSUPPORTED, "dtype is 0; no kernel computes it in float64");
    require(activation >= TS_RELU && activation <= TS_SILU, "activation is ", activation,
            "; allowed are 1 to 3");
    gradient.activation = static_cast<Activation>(activation);
    require(tokens >= 0 && tokens <= kMaxExtent, "tokens is ", tokens, "; allowed are 0 to ", kMaxExtent);
    check_features(features, 16, "features", "16");
    gradient.tokens = tokens;
    gradient.features = features;
    return gradient;
}

void check_operands(const ActivationGradient& gradient) {
    const int64_t bytes = gradient.tokens * gradient.features * element_size(gradient.dtype);
    const auto span = [&](const char* name, const void* data) -> Operand {
        return {name, array_span(data, bytes, 1, name, DeviceType::cuda)};
    };
    require(gradient.features == 0 || gradient.bias_gradient != nullptr, "bias_gradient is null");
    const Operand result = span("result", gradient.result);
    const Operand of_bias{"bias_gradient", vector_span(gradient.bias_gradient, gradient.features,
                                                       gradient.dtype, "bias_gradient")};
    const Operand z = span("z", gradient.z), given = span("gradient", gradient.gradient);
    const bool in_place = given.span.begin == result.span.begin;
    for (const auto& [one, other] :
         {std::pair{&z, &result}, {&given, &result}, {&z, &of_bias}, {&given, &of_bias}, {&result, &of_bias}})
        require((one == &given && other == &result && in_place) || !overlap(one->span, other->span),
                one->name, " and ", other->name, " overlap in memory");
}

Matrix check_gate_matrix(const Gate& gate, const ts_matrix* source, const char* name) {
    check_pointer(source, name);
    const Matrix matrix = check_matrix(*source, gate.tokens, gate.features, name);
    require(matrix.layout == Layout::row_major, name, ".layout is ", source->layout, "; it must be ",
            TS_ROW_MAJOR);
    return matrix;
}

Gate check_gate(int32_t dtype, int32_t activation, int64_t tokens, int64_t features, const ts_matrix* source,
                const ts_matrix* factor) {
    Gate gate{};
    gate.dtype = check_enum<DType>(dtype, kActivationDTypes, "dtype");
    if (gate.dtype == DType::float64) fail(TS_UNSUPPORTED, "dtype is 0; no kernel computes it in float64");
    gate.activation = check_enum<Activation>(activation, TS_SILU + 1, "activation");
    require(tokens >= 0 && tokens <= kMaxExtent, "tokens is ", tokens, "; allowed are 0 to ", kMaxExtent);
    check_features(features, 16, "features", "16");
    gate.tokens = tokens;
    gate.features = features;
    gate.gate = check_gate_matrix(gate, source, "gate");
    gate.factor = check_gate_matrix(gate, factor, "factor");
    return gate;
}

void check_operands(const Gate& gate, bool gradients) {
    const auto span = [&](const char* name, const Matrix& matrix) -> Operand {
        return {name, check_operand(matrix, gate.tokens, gate.features, gate.dtype, name, DeviceType::cuda)};
    };
    const Operand of_gate = span("gate", gate.gate), of_factor = span("factor", gate.factor);
    const Operand result = span(gradients ? "gradient" : "result", gate.result);
    const auto check_apart = [](const Operand& one, const Operand& other) {
        require(!overlap(one.span, other.span), one.name, " and ", other.name, " overlap in memory");
    };
    if (!gradients) return check_apart(of_gate, result), check_apart(of_factor, result);
    const Operand written[] = {span("gate_gradient", gate.of_gate), span("factor_gradient", gate.of_factor)};
    for (const Operand& to : written)
        for (const Operand* const from : {&of_gate, &of_factor, &result}) check_apart(*from, to);
    check_apart(written[0], written[1]);
}

NamedDevice check_device(const ts_device_info& info) {
    constexpr int32_t kMaxProcessors = 1 << 16, kMaxSharedBytes = 1 << 24;
    const auto type = check_enum<DeviceType>(info.device, 2, "device.device");
    const bool is_cuda = type == DeviceType::cuda;
    const auto check = [](int32_t value, int32_t least, int32_t most, const char* name) {
        require(value >= least && value <= most, "device.", name, " is ", value, "; allowed are ", least,
                " to ", most);
        return value;
    };
    check(info.reserved, 0, 0, "reserved");
    const Device properties{
        type, check(info.compute_capability, is_cuda ? 10 : 0, is_cuda ? 999 : 0, "compute_capability"),
        check(info.multiprocessors, 1, kMaxProcessors, "multiprocessors"),
        check(info.shared_memory, 0, is_cuda ? kMaxSharedBytes : 0, "shared_memory")};
    return {properties, std::string(info.name, strnlen(info.name, sizeof info.name))};
}

const char* to_string(Op op) { return kOps[static_cast<size_t>(op)]; }
const char* to_string(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

}  // namespace ts
