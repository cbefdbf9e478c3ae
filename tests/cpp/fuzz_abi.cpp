// Hostile calls of the C interface: fuzz_abi [calls [seed]]. Every call begins with valid arguments, of which
// some are then replaced: wild numbers, missing and misaligned memory, structures too short and too long,
// broken patterns. Memory has exactly the size that the arguments claim, so that a sanitizer sees every
// access beyond it; where they claim too much it is null. What must hold: the status is one that fits, with a
// sentence if it is an error, and then no result was written. All memory is that of the host. So calls for a
// CUDA device must end in an error where there is none; where there is one, what they would write lies at odd
// addresses, which have to be refused before anything is launched.
#include <stdlib.h>
#include <tilesparse/tilesparse.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

__extension__ typedef __int128 wide;  // in which no size that is claimed overflows

// ---- Numbers ----

uint64_t state;

uint64_t draw() {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
int64_t draw(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(draw() % static_cast<uint64_t>(most - least + 1));
}
bool chance(int percent) { return draw(1, 100) <= percent; }
template <class T, size_t size>
T one_of(const T (&values)[size]) {
    return values[draw(0, size - 1)];
}

int64_t wild_number() {
    static constexpr int64_t kValues[] = {0,
                                          1,
                                          -1,
                                          2,
                                          3,
                                          4,
                                          5,
                                          7,
                                          8,
                                          15,
                                          16,
                                          17,
                                          32,
                                          48,
                                          64,
                                          100,
                                          128,
                                          256,
                                          4096,
                                          65535,
                                          65536,
                                          1 << 24,
                                          INT32_MAX,
                                          INT32_MIN,
                                          1ll << 31,
                                          1ll << 32,
                                          1ll << 47,
                                          1ll << 62,
                                          INT64_MAX,
                                          INT64_MIN,
                                          INT32_MAX / 128 * 128ll};
    return chance(80) ? one_of(kValues) : static_cast<int64_t>(draw());
}

// As good as endless for memory, and far from overflowing where it is multiplied.
int64_t bounded(int64_t number) { return std::clamp<int64_t>(number, -(1ll << 40), 1ll << 40); }

// ---- Memory ----

constexpr unsigned char kUntouched = 0x5a;
constexpr int64_t kMostBytes = 1 << 20;  // that are really given

struct Block {
    void* memory;
    unsigned char* data;
    size_t bytes;
};
std::vector<Block> blocks;  // freed after the call

// So many bytes and not one more, `shift` bytes behind an aligned address; null where they are too many.
unsigned char* take(wide bytes, size_t shift = 0) {
    if (bytes < 0 || bytes > kMostBytes) return nullptr;
    Block block{nullptr, nullptr, static_cast<size_t>(bytes)};
    if (posix_memalign(&block.memory, 256, block.bytes + shift) != 0) abort();
    block.data = static_cast<unsigned char*>(block.memory) + shift;
    std::memset(block.data, kUntouched, block.bytes);
    blocks.push_back(block);
    return block.data;
}

// The same, now and then misaligned or missing.
unsigned char* take_some(wide bytes) {
    if (chance(3)) return nullptr;
    static constexpr size_t kShifts[] = {1, 2, 4, 8, 16, 64};
    return take(bytes, chance(4) ? one_of(kShifts) : 0);
}

// For what no call may follow.
void* wild_address() {
    static constexpr uintptr_t kAddresses[] = {
        0, 1, 4, 16, 256, uintptr_t{1} << 40, UINTPTR_MAX - 255, UINTPTR_MAX};
    return reinterpret_cast<void*>(one_of(kAddresses));
}

// Memory of `take` that is as it was then.
bool is_untouched(const void* data) {
    for (const Block& block : blocks)
        if (block.data == data)
            return std::all_of(block.data, block.data + block.bytes,
                               [](unsigned char byte) { return byte == kUntouched; });
    return data == nullptr;
}

size_t held_at(const void* data) {
    for (const Block& block : blocks)
        if (block.data == data) return block.bytes;
    return 0;
}

// A structure as a caller of some version has it: of the size it says, or a size that is refused unread.
template <class T>
T* as_caller_has_it(T structure) {
    static constexpr uint32_t kOdd[] = {0,   1,   4,   8,   87,  88,  92,  100, 103,
                                        104, 120, 159, 160, 168, 176, 184, 208, 216};
    uint32_t size = sizeof(T);
    if (chance(10)) size = one_of(kOdd);
    if (chance(4)) size = sizeof(T) + static_cast<uint32_t>(draw(1, 100));
    if (chance(2)) size = static_cast<uint32_t>(wild_number());
    if (chance(1)) return nullptr;
    structure.struct_size = size;
    const size_t held = std::max<size_t>(std::min<size_t>(size, 8192), sizeof(uint32_t));
    unsigned char* const data = take(held, chance(2) ? 4 : 0);
    std::memset(data, 0, held);
    std::memcpy(data, &structure, std::min(held, sizeof(T)));
    if (held > sizeof(T) && chance(50)) data[draw(sizeof(T), static_cast<int64_t>(held) - 1)] = 1;
    return reinterpret_cast<T*>(data);
}

// ---- Arguments ----

struct Field {
    size_t offset;
    bool is_wide;
};

template <class T, size_t size>
void spoil(T& structure, const Field (&fields)[size]) {
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
                                    NARROW(ts_pattern, reserved),   WIDE(ts_pattern, out_features),
                                    WIDE(ts_pattern, in_features),  WIDE(ts_pattern, nnz)};

constexpr Field kDescFields[] = {NARROW(ts_matmul_desc, op),
                                 NARROW(ts_matmul_desc, dtype),
                                 NARROW(ts_matmul_desc, device),
                                 NARROW(ts_matmul_desc, storage),
                                 NARROW(ts_matmul_desc, activation),
                                 NARROW(ts_matmul_desc, precision),
                                 NARROW(ts_matmul_desc, accumulate),
                                 NARROW(ts_matmul_desc, kernel),
                                 NARROW(ts_matmul_desc, reserved),
                                 NARROW(ts_matmul_desc, x.layout),
                                 NARROW(ts_matmul_desc, x.reserved),
                                 NARROW(ts_matmul_desc, y.layout),
                                 NARROW(ts_matmul_desc, y.reserved),
                                 NARROW(ts_matmul_desc, residual.layout),
                                 NARROW(ts_matmul_desc, values_dtype),
                                 NARROW(ts_matmul_desc, result_dtype),
                                 NARROW(ts_matmul_desc, policy),
                                 NARROW(ts_matmul_desc, row_scales),
                                 NARROW(ts_matmul_desc, gate.layout),
                                 WIDE(ts_matmul_desc, gate.ld),
                                 WIDE(ts_matmul_desc, tokens),
                                 WIDE(ts_matmul_desc, x.ld),
                                 WIDE(ts_matmul_desc, y.ld),
                                 WIDE(ts_matmul_desc, residual.ld),
                                 WIDE(ts_matmul_desc, plan_key),
                                 WIDE(ts_matmul_desc, plan_bytes),
                                 WIDE(ts_matmul_desc, packed_bytes),
                                 WIDE(ts_matmul_desc, packed_key),
                                 NARROW(ts_matmul_desc, bias_gradient_dtype),
                                 NARROW(ts_matmul_desc, accumulate_bias)};

constexpr Field kDeviceFields[] = {NARROW(ts_device_info, device), NARROW(ts_device_info, compute_capability),
                                   NARROW(ts_device_info, multiprocessors),
                                   NARROW(ts_device_info, shared_memory), NARROW(ts_device_info, reserved)};

// An array of the size that the arguments claim, which begins with what a valid one has.
const int32_t* array(const std::vector<int32_t>& valid, wide size) {
    auto* const data = reinterpret_cast<int32_t*>(take_some(size * 4));
    if (data == nullptr || reinterpret_cast<uintptr_t>(data) % 4 != 0) return data;
    for (int64_t i = 0; i < static_cast<int64_t>(size); ++i)
        data[i] = i < static_cast<int64_t>(valid.size()) ? valid[i] : static_cast<int32_t>(wild_number());
    if (size > 0 && chance(3))
        data[draw(0, static_cast<int64_t>(size) - 1)] = static_cast<int32_t>(wild_number());
    return data;
}

ts_pattern some_pattern() {
    static constexpr int32_t kBlocks[] = {16, 16, 32, 64, 128};
    ts_pattern pattern{};
    pattern.struct_size = sizeof pattern;
    pattern.block_rows = one_of(kBlocks);
    pattern.block_cols = chance(50) ? pattern.block_rows : one_of(kBlocks);
    const int64_t rows = draw(0, 6), cols = draw(0, 6);
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
    for (int32_t col = 0; col < cols; ++col) {
        for (int32_t row = 0; row < rows; ++row)
            for (int32_t e = ptr[row]; e < ptr[row + 1]; ++e)
                if (idx[e] == col) row_idx.push_back(row), col_slot.push_back(slot[e]);
        col_ptr.push_back(static_cast<int32_t>(row_idx.size()));
    }
    pattern.out_features = rows * pattern.block_rows;
    pattern.in_features = cols * pattern.block_cols;
    pattern.nnz = static_cast<int64_t>(idx.size());
    while (chance(15)) spoil(pattern, kPatternFields);
    const wide claimed_rows = pattern.out_features / std::max(pattern.block_rows, 1);
    const wide claimed_cols = pattern.in_features / std::max(pattern.block_cols, 1);
    pattern.row_ptr = array(ptr, claimed_rows + 1);
    pattern.col_idx = array(idx, pattern.nnz);
    pattern.row_slot = array(slot, pattern.nnz);
    pattern.col_ptr = array(col_ptr, claimed_cols + 1);
    pattern.row_idx = array(row_idx, pattern.nnz);
    pattern.col_slot = array(col_slot, pattern.nnz);
    if (chance(10)) pattern.col_ptr = nullptr;
    return pattern;
}

int64_t size_of(int32_t dtype) {
    if (dtype == TS_INT8 || dtype == TS_FLOAT8_E4M3FN) return 1;
    return dtype == TS_FLOAT64 ? 8 : dtype == TS_FLOAT32 ? 4 : 2;
}

int64_t most_bytes(const ts_matmul_desc& desc) {  // of an element of any operand but values
    const int64_t size = size_of(desc.dtype);
    return desc.result_dtype > 0 ? std::max(size, size_of(desc.result_dtype - 1)) : size;
}

void place(ts_matrix& matrix, const ts_matmul_desc& desc, int64_t features) {
    const bool row_major = matrix.layout == TS_ROW_MAJOR;
    const int64_t tokens = bounded(desc.tokens);
    const wide lines = row_major ? tokens : bounded(features), line = row_major ? bounded(features) : tokens;
    const wide elements = lines <= 0 || line <= 0 ? 0 : (lines - 1) * bounded(matrix.ld) + line;
    matrix.data = take_some(elements * most_bytes(desc));
}

// Values, with what their storage has besides.
void place_values(ts_matmul_desc& desc, const ts_pattern& pattern) {
    const wide rows = wide(bounded(pattern.nnz)) * pattern.block_rows, count = rows * pattern.block_cols;
    const int64_t size = size_of(desc.values_dtype > 0 ? desc.values_dtype - 1 : desc.dtype);
    desc.values = take_some(count * size / (desc.storage == TS_STORAGE_2_4 ? 2 : 1));
    if (desc.metadata != nullptr) desc.metadata = take_some(count / 8);
    if (desc.scales != nullptr)
        desc.scales = reinterpret_cast<float*>(take_some((desc.row_scales ? rows : wide(pattern.nnz)) * 4));
}

// Where the pattern's structure may be read, its memory is there; `followed`: that of the operands, too.
ts_matmul_desc some_product(const ts_pattern& pattern, bool followed) {
    ts_matmul_desc desc{};
    desc.struct_size = sizeof desc;
    desc.op = static_cast<int32_t>(draw(0, 2));
    desc.dtype = static_cast<int32_t>(draw(0, 3));
    desc.device = chance(followed ? 85 : 40) ? TS_CPU : TS_CUDA;
    desc.tokens = draw(0, 40);
    desc.x.layout = static_cast<int32_t>(draw(0, 1));
    desc.y.layout = desc.residual.layout = desc.gate.layout = static_cast<int32_t>(draw(0, 1));
    if (desc.op == TS_DDS_NT) desc.activation = static_cast<int32_t>(draw(0, 3));
    if (desc.op == TS_SDD_TN) desc.accumulate = static_cast<int32_t>(draw(0, 1));
    if (chance(10)) desc.kernel = static_cast<int32_t>(draw(0, ts_kernel_count() + 1));
    if (chance(10)) std::strcpy(desc.prefer, chance(50) ? "cpu_" : chance(50) ? "sm80_dds" : "none");
    if (chance(2)) std::memset(desc.prefer, 'c', sizeof desc.prefer);
    const auto line = [&](int32_t layout, int64_t features) {
        return bounded(layout == TS_ROW_MAJOR ? features : desc.tokens) + 8 * draw(0, 2);
    };
    desc.x.ld = line(desc.x.layout, pattern.in_features);
    desc.y.ld = line(desc.y.layout, pattern.out_features);
    desc.residual.ld = line(desc.residual.layout, pattern.out_features);
    desc.gate.ld = line(desc.gate.layout, pattern.out_features);
    if (desc.op != TS_SDD_TN) {
        if (chance(25)) desc.storage = TS_STORAGE_2_4;
        if (chance(25)) desc.values_dtype = static_cast<int32_t>(draw(TS_INT8, TS_FLOAT8_E4M3FN)) + 1;
        if (desc.values_dtype != 0) desc.row_scales = static_cast<int32_t>(draw(0, 1));
    }
    if ((desc.storage != TS_STORAGE_PLAIN) == chance(97)) desc.metadata = wild_address();
    if ((desc.values_dtype != 0) == chance(97)) desc.scales = static_cast<float*>(wild_address());
    while (chance(35)) spoil(desc, kDescFields);
    desc.plan = chance(80) ? nullptr : wild_address();
    desc.packed = chance(80) ? nullptr : wild_address();
    const bool has_bias = chance(30) && desc.op == TS_DDS_NT,
               has_residual = chance(30) && desc.op == TS_DDS_NT,
               has_gate = chance(has_residual ? 2 : 30) && desc.op == TS_DDS_NT,
               has_bias_gradient = chance(50) && desc.op == TS_SDD_TN;
    if (has_bias_gradient && chance(50)) desc.accumulate_bias = 1;
    if (has_bias_gradient && size_of(desc.dtype) == 2 && chance(50))
        desc.bias_gradient_dtype = TS_FLOAT32 + 1;
    if (!followed) {
        for (void** operand : {&desc.x.data, &desc.y.data, &desc.values}) *operand = wild_address();
        if (has_bias) desc.bias = wild_address();
        if (has_residual) desc.residual.data = wild_address();
        if (has_gate) desc.gate.data = wild_address();
        if (has_bias_gradient) desc.bias_gradient = wild_address();
        return desc;
    }
    place(desc.x, desc, pattern.in_features);
    place(desc.y, desc, pattern.out_features);
    if (has_residual) place(desc.residual, desc, pattern.out_features);
    if (has_gate) place(desc.gate, desc, pattern.out_features);
    if (has_bias) desc.bias = take_some(wide(bounded(pattern.out_features)) * most_bytes(desc));
    if (has_bias_gradient) desc.bias_gradient = take_some(wide(bounded(pattern.out_features)) * 8);
    place_values(desc, pattern);
    return desc;
}

ts_device_info some_device() {
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

int32_t some_kernel() {
    return static_cast<int32_t>(chance(95) ? draw(0, ts_kernel_count() - 1) : wild_number());
}
int32_t some_op() { return static_cast<int32_t>(chance(95) ? draw(0, 2) : wild_number()); }

// ---- What must hold ----

bool find_gpu() {
    ts_device_info info{};
    info.struct_size = sizeof info;
    return ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS;
}
const bool has_gpu = find_gpu();

// The same memory, or on a machine with a GPU an address at which nothing may be written there.
template <class T>
T* for_device(T* memory) {
    return has_gpu && memory != nullptr ? reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(memory) | 1)
                                        : memory;
}

// The name of the call that broke a rule, or null.
const char* broken = nullptr;

void check(const char* call, bool holds) {
    if (!holds) broken = call;
}

bool check_status(const char* call, ts_status_t status) {
    check(call, status >= TS_SUCCESS && status <= TS_OUT_OF_MEMORY && status != TS_CUDA_ERROR);
    check(call, status == TS_SUCCESS || ts_last_error()[0] != '\0');
    return status == TS_SUCCESS;
}

// A product on a CUDA device needs one.
void check_without_gpu(const char* call, const ts_matmul_desc* desc, bool succeeded) {
    if (desc == nullptr || has_gpu || !succeeded) return;
    check(call, desc->device != TS_CUDA);
}

// A result of that many bytes is written by a call that succeeds and by no other.
struct Result {
    explicit Result(size_t size) : data(take_some(size)) {}
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data);
    }
    void check_untouched(const char* call, bool succeeded) const {
        check(call, succeeded || is_untouched(data));
    }
    unsigned char* data;
};

