#include "product.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "abi.h"
#include "bias_gradient.h"
#include "descriptors.h"
#include "error.h"
#include "neurons.h"
#include "operands.h"
#include "pattern.h"
#include "plan/host_plan.h"
#include "storage.h"

namespace ts {
namespace {

// Kernels without a plan find blocks by the pattern's arrays.
void check_pattern_arrays(const Pattern& pattern, Op op, DeviceType device, const std::string& reader) {
    const std::array<Operand, 3> arrays = arrays_of(pattern, op);
    for (int i = 0; i < (pattern.nnz > 0 ? 3 : 1); ++i) {
        const auto& [name, span] = arrays[i];
        require(span.begin != 0, name, " must not be null: ", reader, " reads it");
        check_aligned(reinterpret_cast<const void*>(span.begin), sizeof(int32_t), name);
    }
    if (device == DeviceType::cpu) check_bounds(pattern, op == Op::dds_nn);
}

// The plan, or what a kernel without one reads in its place.
void check_plan(const ts_matmul_desc& desc, const Problem& problem, const Kernel& kernel) {
    if (kernel.plan.tile == 0)
        return check_pattern_arrays(problem.pattern, problem.op, kernel.device,
                                    std::string("kernel ") + kernel.name);
    require(desc.plan.data != nullptr, "plan.data must not be null: kernel ", kernel.name,
            " needs one from ts_plan_build or ts_plan_device_build");
    if (desc.plan.bytes < sizeof(PlanHeader))
        fail(TS_WORKSPACE_TOO_SMALL, "plan.bytes must be at least ", sizeof(PlanHeader),
             ", a plan's header, got ", desc.plan.bytes);
    if (desc.plan.key == 0) return;
    const int32_t key = plan_key(problem.pattern, problem.op, kernel.plan);
    require(desc.plan.key == key, "plan.key must be ", key, ", the key of plans for kernel ", kernel.name,
            ", which computes this, got ", desc.plan.key,
            "; set kernel to the one that the plan was made for");
}

// The caller's memory, of which `needed` bytes are used.
void check_area(const void* area, size_t bytes, size_t needed, const char* name, const char* separator,
                DeviceType device, const char* of) {
    if (needed == 0) return;
    if (bytes < needed)
        fail(TS_WORKSPACE_TOO_SMALL, name, separator, "bytes must be at least ", needed, " for ", of,
             ", got ", bytes);
    require(area != nullptr, name, " must not be null");
    check_aligned(area, device == DeviceType::cpu ? 64 : kDeviceAreaAlignment, name);
}

void check_area(const void* area, size_t bytes, size_t needed, const char* name, const char* separator,
                const Kernel& kernel) {
    check_area(area, bytes, needed, name, separator, kernel.device,
               (std::string("kernel ") + kernel.name).c_str());
}

// The caller's prepacked values, if the kernel reads any. They lie in the order of the plan and have its key.
void check_prepacked(const ts_matmul_desc& desc, const Problem& problem, const Choice& choice) {
    const ts_prepared& prepacked = desc.prepacked;
    if (prepacked.data == nullptr) return;
    const size_t needed = prepacked_size(problem, choice);
    if (needed == 0) return;
    const Kernel& kernel = *choice.kernel;
    if (prepacked.key != 0) {
        const int32_t key = plan_key(problem.pattern, problem.op, kernel.plan);
        require(prepacked.key == key, "prepacked.key must be ", key, ", the key of kernel ", kernel.name,
                ", which computes this, got ", prepacked.key,
                "; set kernel to the one that the values were prepacked for, or prepack them for this one");
    }
    check_area(prepacked.data, prepacked.bytes, needed, "prepacked", ".", kernel);
}

// Dense blocks, if the kernel needs them, lie before its own workspace.
size_t dense_bytes(const Problem& problem, const Choice& choice) {
    const auto bytes = static_cast<size_t>(problem.dense_bytes());
    return choice.dequantizes
               ? (bytes + kDeviceAreaAlignment - 1) / kDeviceAreaAlignment * kDeviceAreaAlignment
               : 0;
}

// True if the gradient of the bias is summed apart from the product.
bool sums_apart(const Problem& problem, const Choice& choice) {
    return problem.bias_gradient.data != nullptr && !choice.decision.sums_y;
}

// The problem that the kernel is given.
Problem given_to_kernel(const Problem& problem, const Choice& choice, void* dense) {
    Problem given = choice.dequantizes ? with_dense_blocks(problem, dense) : problem;
    if (sums_apart(problem, choice)) given.bias_gradient = {};
    return given;
}

// Kernels still ask the CUDA runtime for what they need, such as room for clusters, before they write
// results. So what is summed apart comes last.
void launch(const Problem& problem, const Device& device, const Choice& choice, void* workspace,
            void* stream) {
    const Kernel& kernel = *choice.kernel;
    if (choice.dequantizes) dequantize_values(problem, workspace, stream);
    void* const rest = static_cast<std::byte*>(workspace) + dense_bytes(problem, choice);
    Problem given = given_to_kernel(problem, choice, workspace);
    if (kernel.plan.tile > 0) given.plan_report = plan_report(choice.number);
    const auto run = [&] { return kernel.launch(given, device, choice.decision, rest, stream); };
    if (kernel.device == DeviceType::cpu)
        run();
    else
        launch_checked(kernel.name, run);
    if (sums_apart(problem, choice)) sum_y(problem, device, workspace, stream);
}

}  // namespace

const NamedDevice& device_of(const Problem& problem) {
    return problem.device == DeviceType::cpu ? cpu_device() : cuda_device(-1);
}

Wish wish_of(const ts_matmul_desc& desc) { return {desc.kernel, desc.prefer, Policy::sparse}; }

size_t prepacked_size(const Problem& problem, const Choice& choice) {
    const bool prepacks =
        choice.kernel->prepacked_size != nullptr && !choice.dequantizes && !problem.grouped();
    return prepacks ? choice.kernel->prepacked_size(problem) : 0;
}

size_t workspace_size(const Problem& problem, const Device& device, const Choice& choice) {
    const Problem given = given_to_kernel(problem, choice, nullptr);
    const size_t bytes =
        dense_bytes(problem, choice) + choice.kernel->workspace_size(given, device, choice.decision);
    const bool apart = sums_apart(problem, choice);
    return apart ? std::max(bytes, sums_workspace_size(problem, device)) : bytes;
}

void check_read(const ts_matmul_desc& desc, const Problem& problem, const Choice& choice) {
    check_plan(desc, problem, *choice.kernel);
    check_prepacked(desc, problem, choice);
}

void check_workspace(const void* workspace, size_t bytes, size_t needed, DeviceType device, const char* of) {
    check_area(workspace, bytes, needed, "workspace", "_", device, of);
}

void matmul(const ts_matmul_desc& desc, void* workspace, size_t bytes, void* stream) {
    const Problem problem = check_problem(desc);
    Operands operands(problem, desc);
    const NamedDevice& device = device_of(problem);
    if (problem.device == DeviceType::cuda) check_plans();
    if (problem.skip != Skip::nothing) {
        const size_t needed = skip_workspace_size(problem, device.properties);
        const Op order = reads_by_column(problem) ? Op::dds_nn : Op::dds_nt;
        check_pattern_arrays(problem.pattern, order, problem.device, "a product with skip");
        check_workspace(workspace, bytes, needed, problem.device, "a product with skip");
        operands.add_workspace(workspace, needed);
        for (const Operand& array : arrays_of(problem.pattern, order)) operands.check_read(array);
        return multiply_skipping(problem, device.properties, workspace, stream);
    }
    const Choice choice = choose(problem, device, wish_of(desc));
    const Kernel& kernel = *choice.kernel;
    const size_t needed = workspace_size(problem, device.properties, choice);
    check_read(desc, problem, choice);
    check_area(workspace, bytes, needed, "workspace", "_", kernel);
    operands.add_workspace(workspace, needed);
    if (kernel.plan.tile == 0)
        for (const Operand& array : arrays_of(problem.pattern, problem.op)) operands.check_read(array);
    log_choice(problem, device, choice);
    launch(problem, device.properties, choice, workspace, stream);
}

void prepack_values(const ts_matmul_desc& desc, void* prepacked, size_t bytes, void* stream) {
    Problem problem = check_problem(desc);
    const Choice choice = choose(problem, device_of(problem), wish_of(desc));
    const Kernel& kernel = *choice.kernel;
    const size_t needed = prepacked_size(problem, choice);
    if (needed == 0) return;
    const bool on_cpu = kernel.device == DeviceType::cpu;
    if (!on_cpu) check_plans();
    if (!on_cpu) problem.plan_report = plan_report(choice.number);
    check_plan(desc, problem, kernel);
    check_area(prepacked, bytes, needed, "prepacked", "_", kernel);
    check_prepacking(problem, desc.plan.bytes, prepacked, needed);
    if (on_cpu)
        kernel.prepack(problem, prepacked, stream);
    else
        launch_checked(kernel.name, [&] { return kernel.prepack(problem, prepacked, stream); });
}

}  // namespace ts
