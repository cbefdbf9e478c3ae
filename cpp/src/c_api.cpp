// The public functions: each is one guard around calls into the library.

#include <cstring>
#include <new>
#include <string>

#include "device.h"
#include "device_plan.h"
#include "dispatch.h"
#include "error.h"
#include "pattern.h"
#include "plan.h"
#include "problem.h"
#include "registry.h"

namespace ts {
namespace {

thread_local std::string last_error;

template <class Body>
ts_status_t guard(Body body) {
    try {
        body();
        return TS_SUCCESS;
    } catch (const Error& error) {
        last_error = error.what();
        return error.status();
    } catch (const std::bad_alloc&) {
        last_error = "out of host memory";
        return TS_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
        last_error = error.what();
        return TS_INTERNAL_ERROR;
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

const Device& device_of(const Problem& problem) {
    return problem.device == DeviceType::cpu ? cpu_device().properties : cuda_device(-1).properties;
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

// A CUDA kernel without a plan walks the block rows of its results.
void check_rows(const Problem& problem, const Kernel& kernel) {
    const Adjacency& rows = problem.block_rows();
    require(
        rows.ptr != nullptr && (problem.pattern.nnz == 0 || (rows.idx != nullptr && rows.slot != nullptr)),
        "pattern.", problem.forward() ? "row_ptr, col_idx or row_slot" : "col_ptr, row_idx or col_slot",
        " is null; kernel ", kernel.name, " reads them");
}

void check_plan(const ts_matmul_desc& desc, const Problem& problem, const Kernel& kernel) {
    if (kernel.plan.tile == 0) {
        if (kernel.device == DeviceType::cuda) check_rows(problem, kernel);
        return;
    }
    require(desc.plan != nullptr, "plan is null; kernel ", kernel.name, " needs one from ts_plan_build");
    if (desc.plan_bytes < sizeof(PlanHeader))
        fail(TS_WORKSPACE_TOO_SMALL, "plan_bytes is ", desc.plan_bytes, ", less than a plan's header of ",
             sizeof(PlanHeader));
}

void check_workspace(const Kernel& kernel, size_t needed, const void* workspace, size_t bytes) {
    if (needed == 0) return;
    if (bytes < needed)
        fail(TS_WORKSPACE_TOO_SMALL, "workspace_bytes is ", bytes, "; kernel ", kernel.name, " needs ",
             needed);
    require(workspace != nullptr, "workspace is null");
    const size_t alignment = kernel.device == DeviceType::cpu ? 64 : 256;
    require(reinterpret_cast<uintptr_t>(workspace) % alignment == 0, "workspace is at address ", workspace,
            ", not aligned to ", alignment, " bytes");
}

void matmul(const ts_matmul_desc& desc, void* workspace, size_t bytes, void* stream) {
    const Problem problem = check_problem(desc, true);
    const Device& device = device_of(problem);
    const Choice choice = choose(problem, device, desc.kernel);
    check_plan(desc, problem, *choice.kernel);
    check_workspace(*choice.kernel, choice.kernel->workspace_size(problem, device), workspace, bytes);
    log_choice(problem, device, choice);
    check_launch(choice.kernel->launch(problem, device, workspace, stream), choice.kernel->name);
}

}  // namespace
}  // namespace ts

using namespace ts;

const char* ts_version(void) { return TS_VERSION; }
int32_t ts_abi_version(void) { return TS_ABI_VERSION; }
const char* ts_last_error(void) { return last_error.c_str(); }
const char* ts_architectures(void) { return architectures().c_str(); }
int32_t ts_kernel_count(void) { return static_cast<int32_t>(registry().size()); }

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
        read_struct(info, "info");
        const Kernel& kernel = kernel_at(index);
        ts_kernel_info result{};
        result.struct_size = sizeof result;
        result.device = static_cast<int32_t>(kernel.device);
        result.min_compute_capability = kernel.min_compute_capability;
        result.ops = kernel.ops;
        result.dtypes = kernel.dtypes;
        result.precision = static_cast<int32_t>(kernel.precision);
        result.plan = plan_key(kernel.plan);
        result.tile_tokens = kernel.tile_tokens;
        result.tile_features = kernel.tile_features;
        result.max_tokens = kernel.max_tokens;
        copy_name(result.name, kernel.name);
        *info = result;
    });
}

ts_status_t ts_device_get(int32_t device, int32_t ordinal, ts_device_info* info) {
    return guard([&] {
        read_struct(info, "info");
        require(device == TS_CPU || device == TS_CUDA, "device is ", device, "; allowed are 0 and 1");
        const NamedDevice& found = device == TS_CPU ? cpu_device() : cuda_device(ordinal);
        ts_device_info result{};
        result.struct_size = sizeof result;
        result.device = device;
        result.compute_capability = found.properties.compute_capability;
        result.multiprocessors = found.properties.multiprocessors;
        result.shared_memory = found.properties.shared_memory;
        copy_name(result.name, found.name);
        *info = result;
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
        require(col_ptr != nullptr, "col_ptr is null");
        require(pattern.nnz == 0 || row_idx != nullptr, "row_idx is null");
        require(pattern.nnz == 0 || col_slot != nullptr, "col_slot is null");
        transpose_pattern(pattern, col_ptr, row_idx, col_slot);
    });
}

ts_status_t ts_matmul_select(const ts_matmul_desc* source, const ts_device_info* info, int32_t* kernel,
                             char* reason, size_t reason_bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        const ts_device_info device = read_struct(info, "device");
        require(kernel != nullptr, "kernel is null");
        Problem problem = check_problem(desc, false);
        require(device.device == desc.device, "device.device is ", device.device, ", but desc.device is ",
                desc.device);
        require(desc.policy >= TS_POLICY_SPARSE && desc.policy <= TS_POLICY_DENSE, "policy is ", desc.policy,
                "; allowed are 0 to ", TS_POLICY_DENSE);
        const Device properties{problem.device, device.compute_capability, device.multiprocessors,
                                device.shared_memory};
        const Choice choice = choose(problem, properties, desc.kernel, static_cast<Policy>(desc.policy));
        if (choice.index == TS_EXPAND_AND_RUN_DENSE) log_choice(problem, properties, choice);
        *kernel = choice.index;
        if (reason == nullptr || reason_bytes == 0) return;
        std::strncpy(reason, explain(problem, properties, choice).c_str(), reason_bytes - 1);
        reason[reason_bytes - 1] = '\0';
    });
}

ts_status_t ts_plan_size(const ts_pattern* pattern, int32_t kernel, int32_t op, size_t* bytes) {
    return guard([&] {
        require(bytes != nullptr, "bytes is null");
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

ts_status_t ts_matmul_workspace_size(const ts_matmul_desc* source, size_t* bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        require(bytes != nullptr, "bytes is null");
        const Problem problem = check_problem(desc, false);
        const Device& device = device_of(problem);
        *bytes = choose(problem, device, desc.kernel).kernel->workspace_size(problem, device);
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
        require(plan_bytes != nullptr, "plan_bytes is null");
        require(workspace_bytes != nullptr, "workspace_bytes is null");
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
        require(workspace_bytes != nullptr, "workspace_bytes is null");
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