// ---- Calls ----

void call_constants() {
    check("ts_abi_version", ts_abi_version() == TS_ABI_VERSION);
    check("ts_version", std::strcmp(ts_version(), TS_VERSION) == 0);
    check("ts_architectures", std::strncmp(ts_architectures(), "cpu", 3) == 0);
}

void call_get() {
    call_constants();
    // Longer ones are filled up with zeros, so that all of it must be there.
    ts_kernel_info* const kernel = as_caller_has_it(ts_kernel_info{});
    check_status("ts_kernel_get", ts_kernel_get(some_kernel(), kernel));
    ts_device_info* const device = as_caller_has_it(ts_device_info{});
    const auto ordinal = static_cast<int32_t>(chance(50) ? -1 : wild_number());
    check_status("ts_device_get", ts_device_get(static_cast<int32_t>(draw(-1, 2)), ordinal, device));
    check("ts_status_string", ts_status_string(static_cast<int32_t>(wild_number())) != nullptr);
}

void call_pattern() {
    const ts_pattern pattern = some_pattern();
    check_status("ts_pattern_validate", ts_pattern_validate(as_caller_has_it(pattern)));
    const wide cols = pattern.in_features / std::max(pattern.block_cols, 1), nnz = pattern.nnz;
    auto* const col_ptr = reinterpret_cast<int32_t*>(take_some((cols + 1) * 4));
    auto* row_idx = reinterpret_cast<int32_t*>(take_some(nnz * 4));
    auto* const col_slot = reinterpret_cast<int32_t*>(take_some(nnz * 4));
    if (chance(5)) row_idx = const_cast<int32_t*>(pattern.col_idx);
    const bool done = check_status(
        "ts_pattern_transpose", ts_pattern_transpose(as_caller_has_it(pattern), col_ptr, row_idx, col_slot));
    check("ts_pattern_transpose", done || is_untouched(col_slot));
}

