// The public functions: each is one guard around calls into the library.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#include "abi.h"
#include "device.h"
#include "dispatch.h"
#include "error.h"
#include "gate.h"
#include "measurements.h"
#include "operands.h"
#include "pattern.h"
#include "plan/device_plan.h"
#include "plan/plan.h"
#include "problem.h"
#include "registry.h"
#include "sums.h"
#include "values.h"

namespace ts {
namespace {

thread_local std::string last_error;

// Keeps the sentence, also where there is no memory left for it.
ts_status_t report(ts_status_t status, const char* sentence) noexcept {
    try {
        last_error = sentence;
    } catch (...) {
        last_error = "out of memory";  // short enough to need none
    }
    return status;
}

template <class Body>
ts_status_t guard(Body body) noexcept {
    try {
        body();
        return TS_SUCCESS;
    } catch (const Error& error) {
        return report(error.status(), error.what());
    } catch (const std::bad_alloc&) {
        return report(TS_OUT_OF_MEMORY, "out of host memory");
    } catch (const std::length_error&) {  // of a container: more than there can be memory for
        return report(TS_OUT_OF_MEMORY, "out of host memory");
    } catch (const std::exception& error) {
        return report(TS_INTERNAL_ERROR, error.what());
    } catch (...) {
        return report(TS_INTERNAL_ERROR, "an exception without a text");
    }
}

const Kernel& kernel_at(int32_t index) {
    const auto& kernels = registry();
    require(index >= 0 && index < static_cast<int32_t>(kernels.size()), "kernel is ", index,
            "; allowed are 0 to ", kernels.size() - 1);
    return *kernels[index];
}

template <size_t size>
void copy_name(char (&target)[size], const std::string& source) {
    std::memset(target, 0, size);
    source.copy(target, size - 1);
}

const NamedDevice& device_of(const Problem& problem) {
    return problem.device == DeviceType::cpu ? cpu_device() : cuda_device(-1);
}

// It refers to the descriptor.
Wish wish_of(const ts_matmul_desc& desc) { return {desc.kernel, desc.prefer, Policy::sparse}; }

// The device that a caller describes, which must be of the kind that the problem is for.
NamedDevice described_device(const ts_device_info* info, const Problem& problem) {
    const NamedDevice device = check_device(read_struct(info, "device"));
    require(device.properties.type == problem.device, "device.device is ", info->device,
            ", but desc.device is ", static_cast<int32_t>(problem.device));
    return device;
}

const Kernel& kernel_for(int32_t index, int32_t op) {
    require(op >= TS_DDS_NT && op <= TS_SDD_TN, "op is ", op, "; allowed are 0 to ", TS_SDD_TN);
    const Kernel& kernel = kernel_at(index);
    require(kernel.covers(static_cast<Op>(op)), "op is ", op, ", which kernel ", kernel.name,
            " does not compute");
    return kernel;
}

std::vector<int32_t> plan_of(const ts_pattern* source, int32_t index, int32_t op) {
    const Pattern pattern = check_pattern(source);
    const Kernel& kernel = kernel_for(index, op);
    require(pattern.cols.ptr != nullptr, "pattern.col_ptr is null; a plan needs both directions");
    validate_pattern(pattern);
    return build_plan(pattern, static_cast<Op>(op), kernel.plan);
}

// A kernel without a plan finds blocks by the pattern's arrays.
void check_arrays(const Problem& problem, const Kernel& kernel) {
    const std::array<Operand, 3> arrays = arrays_of(problem.pattern, problem.op);
    for (int i = 0; i < (problem.pattern.nnz > 0 ? 3 : 1); ++i) {
        const auto& [name, span] = arrays[i];
        require(span.begin != 0, name, " is null; kernel ", kernel.name, " reads it");
        check_aligned(reinterpret_cast<const void*>(span.begin), sizeof(int32_t), name);
    }
    if (kernel.device == DeviceType::cpu) check_bounds(problem.pattern, problem.op == Op::dds_nn);
}

// The plan, or what a kernel without one reads in its place.
void check_plan(const ts_matmul_desc& desc, const Problem& problem, const Kernel& kernel) {
    if (kernel.plan.tile == 0) return check_arrays(problem, kernel);
    require(desc.plan != nullptr, "plan is null; kernel ", kernel.name, " needs one from ts_plan_build");
    if (desc.plan_bytes < sizeof(PlanHeader))
        fail(TS_WORKSPACE_TOO_SMALL, "plan_bytes is ", desc.plan_bytes, ", less than a plan's header of ",
             sizeof(PlanHeader));
    if (desc.plan_key == 0) return;
    const int32_t key = plan_key(problem.pattern, problem.op, kernel.plan);
    require(desc.plan_key == key, "plan_key is ", desc.plan_key, ", but kernel ", kernel.name,
            " computes this and walks plans of key ", key,
            "; set kernel to that for which the plan was made");
}

// Memory of the caller's that a kernel needs `needed` bytes of.
void check_area(const void* area, size_t bytes, size_t needed, const char* name, const Kernel& kernel) {
    if (needed == 0) return;
    if (bytes < needed)
        fail(TS_WORKSPACE_TOO_SMALL, name, "_bytes is ", bytes, "; kernel ", kernel.name, " needs ", needed);
    require(area != nullptr, name, " is null");
    check_aligned(area, kernel.device == DeviceType::cpu ? 64 : kDeviceAreaAlignment, name);
}

size_t packed_size(const Problem& problem, const Choice& choice) {
    return choice.expands || choice.kernel->packed_size == nullptr ? 0 : choice.kernel->packed_size(problem);
}

// The caller's packed values, if the kernel reads any. They lie in the order of the plan, so that they have
// its key.
void check_packed(const ts_matmul_desc& desc, const Problem& problem, const Choice& choice) {
    const size_t needed = packed_size(problem, choice);
    if (desc.packed == nullptr || needed == 0) return;
    const Kernel& kernel = *choice.kernel;
    const int32_t key = plan_key(problem.pattern, problem.op, kernel.plan);
    require(desc.packed_key == 0 || desc.packed_key == key, "packed_key is ", desc.packed_key,
            ", but kernel ", kernel.name, " computes this and reads packed values of key ", key,
            "; set kernel to that for which they were packed, or pack them for this one");
    check_area(desc.packed, desc.packed_bytes, needed, "packed", kernel);
}

// The expansion of the values, if the kernel needs it, lies before its own workspace.
size_t expansion_bytes(const Problem& problem, const Choice& choice) {
    const auto bytes = static_cast<size_t>(problem.expanded_bytes());
    return choice.expands ? (bytes + kDeviceAreaAlignment - 1) / kDeviceAreaAlignment * kDeviceAreaAlignment
                          : 0;
}

// Whether y is summed before the product and apart from it.
bool sums_apart(const Problem& problem, const Device& device, const Kernel& kernel) {
    return problem.bias_gradient.data != nullptr &&
           (kernel.sums_y == nullptr || !kernel.sums_y(problem, device));
}

// What is left to the kernel.
Problem given_to_kernel(const Problem& problem, const Device& device, const Choice& choice, void* plain) {
    Problem given = choice.expands ? expanded(problem, plain) : problem;
    if (sums_apart(problem, device, *choice.kernel)) given.bias_gradient = {};
    return given;
}

// The kernel is done with its memory before what is summed apart begins.
size_t workspace_size(const Problem& problem, const Device& device, const Choice& choice) {
    const Problem given = given_to_kernel(problem, device, choice, nullptr);
    const size_t bytes = expansion_bytes(problem, choice) + choice.kernel->workspace_size(given, device);
    const bool apart = sums_apart(problem, device, *choice.kernel);
    return apart ? std::max(bytes, sums_workspace_size(problem, device)) : bytes;
}

// Kernels still ask the CUDA runtime for what they need, such as room for clusters, before they write
// results. So what is summed apart comes last.
void launch(const Problem& problem, const Device& device, const Choice& choice, void* workspace,
            void* stream) {
    const Kernel& kernel = *choice.kernel;
    if (choice.expands) expand_values(problem, workspace, stream);
    void* const rest = static_cast<std::byte*>(workspace) + expansion_bytes(problem, choice);
    const Problem given = given_to_kernel(problem, device, choice, workspace);
    const auto run = [&] { return kernel.launch(given, device, rest, stream); };
    if (kernel.device == DeviceType::cpu)
        run();
    else
        launch_checked(kernel.name, run);
    if (sums_apart(problem, device, kernel)) sum_y(problem, device, workspace, stream);
}

void matmul(const ts_matmul_desc& desc, void* workspace, size_t bytes, void* stream) {
    const Problem problem = check_problem(desc);
    Operands operands(problem, desc);
    const NamedDevice& device = device_of(problem);
    const Choice choice = choose(problem, device, wish_of(desc));
    const Kernel& kernel = *choice.kernel;
    const size_t needed = workspace_size(problem, device.properties, choice);
    check_plan(desc, problem, kernel);
    check_packed(desc, problem, choice);
    check_area(workspace, bytes, needed, "workspace", kernel);
    operands.add_workspace(workspace, needed);
    if (kernel.plan.tile == 0)
        for (const Operand& array : arrays_of(problem.pattern, problem.op)) operands.check_read(array);
    log_choice(problem, device, choice);
    launch(problem, device.properties, choice, workspace, stream);
}

void pack_values(const ts_matmul_desc& desc, void* packed, size_t bytes, void* stream) {
    const Problem problem = check_problem(desc);
    const Choice choice = choose(problem, device_of(problem), wish_of(desc));
    const Kernel& kernel = *choice.kernel;
    const size_t needed = packed_size(problem, choice);
    if (needed == 0) return;
    check_plan(desc, problem, kernel);
    check_area(packed, bytes, needed, "packed", kernel);
    check_packing(problem, desc.plan_bytes, packed, needed);
    launch_checked(kernel.name, [&] { return kernel.pack(problem, packed, stream); });
}

}  // namespace
}  // namespace ts

