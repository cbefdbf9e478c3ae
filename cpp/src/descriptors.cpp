#include "descriptors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "abi.h"
#include "checks.h"
#include "common/machine.h"
#include "error.h"
#include "neurons.h"

namespace ts {
namespace {

constexpr std::array<const char*, 3> kOps{"dds_nt", "dds_nn", "sdd_tn"};
constexpr std::array<const char*, 7> kDTypes{"float64", "float32",       "float16", "bfloat16",
                                             "int8",    "float8_e4m3fn", "int4"};
constexpr int32_t kElementDTypes = 6;  // whose elements are bytes or more
constexpr int32_t kLeastBlock = 2, kMostBlock = 128;
constexpr int64_t kMostExactFeatures = 1 << 17;  // below which products of int8 add up to less than 2^31

int64_t ceil_div(int64_t size, int64_t block) { return (size + block - 1) / block; }

void check_block(int32_t extent, const char* name) {
    require(extent >= kLeastBlock && extent <= kMostBlock, name, " must be ", kLeastBlock, " to ", kMostBlock,
            ", got ", extent);
}

// The dtype of an operand, which by default is another one's.
DType check_own_dtype(const ts_operand& operand, DType other, int32_t count, const char* name) {
    if (operand.dtype == TS_DTYPE_DEFAULT) return other;
    require(operand.dtype > 0 && operand.dtype <= count, name, ".dtype must be 0 to ", count, ", got ",
            operand.dtype);
    return static_cast<DType>(operand.dtype - 1);
}

// The dtype of the operand that the product reads, which only dds_nt does in 8 bits.
DType check_input_dtype(const ts_matmul_desc& desc, Op op) {
    if (op == Op::dds_nn) return check_dtype(desc.y.dtype, kActivationDTypes, "y", ".dtype");
    const auto count = op == Op::dds_nt ? kElementDTypes : kActivationDTypes;
    return check_dtype(desc.x.dtype, count, "x", ".dtype");
}

// The dtype of what is written.
DType check_result_dtype(const ts_matmul_desc& desc, Op op, DType input) {
    if (op == Op::dds_nn) return check_own_dtype(desc.x, input, kActivationDTypes, "x");
    if (op == Op::sdd_tn) return check_own_dtype(desc.values, input, kActivationDTypes, "values");
    if (!is_quantized(input)) return check_own_dtype(desc.y, input, kActivationDTypes, "y");
    require(desc.y.dtype >= TS_FLOAT32 && desc.y.dtype <= TS_BFLOAT16, "y.dtype must be ", TS_FLOAT32, " to ",
            TS_BFLOAT16, " for x of ", to_string(input), ", got ", desc.y.dtype);
    return check_own_dtype(desc.y, input, kActivationDTypes, "y");
}

// An operand whose dtype must be another one's.
void check_same_dtype(const ts_operand& operand, DType expected, const char* name, const char* other) {
    const DType dtype = check_own_dtype(operand, expected, kActivationDTypes, name);
    require(dtype == expected, name, ".dtype must be that of ", other, ", ", to_string(expected), ", got ",
            to_string(dtype));
}

// Fields that only some operands have, see the table of ts_matmul_desc.
struct Fields {
    bool matrix = false, stored = false, scaled = false;
};

void check_fields(const ts_operand& operand, const char* name, Fields has) {
    const auto refuse = [&](bool given, const char* field, auto value) {
        require(!given, name, field, " must be 0, got ", value);
    };
    if (!has.matrix) {
        refuse(operand.ld != 0, ".ld", operand.ld);
        refuse(operand.layout != 0, ".layout", operand.layout);
    }
    if (!has.stored) {
        refuse(operand.storage != 0, ".storage", operand.storage);
        require(operand.metadata == nullptr, name, ".metadata must be null");
    }
    if (!has.scaled) {
        refuse(operand.granularity != TS_SCALES_NONE, ".granularity", operand.granularity);
        require(operand.scales == nullptr, name, ".scales must be null");
    }
    if (operand.granularity != TS_SCALES_PER_GROUP)
        refuse(operand.scales_ld != 0, ".scales_ld", operand.scales_ld);
}

// Operands of 8 and 4 bits have scales, others have none.
void check_granularity(const ts_operand& operand, DType dtype, int32_t least, int32_t most, const char* name,
                       const char* where) {
    if (!is_quantized(dtype)) {
        require(operand.granularity == TS_SCALES_NONE, name, ".granularity must be 0 for ", name, " of ",
                to_string(dtype), ", got ", operand.granularity);
        return require(operand.scales == nullptr, name, ".scales must be null for ", name, " of ",
                       to_string(dtype));
    }
    if (least == most)
        return require(operand.granularity == least, name, ".granularity must be ", least, " for ", name,
                       " of ", to_string(dtype), where, ", got ", operand.granularity);
    require(operand.granularity >= least && operand.granularity <= most, name, ".granularity must be ", least,
            " or ", most, " for ", name, " of ", to_string(dtype), where, ", got ", operand.granularity);
}

ScalesPer scales_per(int32_t granularity) {
    return granularity == TS_SCALES_NONE ? ScalesPer::block : static_cast<ScalesPer>(granularity - 1);
}

Values check_values(const ts_matmul_desc& desc, const Problem& problem) {
    const ts_operand& values = desc.values;
    check_fields(values, "values", {.stored = true, .scaled = true});
    const auto storage = check_enum<Storage>(values.storage, 2, "values.storage");
    const bool compressed = storage == Storage::two_of_four;
    const DType dtype =
        check_own_dtype(values, problem.input_dtype, static_cast<int32_t>(kDTypes.size()), "values");
    if (problem.op == Op::sdd_tn) {
        require(!compressed, "values.storage must be 0 for sdd_tn, which writes dense blocks, got ",
                values.storage);
    } else if (is_quantized(problem.input_dtype)) {
        require(dtype == problem.input_dtype, "values.dtype must be that of x, ",
                to_string(problem.input_dtype), ", got ", to_string(dtype));
        require(!compressed || !problem.scales_inside(),
                "values.storage must be 0 where x.granularity is TS_SCALES_PER_GROUP, got ", values.storage);
    } else {
        require(dtype == problem.input_dtype || is_quantized(dtype),
                "values.dtype must be that of the activations, ", to_string(problem.input_dtype),
                ", or int8, float8_e4m3fn or int4, got ", to_string(dtype));
    }
    if (compressed) {
        check_compressed(problem.pattern.block_cols, "pattern.block_cols");
        require(dtype != DType::int4, "values.storage must be 0 for values of int4, got ", values.storage);
    } else {
        require(values.metadata == nullptr,
                "values.metadata must be null unless values.storage is TS_STORAGE_2_4");
    }
    if (compressed || is_quantized(dtype))
        check_regular(problem.pattern, compressed ? "values in 2:4" : "values in 8 or 4 bits");
    if (problem.scales_inside())
        check_granularity(values, dtype, TS_SCALES_PER_BLOCK, TS_SCALES_PER_BLOCK, "values",
                          " where x.granularity is TS_SCALES_PER_GROUP");
    else if (is_quantized(problem.input_dtype))
        check_granularity(values, dtype, TS_SCALES_PER_FEATURE, TS_SCALES_PER_FEATURE, "values",
                          " where x has 8 bits");
    else
        check_granularity(values, dtype, TS_SCALES_PER_BLOCK, TS_SCALES_PER_ROW, "values",
                          " unless x has 8 bits");
    return {values.data,   static_cast<const uint32_t*>(values.metadata),
            values.scales, scales_per(values.granularity),
            dtype,         storage};
}

// Scales inside of the sums.
void check_inner_scales(const ts_operand& x, const Problem& problem) {
    const Pattern& pattern = problem.pattern;
    require(problem.input_dtype == DType::float8_e4m3fn, "x.granularity must be ", TS_SCALES_PER_TOKEN,
            " for x of ", to_string(problem.input_dtype), ", got ", x.granularity);
    require(pattern.block_rows == kScaleGroup && pattern.block_cols == kScaleGroup, "x.granularity must be ",
            TS_SCALES_PER_TOKEN, " unless blocks are 128 x 128, got ", x.granularity, " for blocks of ",
            pattern.block_rows, " x ", pattern.block_cols);
    check_scales_ld(x.scales_ld, problem.tokens, "x.scales_ld");
    require(problem.device == DeviceType::cpu || x.scales_ld % 4 == 0,
            "x.scales_ld must be a multiple of 16 bytes, got ", x.scales_ld, " elements of 4 bytes");
}

// Scales of x, and the rest of a product whose x has 8 bits.
void check_scaled_input(const ts_operand& x, const Problem& problem) {
    check_granularity(x, problem.input_dtype, TS_SCALES_PER_TOKEN, TS_SCALES_PER_GROUP, "x", "");
    if (x.granularity == TS_SCALES_PER_GROUP) check_inner_scales(x, problem);
    if (!is_quantized(problem.input_dtype)) return;
    require(problem.x.layout == Layout::row_major, "x.layout must be ", TS_ROW_MAJOR, " for x of ",
            to_string(problem.input_dtype), ", got ", x.layout);
    require(problem.input_dtype != DType::int8 || problem.pattern.in_features < kMostExactFeatures,
            "pattern.in_features must be below ", kMostExactFeatures, " for x of int8, got ",
            problem.pattern.in_features);
}

// A residual or gate.
Matrix check_other(const ts_operand& operand, const Problem& problem, const char* name) {
    check_fields(operand, name, {.matrix = true});
    const Matrix other = check_matrix(operand, problem.tokens, problem.pattern.group_out_features(), name);
    if (other.data == nullptr) return other;
    require(problem.forward(), name, ".data must be null unless op is dds_nt");
    check_same_dtype(operand, problem.result_dtype, name, "y");
    require(other.layout == problem.y.layout, name, ".layout must be y.layout, ",
            static_cast<int32_t>(problem.y.layout), ", got ", static_cast<int32_t>(other.layout));
    return other;
}

// 0 stands for 1, a single weight.
int32_t check_group_count(const ts_pattern& pattern) {
    require(pattern.groups >= 0 && pattern.groups <= kMaxGroups, "pattern.groups must be 0 to ", kMaxGroups,
            ", got ", pattern.groups);
    const int32_t groups = std::max(pattern.groups, 1);
    require(groups == 1 || pattern.out_features % (int64_t{pattern.block_rows} * groups) == 0,
            "pattern.out_features must be the same number of block rows for each of pattern.groups, ", groups,
            ", got ", pattern.out_features, " in blocks of ", pattern.block_rows);
    require(ceil_div(pattern.in_features, pattern.block_cols) <= kMaxExtent / groups,
            "pattern.in_features must be at most ", kMaxExtent, " columns of blocks in all of ", groups,
            " groups, got ", pattern.in_features, " in blocks of ", pattern.block_cols);
    return groups;
}

// Checks that are specific to grouped products.
void check_grouped(const ts_matmul_desc& desc, const Problem& problem) {
    const int32_t groups = problem.pattern.groups;
    if (problem.grouped()) check_regular(problem.pattern, "a grouped product");
    if (!problem.grouped())
        return require(groups == 1, "group_offsets must not be null for a pattern of ", groups, " groups");
    const auto refuse = [](bool given, const auto&... words) {
        require(!given, words..., " for a grouped product");
    };
    refuse(problem.scales_inside(), "x.granularity must be ", TS_SCALES_PER_TOKEN);
    refuse(problem.x.layout != Layout::row_major, "x.layout must be ", TS_ROW_MAJOR);
    refuse(problem.y.layout != Layout::row_major, "y.layout must be ", TS_ROW_MAJOR);
    refuse(desc.prepacked.data != nullptr, "prepacked.data must be null");
    refuse(problem.bias_gradient.data != nullptr,
           "bias.data must be null, whose gradient ts_group_sums computes,");
    refuse(desc.policy == TS_POLICY_DENSE, "policy must be ", TS_POLICY_SPARSE, " or ", TS_POLICY_AUTO);
}

// The bias, or what receives its gradient.
void check_bias(const ts_operand& bias, int32_t accumulate, Problem& problem) {
    check_fields(bias, "bias", {});
    const bool accumulates = (accumulate & TS_ACCUMULATE_BIAS) != 0;
    require(!accumulates || bias.data != nullptr,
            "accumulate must not have TS_ACCUMULATE_BIAS where bias.data is null, got ", accumulate);
    if (bias.data == nullptr) return;
    require(problem.op != Op::dds_nn, "bias.data must be null where op is dds_nn");
    if (problem.forward()) {
        check_same_dtype(bias, problem.result_dtype, "bias", "y");
        problem.bias = bias.data;
        return;
    }
    check_regular(problem.pattern, "the gradient of a bias");
    const DType input = problem.input_dtype, dtype = check_own_dtype(bias, input, kActivationDTypes, "bias");
    const bool widens = element_size(input) == 2;
    require(dtype == input || (dtype == DType::float32 && widens), "bias.dtype must be that of x, ",
            to_string(input), widens ? ", or float32" : "", ", got ", to_string(dtype));
    problem.bias_gradient = {bias.data, dtype, accumulates};
}

}  // namespace

void check_compressed(int32_t side, const char* name) {
    require(side % 32 == 0, name, " must be 32, 64 or 128 for TS_STORAGE_2_4, got ", side);
}

void check_regular(const Pattern& pattern, const char* what) {
    require(pattern.is_regular(),
            "pattern must have blocks with sides of 16, 32, 64 or 128 that divide it for ", what, ", got ",
            pattern.out_features, " x ", pattern.in_features, " in blocks of ", pattern.block_rows, " x ",
            pattern.block_cols);
}

Pattern check_pattern(const ts_pattern* source) {
    const ts_pattern pattern = read_struct(source, "pattern");
    check_block(pattern.block_rows, "pattern.block_rows");
    check_block(pattern.block_cols, "pattern.block_cols");
    check_extent(pattern.out_features, "pattern.out_features", DeviceType::cpu);
    check_extent(pattern.in_features, "pattern.in_features", DeviceType::cpu);
    const int64_t blocks = ceil_div(pattern.out_features, pattern.block_rows) *
                           ceil_div(pattern.in_features, pattern.block_cols);
    const int64_t most = std::min(blocks, kMaxExtent);
    require(pattern.nnz >= 0 && pattern.nnz <= most, "pattern.nnz must be 0 to ", most, ", got ",
            pattern.nnz);
    return {pattern.block_rows,
            pattern.block_cols,
            pattern.out_features,
            pattern.in_features,
            pattern.nnz,
            {pattern.row_ptr, pattern.col_idx, pattern.row_slot},
            {pattern.col_ptr, pattern.row_idx, pattern.col_slot},
            check_group_count(pattern)};
}

Problem check_problem(const ts_matmul_desc& desc) {
    Problem problem{};
    problem.op = check_enum<Op>(desc.op, static_cast<int32_t>(kOps.size()), "op");
    problem.input_dtype = check_input_dtype(desc, problem.op);
    problem.result_dtype = check_result_dtype(desc, problem.op, problem.input_dtype);
    if (problem.op == Op::sdd_tn) check_same_dtype(desc.y, problem.input_dtype, "y", "x");
    problem.device = check_enum<DeviceType>(desc.device, 2, "device");
    problem.activation = check_enum<Activation>(desc.activation, 4, "activation");
    problem.precision = check_enum<Precision>(desc.precision, 2, "precision");
    check_enum<int32_t>(desc.accumulate, 4, "accumulate");
    problem.accumulate = (desc.accumulate & TS_ACCUMULATE_VALUES) != 0;
    check_enum<int32_t>(desc.policy, 3, "policy");
    require(std::memchr(desc.prefer, 0, sizeof desc.prefer) != nullptr, "prefer must end in a zero within ",
            sizeof desc.prefer, " characters");
    check_extent(desc.tokens, "tokens", problem.device);
    problem.tokens = desc.tokens;
    problem.pattern = check_pattern(desc.pattern);
    check_extent(problem.pattern.out_features, "pattern.out_features", problem.device);
    check_extent(problem.pattern.in_features, "pattern.in_features", problem.device);
    check_fields(desc.x, "x", {.matrix = true, .scaled = true});
    check_fields(desc.y, "y", {.matrix = true});
    problem.x = check_matrix(desc.x, problem.tokens, problem.pattern.in_features, "x");
    problem.y = check_matrix(desc.y, problem.tokens, problem.pattern.group_out_features(), "y");
    check_scaled_input(desc.x, problem);
    problem.x_scales = desc.x.scales;
    problem.x_scales_ld = desc.x.scales_ld;
    problem.values = check_values(desc, problem);
    problem.offsets = desc.group_offsets;
    problem.prepacked = desc.prepacked.data;
    problem.plan = desc.plan.data;

    require(problem.forward() || problem.activation == Activation::none,
            "activation must be 0 unless op is dds_nt, got ", desc.activation);
    require(problem.op == Op::sdd_tn || desc.accumulate == 0,
            "accumulate must be 0 unless op is sdd_tn, got ", desc.accumulate);
    check_bias(desc.bias, desc.accumulate, problem);
    const Matrix residual = check_other(desc.residual, problem, "residual");
    const Matrix gate = check_other(desc.gate, problem, "gate");
    require(residual.data == nullptr || gate.data == nullptr,
            "gate.data must be null where a residual is given");
    problem.gated = gate.data != nullptr;
    problem.residual = problem.gated ? gate : residual;
    if (problem.gated) std::swap(problem.activation, problem.gate_activation);
    check_grouped(desc, problem);
    check_skip(desc, problem);
    return problem;
}

DeviceType check_device_type(int32_t device) { return check_enum<DeviceType>(device, 2, "device"); }

DType check_value_dtype(int32_t dtype) { return check_dtype(dtype, kElementDTypes, "dtype"); }

NamedDevice check_device(const ts_device_info& info) {
    constexpr int32_t kMaxProcessors = 1 << 16, kMaxSharedBytes = 1 << 24, kMaxCluster = 16;
    const auto type = check_enum<DeviceType>(info.device, 2, "device.device");
    const bool is_cuda = type == DeviceType::cuda;
    const auto check = [](int32_t value, int32_t least, int32_t most, const char* name) {
        require(value >= least && value <= most, "device.", name, " must be ", least, " to ", most, ", got ",
                value);
        return value;
    };
    Device properties{
        type, check(info.compute_capability, is_cuda ? 10 : 0, is_cuda ? 999 : 0, "compute_capability"),
        check(info.multiprocessors, 1, kMaxProcessors, "multiprocessors"),
        check(info.shared_memory, 0, is_cuda ? kMaxSharedBytes : 0, "shared_memory"),
        check(info.max_cluster, 0, is_cuda ? kMaxCluster : 0, "max_cluster")};
    const std::string name(info.name, strnlen(info.name, sizeof info.name));
    properties.gpu = find_gpu(name, properties.compute_capability);
    return {properties, name};
}

const char* to_string(Op op) { return kOps[static_cast<size_t>(op)]; }
const char* to_string(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

}  // namespace ts