void call_select() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, false);
    desc.pattern = as_caller_has_it(pattern);
    const Result kernel(4), reason(256);
    const size_t reason_bytes = chance(80) ? 256 : static_cast<size_t>(draw(0, 4));
    ts_device_info device = some_device();
    if (chance(80)) desc.device = device.device;
    const bool done = check_status("ts_matmul_select",
                                   ts_matmul_select(as_caller_has_it(desc), as_caller_has_it(device),
                                                    kernel.as<int32_t>(), reason.as<char>(), reason_bytes));
    kernel.check_untouched("ts_matmul_select", done);
    reason.check_untouched("ts_matmul_select", done);
}

// What is measured decides what later calls choose, and is forgotten before the next, which may be repeated
// alone.
void call_estimate() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, false);
    desc.pattern = as_caller_has_it(pattern);
    const ts_device_info device = some_device();
    if (chance(80)) desc.device = device.device;
    const int32_t kernel = some_kernel();
    const Result time(8);
    time.check_untouched("ts_matmul_estimate",
                         check_status("ts_matmul_estimate",
                                      ts_matmul_estimate(as_caller_has_it(desc), as_caller_has_it(device),
                                                         kernel, time.as<double>())));
    check_status("ts_measurement_add",
                 ts_measurement_add(as_caller_has_it(desc), as_caller_has_it(device), kernel,
                                    static_cast<double>(wild_number()), static_cast<double>(draw(-1, 9))));
    int32_t chosen = 0;
    check_status("ts_matmul_select",
                 ts_matmul_select(as_caller_has_it(desc), as_caller_has_it(device), &chosen, nullptr, 0));
    check_status("ts_measurements_clear", ts_measurements_clear());
}

