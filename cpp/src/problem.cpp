#include "problem.h"

#include <algorithm>
#include <array>
#include <limits>

#include "error.h"

namespace ts {
namespace {

constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();

constexpr std::array<const char*, 3> kOps{"dds_nt", "dds_nn", "sdd_tn"};
constexpr std::array<const char*, 4> kDTypes{"float64", "float32", "float16", "bfloat16"};

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

// Bytes [begin, end) a matrix spans, and how it lies in them.
struct Span {
    uintptr_t begin;
    uintptr_t end;
    int64_t pitch;   // bytes from one line to the next
    int64_t length;  // bytes used of each line
};

Span span_of(const Matrix& matrix, int64_t tokens, int64_t features, int size) {
    const bool row_major = matrix.layout == Layout::row_major;
    const int64_t lines = row_major ? tokens : features;
    const int64_t length = (row_major ? features : tokens) * size;
    const int64_t pitch = matrix.ld * size;
    const auto begin = reinterpret_cast<uintptr_t>(matrix.data);
    const int64_t bytes = lines == 0 || length == 0 ? 0 : (lines - 1) * pitch + length;
    return {begin, begin + bytes, pitch, length};
}

Span span_of(const void* data, int64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    return {begin, begin + bytes, std::max<int64_t>(bytes, 1), bytes};
}

bool overlap(const Span& a, const Span& b) {
    if (a.begin >= b.end || b.begin >= a.end) return false;
    if (a.pitch != b.pitch) return true;
    // Column slices of one buffer interleave without sharing an element.
    const Span& low = a.begin <= b.begin ? a : b;
    const Span& high = a.begin <= b.begin ? b : a;
    const int64_t offset = static_cast<int64_t>(high.begin - low.begin) % low.pitch;
    return offset < low.length || offset + high.length > low.pitch;
}

Matrix check_matrix(const ts_matrix& source, const char* name) {
    require(source.reserved == 0, name, ".reserved is ", source.reserved, "; it must be 0");
    return {source.data, source.ld, check_enum<Layout>(source.layout, 2, name, ".layout")};
}

void check_alignment(const void* data, const char* name, const Problem& problem) {
    const int size = problem.device == DeviceType::cuda ? 16 : element_size(problem.dtype);
    require(reinterpret_cast<uintptr_t>(data) % size == 0, name, " is at address ", data, ", not aligned to ",
            size, " bytes");
}

void check_matrix_operand(const Matrix& matrix, int64_t features, const char* name, const Problem& problem) {
    if (problem.tokens == 0 || features == 0) return;
    require(matrix.data != nullptr, name, ".data is null");
    check_alignment(matrix.data, name, problem);
    const int64_t line = matrix.layout == Layout::row_major ? features : problem.tokens;
    require(matrix.ld >= line, name, ".ld is ", matrix.ld, ", less than the ", line, " elements of a line");
    require(matrix.ld <= kMaxExtent, name, ".ld is ", matrix.ld, "; at most ", kMaxExtent, " is allowed");
    const int size = element_size(problem.dtype);
    require(problem.device == DeviceType::cpu || matrix.ld * size % 16 == 0, name, ".ld is ", matrix.ld,
            " elements of ", size, " bytes, not a multiple of 16 bytes");
}

void check_operands(const Problem& problem) {
    const Pattern& pattern = problem.pattern;
    const int size = element_size(problem.dtype);
    check_matrix_operand(problem.x, pattern.in_features, "x", problem);
    check_matrix_operand(problem.y, pattern.out_features, "y", problem);
    const bool has_residual = problem.residual.data != nullptr;
    if (has_residual) check_matrix_operand(problem.residual, pattern.out_features, "residual", problem);
    if (pattern.nnz > 0) {
        require(problem.values.data != nullptr, "values is null");
        check_alignment(problem.values.data, "values", problem);
    }
    const Span x = span_of(problem.x, problem.tokens, pattern.in_features, size);
    const Span y = span_of(problem.y, problem.tokens, pattern.out_features, size);
    const Span values = span_of(problem.values.data, pattern.value_count() * size);
    const Span bias = span_of(problem.bias, problem.bias ? pattern.out_features * size : 0);
    const Span residual =
        span_of(problem.residual, has_residual ? problem.tokens : 0, pattern.out_features, size);
    // Only pairs in which one side is written.
    const bool writes_x = problem.op == Op::dds_nn, writes_y = problem.op == Op::dds_nt,
               writes_values = problem.op == Op::sdd_tn;
    require(!((writes_x || writes_y) && overlap(x, y)), "x and y overlap in memory");
    require(!((writes_x || writes_values) && overlap(x, values)), "x and values overlap in memory");
    require(!((writes_y || writes_values) && overlap(y, values)), "y and values overlap in memory");
    require(!(writes_y && overlap(y, bias)), "y and bias overlap in memory");
    require(!(writes_y && overlap(y, residual)), "y and residual overlap in memory");
}

}  // namespace

template <class T>
T read_struct(const T* source, const char* name) {
    require(source != nullptr, name, " is null");
    require(source->struct_size == sizeof(T), name, ".struct_size is ", source->struct_size,
            "; this library (ABI ", TS_ABI_VERSION, ") expects ", sizeof(T));
    return *source;
}
template ts_pattern read_struct(const ts_pattern*, const char*);
template ts_matmul_desc read_struct(const ts_matmul_desc*, const char*);
template ts_device_info read_struct(const ts_device_info*, const char*);
template ts_kernel_info read_struct(const ts_kernel_info*, const char*);

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
    problem.dtype = check_enum<DType>(desc.dtype, static_cast<int32_t>(kDTypes.size()), "dtype");
    problem.device = check_enum<DeviceType>(desc.device, 2, "device");
    problem.result_dtype = problem.dtype;
    problem.activation = check_enum<Activation>(desc.activation, 4, "activation");
    problem.precision = check_enum<Precision>(desc.precision, 2, "precision");
    problem.accumulate = check_enum<int32_t>(desc.accumulate, 2, "accumulate") == 1;
    require(desc.reserved == 0, "reserved is ", desc.reserved, "; it must be 0");
    require(desc.tokens >= 0 && desc.tokens <= kMaxExtent, "tokens is ", desc.tokens, "; allowed are 0 to ",
            kMaxExtent);
    problem.tokens = desc.tokens;
    problem.pattern = check_pattern(desc.pattern);
    problem.x = check_matrix(desc.x, "x");
    problem.y = check_matrix(desc.y, "y");
    problem.values = {desc.values, desc.values_aux, problem.dtype,
                      check_enum<Storage>(desc.storage, 1, "storage")};
    problem.packed = desc.packed;
    problem.bias = desc.bias;
    problem.plan = desc.plan;
    problem.residual = check_matrix(desc.residual, "residual");

    const bool forward = problem.forward();
    require(forward || problem.activation == Activation::none, "activation is ", desc.activation,
            "; only dds_nt has an activation");
    require(forward || problem.bias == nullptr, "bias is given; only dds_nt has a bias");
    const bool has_residual = problem.residual.data != nullptr;
    require(forward || !has_residual, "residual is given; only dds_nt has a residual");
    require(!has_residual || problem.residual.layout == problem.y.layout, "residual.layout is ",
            desc.residual.layout, "; it must be y.layout, ", desc.y.layout);
    require(problem.op == Op::sdd_tn || !problem.accumulate, "accumulate is 1; only sdd_tn accumulates");
    if (operands) check_operands(problem);
    return problem;
}

const char* to_string(Op op) { return kOps[static_cast<size_t>(op)]; }
const char* to_string(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

}  // namespace ts