using namespace ts;

const char* ts_version(void) { return TS_VERSION; }
int32_t ts_abi_version(void) { return TS_ABI_VERSION; }
const char* ts_last_error(void) { return last_error.c_str(); }

const char* ts_architectures(void) {
    const char* list = "";  // where there is no memory for it
    guard([&] { list = architectures().c_str(); });
    return list;
}

int32_t ts_kernel_count(void) {
    int32_t count = 0;
    guard([&] { count = static_cast<int32_t>(registry().size()); });
    return count;
}

const char* ts_status_string(ts_status_t status) {
    switch (status) {
        case TS_SUCCESS:
            return "success";
        case TS_INVALID_ARGUMENT:
            return "invalid argument";
        case TS_INVALID_PATTERN:
            return "invalid pattern";
        case TS_UNSUPPORTED:
            return "unsupported";
        case TS_NO_DEVICE:
            return "no device";
        case TS_WORKSPACE_TOO_SMALL:
            return "workspace too small";
        case TS_CUDA_ERROR:
            return "CUDA error";
        case TS_OUT_OF_MEMORY:
            return "out of memory";
        case TS_INTERNAL_ERROR:
            return "internal error";
        default:
            return "unknown status";
    }
}

ts_status_t ts_kernel_get(int32_t index, ts_kernel_info* info) {
    return guard([&] {
        checked_size(info, "info");
        const Kernel& kernel = kernel_at(index);
        ts_kernel_info result{};
        result.device = static_cast<int32_t>(kernel.device);
        result.min_compute_capability = kernel.min_compute_capability;
        result.ops = kernel.ops;
        result.dtypes = kernel.dtypes;
        result.precision = static_cast<int32_t>(kernel.precision);
        result.plan = plan_number(kernel.plan);
        result.tile_tokens = kernel.tile_tokens;
        result.tile_features = kernel.tile_features;
        result.max_tokens = kernel.max_tokens;
        copy_name(result.name, kernel.name);
        result.storages = kernel.storages;
        result.values_dtypes = kernel.values_dtypes;
        result.result_dtypes = kernel.result_dtypes;
        write_struct(result, info);
    });
}