void call_sizes() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, false);
    desc.pattern = as_caller_has_it(pattern);
    const Result workspace(8), packed(8);
    workspace.check_untouched(
        "ts_matmul_workspace_size",
        check_status("ts_matmul_workspace_size",
                     ts_matmul_workspace_size(as_caller_has_it(desc), workspace.as<size_t>())));
    packed.check_untouched("ts_values_packed_size",
                           check_status("ts_values_packed_size",
                                        ts_values_packed_size(as_caller_has_it(desc), packed.as<size_t>())));
}

void call_plan() {
    const ts_pattern pattern = some_pattern();
    const int32_t kernel = some_kernel(), op = some_op();
    const Result key(8), needed(8);
    key.check_untouched(
        "ts_plan_key",
        check_status("ts_plan_key", ts_plan_key(as_caller_has_it(pattern), kernel, op, key.as<int64_t>())));
    size_t bytes = 0;
    check_status("ts_plan_size", ts_plan_size(as_caller_has_it(pattern), kernel, op, &bytes));
    needed.check_untouched("ts_plan_size",
                           check_status("ts_plan_size", ts_plan_size(as_caller_has_it(pattern), kernel, op,
                                                                     needed.as<size_t>())));
    if (chance(10)) bytes = static_cast<size_t>(draw(0, 256));
    const Result plan(bytes);
    plan.check_untouched("ts_plan_build",
                         check_status("ts_plan_build", ts_plan_build(as_caller_has_it(pattern), kernel, op,
                                                                     plan.data, bytes)));
}

