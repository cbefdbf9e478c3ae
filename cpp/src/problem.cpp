#include "problem.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "abi.h"
#include "checks.h"
#include "common/machine.h"
#include "error.h"

namespace ts {
namespace {

constexpr std::array<const char*, 3> kOps{"dds_nt", "dds_nn", "sdd_tn"};
constexpr std::array<const char*, 7> kDTypes{"float64", "float32",       "float16", "bfloat16",
                                             "int8",    "float8_e4m3fn", "int4"};
constexpr int32_t kElementDTypes = 6;            // whose elements are bytes or more
constexpr int64_t kMostExactFeatures = 1 << 17;  // below which products of int8 add up to less than 2^31

void check_block(int32_t extent, const char* name) {
    require(extent == 16 || extent == 32 || extent == 64 || extent == 128, name,
            " must be 16, 32, 64 or 128, got ", extent);
}

// 0: the dtype of the activations; d + 1: the dtype d.
DType check_own_dtype(int32_t value, DType activations, int32_t count, const char* name) {
    const auto own = check_enum<int32_t>(value, count + 1, name);
    return own == 0 ? activations : static_cast<DType>(own - 1);
}

// Values that are multiplied with x in 8 bits.
void check_like_input(Storage storage, DType dtype, ScalesPer scales_per, const Problem& problem) {
    const char* const input = to_string(problem.input_dtype);
    const auto per = problem.scales_inside() ? ScalesPer::block : ScalesPer::feature;
    require(dtype == problem.input_dtype, "values_dtype must be that of x, ", input, ", got ",
            to_string(dtype));
    require(storage == Storage::dense || !problem.scales_inside(), "storage must be 0 for x of ", input,
            " with scales inside of the sums, got ", static_cast<int32_t>(storage));
    require(scales_per == per, "row_scales must be ", static_cast<int32_t>(per), " for x of ", input,
            problem.scales_inside() ? " with scales inside of the sums" : "", ", got ",
            static_cast<int32_t>(scales_per));
}

Values check_storage(const ts_matmul_desc& desc, const Problem& problem) {
    const auto storage = check_enum<Storage>(desc.storage, 2, "storage");
    const DType dtype = check_own_dtype(desc.values_dtype, problem.input_dtype,
                                        static_cast<int32_t>(kDTypes.size()), "values_dtype");
    const auto scales_per = check_enum<ScalesPer>(desc.row_scales, 3, "row_scales");
    if (storage == Storage::two_of_four) {
        check_compressed(problem.pattern.block_cols, "pattern.block_cols");
        require(dtype != DType::int4, "storage must be 0 for values of int4, got ", desc.storage);
    } else {
        require(desc.metadata == nullptr, "metadata must be null unless storage is TS_STORAGE_2_4");
    }
    if (!is_quantized(dtype)) {
        require(desc.scales == nullptr, "scales must be null for values of ", to_string(dtype));
        require(scales_per == ScalesPer::block, "row_scales must be 0 for values of ", to_string(dtype));
    }
    if (is_quantized(problem.input_dtype))
        check_like_input(storage, dtype, scales_per, problem);
    else
        require(scales_per != ScalesPer::feature, "row_scales must be 0 or 1 unless x has 8 bits, got 2");
    if (problem.op == Op::sdd_tn) {
        require(storage == Storage::dense, "storage must be 0 for sdd_tn, which writes dense blocks, got ",
                desc.storage);
        require(dtype == problem.result_dtype, "values_dtype must be result_dtype for sdd_tn, ",
                to_string(problem.result_dtype), ", got ", to_string(dtype));
    } else {
        require(dtype == problem.input_dtype || is_quantized(dtype),
                "values_dtype must be that of the activations, ", to_string(problem.input_dtype),
                ", or int8, float8_e4m3fn or int4, got ", to_string(dtype));
    }
    return {desc.values, static_cast<const uint32_t*>(desc.metadata), desc.scales, scales_per, dtype,
            storage};
}

// The dtype of the activations, which dds_nt alone reads in 8 bits.
DType check_input_dtype(const ts_matmul_desc& desc, Op op) {
    const auto count = op == Op::dds_nt ? kElementDTypes : kActivationDTypes;
    return check_enum<DType>(desc.dtype, count, "dtype");
}

// What holds where scales are inside of the sums.
void check_inner_scales(const ts_matmul_desc& desc, const Problem& problem) {
    const Pattern& pattern = problem.pattern;
    require(problem.input_dtype == DType::float8_e4m3fn, "x_scales_ld must be 0 for x of ",
            to_string(problem.input_dtype), ", got ", desc.x_scales_ld);
    require(pattern.block_rows == kScaleGroup && pattern.block_cols == kScaleGroup,
            "x_scales_ld must be 0 unless blocks are 128 x 128, got ", desc.x_scales_ld, " for blocks of ",
            pattern.block_rows, " x ", pattern.block_cols);
    check_scales_ld(desc.x_scales_ld, problem.tokens, "x_scales_ld");
    require(problem.device == DeviceType::cpu || desc.x_scales_ld % 4 == 0,
            "x_scales_ld must be a multiple of 16 bytes, got ", desc.x_scales_ld, " elements of 4 bytes");
}

// What holds of the rest where x has 8 bits, and of its scales where it has not.
void check_quantized_input(const ts_matmul_desc& desc, const Problem& problem) {
    if (desc.x_scales_ld != 0) check_inner_scales(desc, problem);
    if (!is_quantized(problem.input_dtype))
        return require(desc.x_scales == nullptr, "x_scales must be null for x of ",
                       to_string(problem.input_dtype));
    require(desc.result_dtype > 1 && desc.result_dtype <= kActivationDTypes, "result_dtype must be ",
            TS_FLOAT32 + 1, " to ", TS_BFLOAT16 + 1, " for x of ", to_string(problem.input_dtype), ", got ",
            desc.result_dtype);
    require(problem.x.layout == Layout::row_major, "x.layout must be ", TS_ROW_MAJOR, " for x of ",
            to_string(problem.input_dtype), ", got ", desc.x.layout);
    require(problem.input_dtype != DType::int8 || problem.pattern.in_features < kMostExactFeatures,
            "pattern.in_features must be below ", kMostExactFeatures, " for x of int8, got ",
            problem.pattern.in_features);
}

// Checks a residual or gate, if it is given.
void check_other(const Matrix& other, const Problem& problem, const char* name) {
    if (other.data == nullptr) return;
    require(problem.forward(), name, " must be null unless op is dds_nt");
    require(other.layout == problem.y.layout, name, ".layout must be y.layout, ",
            static_cast<int32_t>(problem.y.layout), ", got ", static_cast<int32_t>(other.layout));
}

// 0 stands for 1, a single weight.
int32_t check_group_count(const ts_pattern& pattern) {
    require(pattern.groups >= 0 && pattern.groups <= kMaxGroups, "pattern.groups must be 0 to ", kMaxGroups,
            ", got ", pattern.groups);
    const auto groups = static_cast<int32_t>(std::max<int64_t>(pattern.groups, 1));
    require(pattern.out_features / pattern.block_rows % groups == 0,
            "pattern.out_features must be the same number of block rows for each of pattern.groups, ", groups,
            ", got ", pattern.out_features, " in blocks of ", pattern.block_rows);
    require(pattern.in_features / pattern.block_cols <= kMaxExtent / groups,
            "pattern.in_features must be at most ", kMaxExtent, " columns of blocks in all of ", groups,
            " groups, got ", pattern.in_features, " in blocks of ", pattern.block_cols);
    return groups;
}

// What holds of grouped products beside what holds of all.
void check_grouped(const ts_matmul_desc& desc, const Problem& problem) {
    const int32_t groups = problem.pattern.groups;
    if (!problem.grouped())
        return require(groups == 1, "group_offsets must not be null for a pattern of ", groups, " groups");
    const auto refuse = [](bool given, const auto&... words) {
        require(!given, words..., " for a grouped product");
    };
    refuse(is_quantized(problem.input_dtype), "dtype must be 0 to ", kActivationDTypes - 1);
    refuse(problem.x.layout != Layout::row_major, "x.layout must be ", TS_ROW_MAJOR);
    refuse(problem.y.layout != Layout::row_major, "y.layout must be ", TS_ROW_MAJOR);
    refuse(desc.packed != nullptr, "packed must be null");
    refuse(desc.bias_gradient != nullptr, "bias_gradient must be null, which ts_group_sums computes,");
    refuse(desc.policy == TS_POLICY_DENSE, "policy must be ", TS_POLICY_SPARSE, " or ", TS_POLICY_AUTO);
}

BiasGradient check_bias_gradient(const ts_matmul_desc& desc, const Problem& problem) {
    const DType dtype = check_own_dtype(desc.bias_gradient_dtype, problem.input_dtype, kActivationDTypes,
                                        "bias_gradient_dtype");
    const bool accumulate = check_enum<int32_t>(desc.accumulate_bias, 2, "accumulate_bias") == 1;
    if (desc.bias_gradient == nullptr) {
        require(desc.bias_gradient_dtype == 0 && !accumulate,
                accumulate ? "accumulate_bias" : "bias_gradient_dtype",
                " must be 0 where bias_gradient is null");
        return {};
    }
    require(problem.op == Op::sdd_tn, "bias_gradient must be null unless op is sdd_tn");
    require(
        dtype == problem.input_dtype || (dtype == DType::float32 && element_size(problem.input_dtype) == 2),
        "bias_gradient_dtype must be that of the activations, ", to_string(problem.input_dtype),
        element_size(problem.input_dtype) == 2 ? ", or float32" : "", ", got ", to_string(dtype));
    return {desc.bias_gradient, dtype, accumulate};
}

}  // namespace

void check_compressed(int32_t side, const char* name) {
    require(side % 32 == 0, name, " must be 32, 64 or 128 for TS_STORAGE_2_4, got ", side);
}

Pattern check_pattern(const ts_pattern* source) {
    const ts_pattern pattern = read_struct(source, "pattern");
    check_block(pattern.block_rows, "pattern.block_rows");
    check_block(pattern.block_cols, "pattern.block_cols");
    require(pattern.reserved == 0, "pattern.reserved must be 0, got ", pattern.reserved);
    check_features(pattern.out_features, pattern.block_rows, "pattern.out_features", "block_rows",
                   DeviceType::cpu);
    check_features(pattern.in_features, pattern.block_cols, "pattern.in_features", "block_cols",
                   DeviceType::cpu);
    const int64_t blocks =
        (pattern.out_features / pattern.block_rows) * (pattern.in_features / pattern.block_cols);
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
    problem.device = check_enum<DeviceType>(desc.device, 2, "device");
    problem.result_dtype =
        check_own_dtype(desc.result_dtype, problem.input_dtype, kActivationDTypes, "result_dtype");
    problem.activation = check_enum<Activation>(desc.activation, 4, "activation");
    problem.precision = check_enum<Precision>(desc.precision, 2, "precision");
    problem.accumulate = check_enum<int32_t>(desc.accumulate, 2, "accumulate") == 1;
    check_enum<int32_t>(desc.policy, 3, "policy");
    require(std::memchr(desc.prefer, 0, sizeof desc.prefer) != nullptr, "prefer must end in a zero within ",
            sizeof desc.prefer, " characters");
    require(desc.reserved == 0, "reserved must be 0, got ", desc.reserved);
    check_extent(desc.tokens, "tokens", problem.device);
    problem.tokens = desc.tokens;
    problem.pattern = check_pattern(desc.pattern);
    check_extent(problem.pattern.out_features, "pattern.out_features", problem.device);
    check_extent(problem.pattern.in_features, "pattern.in_features", problem.device);
    const int64_t ins = problem.pattern.in_features, outs = problem.pattern.group_out_features();
    problem.x = check_matrix(desc.x, problem.tokens, ins, "x");
    problem.y = check_matrix(desc.y, problem.tokens, outs, "y");
    check_quantized_input(desc, problem);
    problem.x_scales = desc.x_scales;
    problem.x_scales_ld = desc.x_scales_ld;
    problem.values = check_storage(desc, problem);
    problem.offsets = desc.group_offsets;
    problem.packed = desc.packed;
    problem.bias = desc.bias;
    problem.plan = desc.plan;
    const Matrix residual = check_matrix(desc.residual, problem.tokens, outs, "residual");
    const Matrix gate = check_matrix(desc.gate, problem.tokens, outs, "gate");

    const bool forward = problem.forward();
    require(forward || problem.activation == Activation::none,
            "activation must be 0 unless op is dds_nt, got ", desc.activation);
    require(forward || problem.bias == nullptr, "bias must be null unless op is dds_nt");
    check_other(residual, problem, "residual");
    check_other(gate, problem, "gate");
    require(residual.data == nullptr || gate.data == nullptr, "gate must be null where a residual is given");
    problem.gated = gate.data != nullptr;
    problem.residual = problem.gated ? gate : residual;
    if (problem.gated) std::swap(problem.activation, problem.gate_activation);
    require(problem.op == Op::sdd_tn || !problem.accumulate, "accumulate must be 0 unless op is sdd_tn");
    problem.bias_gradient = check_bias_gradient(desc, problem);
    check_grouped(desc, problem);
    return problem;
}

DeviceType check_device_type(int32_t device) { return check_enum<DeviceType>(device, 2, "device"); }

DType check_value_dtype(int32_t dtype) { return check_enum<DType>(dtype, kElementDTypes, "dtype"); }

NamedDevice check_device(const ts_device_info& info) {
    constexpr int32_t kMaxProcessors = 1 << 16, kMaxSharedBytes = 1 << 24, kMaxCluster = 16;
    const auto type = check_enum<DeviceType>(info.device, 2, "device.device");
    const bool is_cuda = type == DeviceType::cuda;
    const auto check = [](int32_t value, int32_t least, int32_t most, const char* name) {
        require(value >= least && value <= most, "device.", name, " must be ", least, " to ", most, ", got ",
                value);
        return value;
    };
    check(info.reserved, 0, 0, "reserved");
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