ts_status_t ts_device_get(int32_t device, int32_t ordinal, ts_device_info* info) {
    return guard([&] {
        checked_size(info, "info");
        require(device == TS_CPU || device == TS_CUDA, "device is ", device, "; allowed are 0 and 1");
        const NamedDevice& found = device == TS_CPU ? cpu_device() : cuda_device(ordinal);
        ts_device_info result{};
        result.device = device;
        result.compute_capability = found.properties.compute_capability;
        result.multiprocessors = found.properties.multiprocessors;
        result.shared_memory = found.properties.shared_memory;
        result.max_cluster = found.properties.max_cluster;
        copy_name(result.name, found.name);
        write_struct(result, info);
    });
}

ts_status_t ts_pattern_validate(const ts_pattern* pattern) {
    return guard([&] { validate_pattern(check_pattern(pattern)); });
}

ts_status_t ts_pattern_transpose(const ts_pattern* source, int32_t* col_ptr, int32_t* row_idx,
                                 int32_t* col_slot) {
    return guard([&] {
        Pattern pattern = check_pattern(source);
        pattern.cols = {};
        validate_pattern(pattern);
        check_transpose(pattern, {col_ptr, row_idx, col_slot});
        transpose_pattern(pattern, col_ptr, row_idx, col_slot);
    });
}