// Host memory, which the functions that work on the GPU refuse.
void call_device_plan() {
    const ts_pattern pattern = some_pattern();
    const int32_t kernel = some_kernel(), op = some_op();
    const Result plan_bytes(8), workspace_bytes(8);
    const bool sized = check_status(
        "ts_plan_device_size", ts_plan_device_size(as_caller_has_it(pattern), kernel, op,
                                                   plan_bytes.as<size_t>(), workspace_bytes.as<size_t>()));
    plan_bytes.check_untouched("ts_plan_device_size", sized);
    const Result memory(4096);
    const auto claimed = static_cast<size_t>(wild_number());
    check_status("ts_plan_device_build",
                 ts_plan_device_build(as_caller_has_it(pattern), kernel, op, memory.data, claimed,
                                      memory.data, claimed, nullptr));
    check_status("ts_pattern_device_transpose_size",
                 ts_pattern_device_transpose_size(as_caller_has_it(pattern), workspace_bytes.as<size_t>()));
    auto* const array = memory.as<int32_t>();
    const bool transposed = check_status("ts_pattern_device_transpose",
                                         ts_pattern_device_transpose(as_caller_has_it(pattern), array, array,
                                                                     array, memory.data, claimed, nullptr));
    memory.check_untouched("functions of the device", false);
    check("ts_pattern_device_transpose", !transposed);
    ts_array_pair pair{array, array, wild_number(), 0};
    const auto count = static_cast<int32_t>(wild_number());
    const bool compared = check_status(
        "ts_arrays_compare", ts_arrays_compare(chance(10) ? nullptr : &pair, count, wild_number(), nullptr));
    check("ts_arrays_compare", !compared || count == 0);
}

