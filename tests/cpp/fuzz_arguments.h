// Arguments of calls: valid ones, of which some are replaced.
#ifndef TILESPARSE_TESTS_FUZZ_ARGUMENTS_H_
#define TILESPARSE_TESTS_FUZZ_ARGUMENTS_H_

#include <tilesparse/tilesparse.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "fuzz_memory.h"

namespace fuzz {

struct Field {
    size_t offset;
    bool is_wide;
};

template <class T, size_t size>
inline void spoil(T& structure, const Field (&fields)[size]) {
    const Field field = one_of(fields);
    const int64_t value = wild_number();
    const auto narrow = static_cast<int32_t>(value);
    auto* const target = reinterpret_cast<unsigned char*>(&structure) + field.offset;
    if (field.is_wide)
        std::memcpy(target, &value, sizeof value);
    else
        std::memcpy(target, &narrow, sizeof narrow);
}

#define NARROW(type, field) {offsetof(type, field), false}
#define WIDE(type, field) {offsetof(type, field), true}

constexpr Field kPatternFields[] = {NARROW(ts_pattern, block_rows), NARROW(ts_pattern, block_cols),
                                    NARROW(ts_pattern, groups),     WIDE(ts_pattern, out_features),
                                    WIDE(ts_pattern, in_features),  WIDE(ts_pattern, nnz)};

#define OPERAND(name)                                                                   \
    NARROW(ts_matmul_desc, name.layout), NARROW(ts_matmul_desc, name.dtype),            \
        NARROW(ts_matmul_desc, name.storage), NARROW(ts_matmul_desc, name.granularity), \
        WIDE(ts_matmul_desc, name.ld), WIDE(ts_matmul_desc, name.scales_ld)

constexpr Field kDescFields[] = {NARROW(ts_matmul_desc, op),
                                 NARROW(ts_matmul_desc, device),
                                 NARROW(ts_matmul_desc, activation),
                                 NARROW(ts_matmul_desc, precision),
                                 NARROW(ts_matmul_desc, accumulate),
                                 NARROW(ts_matmul_desc, kernel),
                                 NARROW(ts_matmul_desc, policy),
                                 WIDE(ts_matmul_desc, tokens),
                                 OPERAND(x),
                                 OPERAND(y),
                                 OPERAND(values),
                                 OPERAND(bias),
                                 OPERAND(residual),
                                 OPERAND(gate),
                                 WIDE(ts_matmul_desc, plan.key),
                                 WIDE(ts_matmul_desc, plan.bytes),
                                 WIDE(ts_matmul_desc, prepacked.bytes),
                                 WIDE(ts_matmul_desc, prepacked.key)};

constexpr Field kDeviceFields[] = {NARROW(ts_device_info, device), NARROW(ts_device_info, compute_capability),
                                   NARROW(ts_device_info, multiprocessors),
                                   NARROW(ts_device_info, shared_memory),
                                   NARROW(ts_device_info, max_cluster)};

// An array of the size that the arguments claim, which begins with what a valid one has.
inline const int32_t* array(const std::vector<int32_t>& valid, wide size) {
    auto* const data = reinterpret_cast<int32_t*>(take_some(size * 4));
    if (data == nullptr || reinterpret_cast<uintptr_t>(data) % 4 != 0) return data;
    for (int64_t i = 0; i < static_cast<int64_t>(size); ++i)
        data[i] = i < static_cast<int64_t>(valid.size()) ? valid[i] : static_cast<int32_t>(wild_number());
    if (size > 0 && chance(3))
        data[draw(0, static_cast<int64_t>(size) - 1)] = static_cast<int32_t>(wild_number());
    return data;
}

inline int64_t groups_of(const ts_pattern& pattern) { return std::max(pattern.groups, 1); }

// Blocks of a side, of which the last may reach out of the size.
inline wide blocks_of(wide size, wide side) {
    side = std::max<wide>(side, 1);
    return (size + side - 1) / side;
}

// A pattern of so many blocks along each dimension, whose block shape and groups are there.
inline ts_pattern pattern_of(ts_pattern pattern, int64_t rows, int64_t cols, bool ragged = false) {
    pattern.struct_size = sizeof pattern;
    const int64_t groups = groups_of(pattern), group_rows = rows / groups;
    const int density = static_cast<int>(draw(0, 100));
    std::vector<int32_t> ptr{0}, idx, col_ptr{0}, row_idx, col_slot;
    for (int64_t row = 0; row < rows; ++row) {
        for (int32_t col = 0; col < cols; ++col)
            if (chance(density)) idx.push_back(col);
        ptr.push_back(static_cast<int32_t>(idx.size()));
    }
    std::vector<int32_t> slot(idx.size());
    std::iota(slot.begin(), slot.end(), 0);
    for (size_t i = slot.size(); i > 1; --i)
        std::swap(slot[i - 1], slot[draw(0, static_cast<int64_t>(i) - 1)]);
    for (int64_t line = 0; line < groups * cols; ++line) {
        const int64_t first = line / cols * group_rows;
        for (int64_t row = 0; row < group_rows; ++row)
            for (int32_t e = ptr[first + row]; e < ptr[first + row + 1]; ++e)
                if (idx[e] == line % cols)
                    row_idx.push_back(static_cast<int32_t>(row)), col_slot.push_back(slot[e]);
        col_ptr.push_back(static_cast<int32_t>(row_idx.size()));
    }
    pattern.out_features = rows * pattern.block_rows;
    pattern.in_features = cols * pattern.block_cols;
    if (ragged && rows > 0) pattern.out_features -= draw(0, pattern.block_rows - 1);
    if (ragged && cols > 0) pattern.in_features -= draw(0, pattern.block_cols - 1);
    pattern.nnz = static_cast<int64_t>(idx.size());
    while (chance(15)) spoil(pattern, kPatternFields);
    const wide claimed_rows = blocks_of(pattern.out_features, pattern.block_rows);
    const wide claimed_cols = blocks_of(pattern.in_features, pattern.block_cols);
    pattern.row_ptr = array(ptr, claimed_rows + 1);
    pattern.col_idx = array(idx, pattern.nnz);
    pattern.row_slot = array(slot, pattern.nnz);
    pattern.col_ptr = array(col_ptr, claimed_cols * groups_of(pattern) + 1);
    pattern.row_idx = array(row_idx, pattern.nnz);
    pattern.col_slot = array(col_slot, pattern.nnz);
    if (chance(10)) pattern.col_ptr = nullptr;
    return pattern;
}

inline ts_pattern some_pattern() {
    static constexpr int32_t kBlocks[] = {16, 16, 32, 64, 128, 3, 6, 24};
    ts_pattern pattern{};
    pattern.block_rows = one_of(kBlocks);
    pattern.block_cols = chance(50) ? pattern.block_rows : one_of(kBlocks);
    pattern.groups = static_cast<int32_t>(chance(70) ? draw(0, 1) : draw(2, 4));
    const int64_t groups = groups_of(pattern), group_rows = draw(0, 6 / groups);
    return pattern_of(pattern, groups * group_rows, draw(0, 6), groups == 1 && chance(30));
}

inline int64_t size_of(int32_t dtype) {
    if (dtype >= TS_INT8 && dtype <= TS_INT4) return 1;  // of int4: of two
    return dtype == TS_FLOAT64 ? 8 : dtype == TS_FLOAT32 ? 4 : 2;
}

inline const ts_operand& input_of(const ts_matmul_desc& desc) {
    return desc.op == TS_DDS_NN ? desc.y : desc.x;
}

inline int64_t most_bytes(const ts_matmul_desc& desc) {  // of an element of any operand but values
    return std::max(size_of(desc.x.dtype), size_of(desc.y.dtype));
}

inline void place(ts_operand& matrix, const ts_matmul_desc& desc, int64_t features) {
    const bool row_major = matrix.layout == TS_ROW_MAJOR;
    const int64_t tokens = bounded(desc.tokens);
    const wide lines = row_major ? tokens : bounded(features), line = row_major ? bounded(features) : tokens;
    const wide elements = lines <= 0 || line <= 0 ? 0 : (lines - 1) * bounded(matrix.ld) + line;
    matrix.data = take_some(elements * most_bytes(desc));
}

// Values with metadata and scales, and scales of x.
inline void place_values(ts_matmul_desc& desc, const ts_pattern& pattern) {
    ts_operand& values = desc.values;
    const wide rows = wide(bounded(pattern.nnz)) * pattern.block_rows, count = rows * pattern.block_cols;
    const int64_t size = size_of(values.dtype != TS_DTYPE_DEFAULT ? values.dtype : input_of(desc).dtype);
    const bool is_halved = values.storage == TS_STORAGE_2_4 || values.dtype == TS_INT4;
    values.data = take_some(count * size / (is_halved ? 2 : 1));
    if (values.metadata != nullptr) values.metadata = take_some(count / 8);
    if (values.scales != nullptr) {
        const wide scales = values.granularity == TS_SCALES_PER_FEATURE ? wide(bounded(pattern.out_features))
                            : values.granularity == TS_SCALES_PER_ROW   ? rows
                                                                        : wide(bounded(pattern.nnz));
        values.scales = reinterpret_cast<float*>(take_some(scales * 4));
    }
    if (desc.x.scales != nullptr) {
        const wide groups = bounded(pattern.in_features) / 128, tokens = bounded(desc.tokens);
        const bool inside = desc.x.granularity == TS_SCALES_PER_GROUP && groups > 0;
        const wide before = inside ? (groups - 1) * bounded(desc.x.scales_ld) : 0;
        desc.x.scales = reinterpret_cast<float*>(take_some((before + tokens) * 4));
    }
}

// Offsets of groups: ascending from 0 to the number of tokens, unless spoilt.
inline const int32_t* some_offsets(int64_t groups, int64_t tokens) {
    std::vector<int32_t> offsets{0};
    const int64_t known = std::clamp<int64_t>(groups, 1, 1024);
    for (int64_t i = 1; i < known; ++i)
        offsets.push_back(static_cast<int32_t>(draw(offsets.back(), std::clamp<int64_t>(tokens, 0, 40))));
    offsets.push_back(static_cast<int32_t>(tokens));
    std::sort(offsets.begin(), offsets.end());
    return array(offsets, wide(bounded(groups)) + 1);
}

// The pattern's memory is there wherever its structure may be read; `followed`: that of the operands, too.
inline ts_matmul_desc some_product(const ts_pattern& pattern, bool followed) {
    ts_matmul_desc desc{};
    desc.struct_size = sizeof desc;
    desc.op = static_cast<int32_t>(draw(0, 2));
    desc.x.dtype = desc.y.dtype = static_cast<int32_t>(draw(TS_FLOAT64, TS_BFLOAT16));
    desc.device = chance(followed ? 85 : 40) ? TS_CPU : TS_CUDA;
    desc.tokens = draw(0, 40);
    desc.x.layout = static_cast<int32_t>(draw(0, 1));
    desc.y.layout = desc.residual.layout = desc.gate.layout = static_cast<int32_t>(draw(0, 1));
    if (desc.op == TS_DDS_NT) desc.activation = static_cast<int32_t>(draw(0, 3));
    if (desc.op == TS_SDD_TN) desc.accumulate = static_cast<int32_t>(draw(0, 1));
    if (chance(10)) desc.kernel = static_cast<int32_t>(draw(0, ts_kernel_count() + 1));
    if (chance(10)) std::strcpy(desc.prefer, chance(50) ? "cpu_" : chance(50) ? "sm80_dds" : "none");
    if (chance(2)) std::memset(desc.prefer, 'c', sizeof desc.prefer);
    const bool grouped = chance(pattern.groups > 1 ? 95 : 10);
    if (grouped && chance(90)) desc.x.layout = desc.y.layout = TS_ROW_MAJOR;
    if (grouped) desc.residual.layout = desc.gate.layout = desc.y.layout;
    const int64_t of_y = grouped ? pattern.out_features / groups_of(pattern) : pattern.out_features;
    const auto line = [&](int32_t layout, int64_t features) {
        return bounded(layout == TS_ROW_MAJOR ? features : desc.tokens) + 8 * draw(0, 2);
    };
    desc.x.ld = line(desc.x.layout, pattern.in_features);
    desc.y.ld = line(desc.y.layout, of_y);
    desc.residual.ld = line(desc.residual.layout, of_y);
    desc.gate.ld = line(desc.gate.layout, of_y);
    ts_operand& values = desc.values;
    if (desc.op != TS_SDD_TN) {
        if (chance(25)) values.storage = TS_STORAGE_2_4;
        if (chance(25)) values.dtype = static_cast<int32_t>(draw(TS_INT8, TS_INT4));
        if (values.dtype != TS_DTYPE_DEFAULT)
            values.granularity = static_cast<int32_t>(draw(TS_SCALES_PER_BLOCK, TS_SCALES_PER_ROW));
    }
    const bool quantizes = desc.op == TS_DDS_NT && chance(20);
    if (quantizes) {
        desc.x.dtype = static_cast<int32_t>(draw(TS_INT8, TS_FLOAT8_E4M3FN));
        desc.x.granularity = TS_SCALES_PER_TOKEN;
        desc.y.dtype = static_cast<int32_t>(draw(TS_FLOAT32, TS_BFLOAT16));
        values.dtype = values.storage = 0;
        values.granularity = TS_SCALES_PER_FEATURE;
        if (chance(pattern.block_rows == 128 && pattern.block_cols == 128 ? 60 : 3)) {
            desc.x.dtype = static_cast<int32_t>(chance(95) ? TS_FLOAT8_E4M3FN : TS_INT8);
            desc.x.granularity = TS_SCALES_PER_GROUP;
            desc.x.scales_ld = std::max<int64_t>(desc.tokens, 1) + draw(0, 3);
            values.granularity = TS_SCALES_PER_BLOCK;
        }
        if (chance(90)) desc.x.layout = TS_ROW_MAJOR;
        desc.x.ld = line(desc.x.layout, pattern.in_features);
    }
    if (quantizes == chance(97)) desc.x.scales = static_cast<float*>(wild_address());
    if ((values.storage != TS_STORAGE_DENSE) == chance(97)) values.metadata = wild_address();
    if ((values.dtype != TS_DTYPE_DEFAULT || quantizes) == chance(97))
        values.scales = static_cast<float*>(wild_address());
    while (chance(35)) spoil(desc, kDescFields);
    desc.plan.data = chance(80) ? nullptr : wild_address();
    desc.prepacked.data = chance(80) ? nullptr : wild_address();
    const bool has_bias =
                   desc.op == TS_SDD_TN ? chance(grouped ? 3 : 50) : chance(30) && desc.op == TS_DDS_NT,
               has_residual = chance(30) && desc.op == TS_DDS_NT,
               has_gate = chance(has_residual ? 2 : 30) && desc.op == TS_DDS_NT;
    if (has_bias && desc.op == TS_SDD_TN && chance(50)) desc.accumulate |= TS_ACCUMULATE_BIAS;
    if (has_bias && desc.op == TS_SDD_TN && size_of(desc.x.dtype) == 2 && chance(50))
        desc.bias.dtype = TS_FLOAT32;
    if (grouped && !followed) desc.group_offsets = static_cast<const int32_t*>(wild_address());
    if (grouped && followed) desc.group_offsets = some_offsets(groups_of(pattern), desc.tokens);
    if (!followed) {
        for (void** operand : {&desc.x.data, &desc.y.data, &desc.values.data}) *operand = wild_address();
        if (has_bias) desc.bias.data = wild_address();
        if (has_residual) desc.residual.data = wild_address();
        if (has_gate) desc.gate.data = wild_address();
        return desc;
    }
    place(desc.x, desc, pattern.in_features);
    place(desc.y, desc, of_y);
    if (has_residual) place(desc.residual, desc, of_y);
    if (has_gate) place(desc.gate, desc, of_y);
    if (has_bias) desc.bias.data = take_some(wide(bounded(pattern.out_features)) * 8);
    place_values(desc, pattern);
    return desc;
}

// A product whose memory is there: of a structure of another size than this header's nothing is followed.
inline const ts_matmul_desc* followed_product(ts_matmul_desc& desc, const ts_pattern& pattern) {
    desc.pattern = as_caller_has_it(pattern);
    return as_caller_has_it(desc);
}

inline ts_device_info some_device() {
    static constexpr int32_t kCapabilities[] = {75, 80, 86, 89, 90, 100, 120};
    ts_device_info device{};
    device.struct_size = sizeof device;
    device.device = chance(30) ? TS_CPU : TS_CUDA;
    device.multiprocessors = static_cast<int32_t>(draw(1, 200));
    if (device.device == TS_CUDA) {
        device.compute_capability = one_of(kCapabilities);
        device.shared_memory = static_cast<int32_t>(draw(0, 232448));
    }
    while (chance(25)) spoil(device, kDeviceFields);
    return device;
}

inline int32_t some_kernel() {
    return static_cast<int32_t>(chance(95) ? draw(1, ts_kernel_count()) : wild_number());
}
inline int32_t some_op() { return static_cast<int32_t>(chance(95) ? draw(0, 2) : wild_number()); }

}  // namespace fuzz

#endif  // TILESPARSE_TESTS_FUZZ_ARGUMENTS_H_