ts_status_t ts_matmul_select(const ts_matmul_desc* source, const ts_device_info* info, int32_t* kernel,
                             char* reason, size_t reason_bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(kernel, "kernel");
        const Problem problem = check_problem(desc);
        const NamedDevice device = described_device(info, problem);
        const Choice choice =
            choose(problem, device, {desc.kernel, desc.prefer, static_cast<Policy>(desc.policy)});
        log_choice(problem, device, choice);
        *kernel = choice.index;
        if (reason == nullptr || reason_bytes == 0) return;
        const std::string text = explain(problem, device, choice);
        reason[text.copy(reason, reason_bytes - 1)] = '\0';
    });
}

ts_status_t ts_plan_size(const ts_pattern* pattern, int32_t kernel, int32_t op, size_t* bytes) {
    return guard([&] {
        check_pointer(bytes, "bytes");
        *bytes = plan_of(pattern, kernel, op).size() * sizeof(int32_t);
    });
}

ts_status_t ts_plan_build(const ts_pattern* pattern, int32_t kernel, int32_t op, void* plan, size_t bytes) {
    return guard([&] {
        const std::vector<int32_t> words = plan_of(pattern, kernel, op);
        const size_t needed = words.size() * sizeof(int32_t);
        if (bytes < needed) fail(TS_WORKSPACE_TOO_SMALL, "bytes is ", bytes, "; the plan needs ", needed);
        require(needed == 0 || plan != nullptr, "plan is null");
        if (needed > 0) std::memcpy(plan, words.data(), needed);
    });
}

ts_status_t ts_plan_key(const ts_pattern* source, int32_t index, int32_t op, int64_t* key) {
    return guard([&] {
        const Pattern pattern = check_pattern(source);
        const Kernel& kernel = kernel_for(index, op);
        check_pointer(key, "key");
        const bool has_plan = kernel.plan.tile != 0;
        if (has_plan) check_plan_shape(pattern, static_cast<Op>(op), kernel.plan);
        *key = has_plan ? plan_key(pattern, static_cast<Op>(op), kernel.plan) : 0;
    });
}

ts_status_t ts_values_packed_size(const ts_matmul_desc* source, size_t* bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(bytes, "bytes");
        const Problem problem = check_problem(desc);
        *bytes = packed_size(problem, choose(problem, device_of(problem), wish_of(desc)));
    });
}

ts_status_t ts_values_pack(const ts_matmul_desc* source, void* packed, size_t packed_bytes,
                           ts_stream_t stream) {
    return guard([&] { pack_values(read_struct(source, "desc"), packed, packed_bytes, stream); });
}