// A product whose memory is there, or null: a caller that knows less of the structure would claim other
// memory.
const ts_matmul_desc* followed_product(ts_matmul_desc& desc, const ts_pattern& pattern) {
    desc.pattern = as_caller_has_it(pattern);
    const ts_matmul_desc* const given = as_caller_has_it(desc);
    uint32_t size = sizeof desc;
    if (given != nullptr) std::memcpy(&size, given, sizeof size);
    const bool is_plain = desc.storage == TS_STORAGE_PLAIN && desc.values_dtype == 0;
    return is_plain || size >= sizeof desc ? given : nullptr;
}

void call_matmul() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, true);
    const ts_matmul_desc operands = desc;
    if (desc.device == TS_CUDA) {
        desc.x.data = for_device(desc.x.data);
        desc.y.data = for_device(desc.y.data);
        desc.values = for_device(desc.values);
        desc.bias_gradient = for_device(desc.bias_gradient);
    }
    const ts_matmul_desc* const given = followed_product(desc, pattern);
    size_t bytes = 0;
    check_status("ts_matmul_workspace_size", ts_matmul_workspace_size(given, &bytes));
    if (chance(5)) bytes = static_cast<size_t>(draw(0, 4096));
    const Result workspace(bytes);
    unsigned char* scratch = workspace.data;
    if (const size_t held = held_at(operands.values); chance(5) && held >= bytes)
        scratch = static_cast<unsigned char*>(operands.values);
    const bool done = check_status("ts_matmul", ts_matmul(given, scratch, bytes, nullptr));
    workspace.check_untouched("ts_matmul", done);
    for (const void* operand : {operands.x.data, operands.y.data, operands.values})
        check("ts_matmul", done || is_untouched(operand));
    check("ts_matmul", done || desc.bias_gradient == nullptr || is_untouched(operands.bias_gradient));
    const bool packed = check_status("ts_values_pack", ts_values_pack(given, workspace.data, bytes, nullptr));
    check_without_gpu("ts_matmul", given, done);
    check_without_gpu("ts_values_pack", given, packed);
}