ts_status_t ts_matmul_workspace_size(const ts_matmul_desc* source, size_t* bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(bytes, "bytes");
        const Problem problem = check_problem(desc);
        const NamedDevice& device = device_of(problem);
        *bytes = workspace_size(problem, device.properties, choose(problem, device, wish_of(desc)));
    });
}

ts_status_t ts_values_expand(const ts_matmul_desc* source, void* plain, size_t plain_bytes,
                             ts_stream_t stream) {
    return guard([&] {
        const Problem problem = check_problem(read_struct(source, "desc"));
        require(problem.op != Op::sdd_tn, "op is ", TS_SDD_TN, "; the values are those of dds_nt or dds_nn");
        check_expansion(problem, plain, plain_bytes);
        expand_values(problem, plain, stream);
    });
}

ts_status_t ts_values_compress(const ts_pattern* pattern, int32_t device, int32_t dtype, const void* values,
                               const uint8_t* mask, int32_t transposed, void* compressed, uint32_t* metadata,
                               ts_stream_t stream) {
    return guard([&] {
        require(transposed == 0 || transposed == 1, "transposed is ", transposed, "; allowed are 0 and 1");
        const Compression compression{check_pattern(pattern),
                                      check_device_type(device),
                                      check_value_dtype(dtype),
                                      transposed == 1,
                                      values,
                                      mask,
                                      compressed,
                                      metadata};
        check_compression(compression);
        compress_values(compression, stream);
    });
}

ts_status_t ts_activation_gradient_workspace_size(int32_t dtype, int64_t tokens, int64_t features,
                                                  size_t* bytes) {
    return guard([&] {
        check_pointer(bytes, "bytes");
        const ActivationGradient gradient = check_activation_gradient(dtype, TS_RELU, tokens, features);
        *bytes = activation_gradient_workspace_size(gradient, cuda_device(-1).properties);
    });
}

ts_status_t ts_activation_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                                   const void* z, const void* gradient, void* result, void* bias_gradient,
                                   void* workspace, size_t workspace_bytes, ts_stream_t stream) {
    return guard([&] {
        ActivationGradient of = check_activation_gradient(dtype, activation, tokens, features);
        of.z = z;
        of.gradient = gradient;
        of.result = result;
        of.bias_gradient = bias_gradient;
        check_operands(of);
        const Device& device = cuda_device(-1).properties;
        const size_t needed = activation_gradient_workspace_size(of, device);
        if (workspace_bytes < needed)
            fail(TS_WORKSPACE_TOO_SMALL, "workspace_bytes is ", workspace_bytes, "; ", needed, " are needed");
        require(needed == 0 || workspace != nullptr, "workspace is null");
        check_aligned(workspace, kDeviceAreaAlignment, "workspace");
        check_workspace(of, workspace, needed);
        activation_gradient(of, device, workspace, stream);
    });
}

ts_status_t ts_gate(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                    const ts_matrix* gate, const ts_matrix* factor, const ts_matrix* result,
                    ts_stream_t stream) {
    return guard([&] {
        Gate of = check_gate(dtype, activation, tokens, features, gate, factor);
        of.result = check_gate_matrix(of, result, "result");
        check_operands(of, false);
        cuda_device(-1);  // or why there is none
        multiply_by_gate(of, stream);
    });
}

ts_status_t ts_gate_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                             const ts_matrix* gate, const ts_matrix* factor, const ts_matrix* gradient,
                             const ts_matrix* gate_gradient, const ts_matrix* factor_gradient,
                             ts_stream_t stream) {
    return guard([&] {
        Gate of = check_gate(dtype, activation, tokens, features, gate, factor);
        of.result = check_gate_matrix(of, gradient, "gradient");
        of.of_gate = check_gate_matrix(of, gate_gradient, "gate_gradient");
        of.of_factor = check_gate_matrix(of, factor_gradient, "factor_gradient");
        check_operands(of, true);
        cuda_device(-1);  // or why there is none
        differentiate_gate(of, stream);
    });
}