void call_expand() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, true);
    const wide count = wide(bounded(pattern.nnz)) * pattern.block_rows * pattern.block_cols;
    wide bytes = std::clamp<wide>(count * size_of(desc.dtype), 0, kMostBytes + 1);
    if (chance(5)) bytes = draw(0, 4096);
    const Result plain(static_cast<size_t>(bytes));
    if (chance(5)) desc.values = plain.data;
    if (desc.device == TS_CUDA) desc.values = for_device(desc.values);
    const ts_matmul_desc* const given = followed_product(desc, pattern);
    const bool done = check_status("ts_values_expand",
                                   ts_values_expand(given, plain.data, static_cast<size_t>(bytes), nullptr));
    plain.check_untouched("ts_values_expand", done);
    check_without_gpu("ts_values_expand", given, done);
}

void call_compress() {
    const ts_pattern pattern = some_pattern();
    const auto device = static_cast<int32_t>(chance(80) ? 0 : draw(-1, 2));
    const auto dtype = static_cast<int32_t>(chance(97) ? draw(0, 5) : wild_number());
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
int64_t some_extent(int64_t most, int64_t multiple) {
    static constexpr int64_t kLarge[] = {INT32_MAX, 1ll << 30, (1ll << 31) - (1 << 16), 1ll << 31, 1ll << 24};
    if (chance(85)) return multiple * draw(0, most);
    return chance(50) ? one_of(kLarge) / multiple * multiple : wild_number();
}

wide bytes_of(int64_t lines, int64_t line, int32_t dtype) {
    return wide(bounded(lines)) * bounded(line) * size_of(dtype);
}

int32_t some_dtype() { return static_cast<int32_t>(chance(90) ? draw(1, 3) : wild_number()); }
int32_t some_activation() { return static_cast<int32_t>(chance(90) ? draw(0, 3) : wild_number()); }

void call_activation_gradient() {
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
ts_matrix some_matrix(int32_t dtype, int64_t tokens, int64_t features) {
    ts_matrix matrix{};
    matrix.ld = chance(90) ? bounded(features) + 8 * draw(0, 2) : wild_number();
    if (chance(3)) matrix.layout = static_cast<int32_t>(wild_number());
    if (chance(3)) matrix.reserved = static_cast<int32_t>(wild_number());
    const bool empty = tokens <= 0 || features <= 0;
    matrix.data =
        take_some(empty ? 0 : bytes_of(tokens - 1, matrix.ld, dtype) + bytes_of(1, features, dtype));
    return matrix;
}

void call_gate() {
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

void call_any() {
    switch (draw(0, 14)) {
        case 0:
            return call_get();
        case 1:
            return call_pattern();
        case 2:
            return call_select();
        case 3:
            return call_sizes();
        case 4:
        case 5:
            return call_plan();
        case 6:
            return call_device_plan();
        case 7:
            return call_expand();
        case 8:
            return call_compress();
        case 9:
            return call_estimate();
        case 10:
            return call_activation_gradient();
        case 11:
            return call_gate();
        default:
            return call_matmul();
    }
}

}  // namespace

int main(int argc, char** argv) {
    const long calls = argc > 1 ? strtol(argv[1], nullptr, 10) : 10000;
    const unsigned long long seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
    for (long i = 0; i < calls && broken == nullptr; ++i) {
        // Of itself alone, so that `fuzz_abi 1 seed` repeats a call by the number that is printed.
        state = (seed + static_cast<uint64_t>(i)) * 0x2545f4914f6cdd1du;
        call_any();
        if (broken != nullptr)
            std::printf("%s, seed %llu: %s\n", broken, seed + static_cast<uint64_t>(i), ts_last_error());
        for (const Block& block : blocks) free(block.memory);
        blocks.clear();
    }
    return broken == nullptr ? 0 : 1;
}