ts_status_t ts_matmul(const ts_matmul_desc* source, void* workspace, size_t workspace_bytes,
                      ts_stream_t stream) {
    return guard([&] { matmul(read_struct(source, "desc"), workspace, workspace_bytes, stream); });
}

ts_status_t ts_plan_device_size(const ts_pattern* pattern, int32_t kernel, int32_t op, size_t* plan_bytes,
                                size_t* workspace_bytes) {
    return guard([&] {
        const Pattern checked = check_pattern(pattern);
        const Kernel& chosen = kernel_for(kernel, op);
        check_pointer(plan_bytes, "plan_bytes");
        check_pointer(workspace_bytes, "workspace_bytes");
        const DevicePlanBytes bytes = device_plan_bytes(checked, static_cast<Op>(op), chosen);
        *plan_bytes = bytes.plan;
        *workspace_bytes = bytes.workspace;
    });
}

ts_status_t ts_plan_device_build(const ts_pattern* pattern, int32_t kernel, int32_t op, void* plan,
                                 size_t plan_bytes, void* workspace, size_t workspace_bytes,
                                 ts_stream_t stream) {
    return guard([&] {
        const Pattern checked = check_pattern(pattern);
        build_device_plan(checked, static_cast<Op>(op), kernel_for(kernel, op), plan, plan_bytes, workspace,
                          workspace_bytes, stream);
    });
}

ts_status_t ts_pattern_device_transpose_size(const ts_pattern* pattern, size_t* workspace_bytes) {
    return guard([&] {
        const Pattern checked = check_pattern(pattern);
        check_pointer(workspace_bytes, "workspace_bytes");
        *workspace_bytes = device_transpose_bytes(checked);
    });
}

ts_status_t ts_pattern_device_transpose(const ts_pattern* pattern, int32_t* col_ptr, int32_t* row_idx,
                                        int32_t* col_slot, void* workspace, size_t workspace_bytes,
                                        ts_stream_t stream) {
    return guard([&] {
        transpose_on_device(check_pattern(pattern), col_ptr, row_idx, col_slot, workspace, workspace_bytes,
                            stream);
    });
}

ts_status_t ts_arrays_compare(ts_array_pair* pairs, int32_t count, int64_t mark, ts_stream_t stream) {
    return guard([&] {
        check_pointer(pairs, "pairs");
        require(count >= 0 && count <= kMaxPairs, "count is ", count, ", not from 0 to ", kMaxPairs);
        require(mark != 0, "mark is 0, which says that a pair does not differ");
        compare_arrays(pairs, count, mark, stream);
    });
}

ts_status_t ts_matmul_estimate(const ts_matmul_desc* source, const ts_device_info* info, int32_t kernel,
                               double* microseconds) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(microseconds, "microseconds");
        const Problem problem = check_problem(desc);
        const NamedDevice device = described_device(info, problem);
        if (kernel != TS_EXPAND_AND_RUN_DENSE) kernel_at(kernel);
        *microseconds = estimate(problem, device.properties, kernel).value_or(0);
    });
}

ts_status_t ts_measurement_add(const ts_matmul_desc* source, const ts_device_info* info, int32_t kernel,
                               double microseconds, double dense_microseconds) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        const Problem problem = check_problem(desc);
        const NamedDevice device = described_device(info, problem);
        kernel_at(kernel);
        require(microseconds > 0 && std::isfinite(microseconds), "microseconds is ", microseconds,
                "; a number above 0 is expected");
        require(dense_microseconds >= 0 && std::isfinite(dense_microseconds), "dense_microseconds is ",
                dense_microseconds, "; 0 or a number above it is expected");
        estimate(problem, device.properties, kernel);  // refuses a kernel that does not compute it
        add_measurement(problem, device, {kernel, microseconds, dense_microseconds});
    });
}

ts_status_t ts_measurements_clear(void) {
    return guard([] { clear_measurements(); });
}
