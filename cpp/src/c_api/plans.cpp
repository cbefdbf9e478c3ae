// The public functions on plans.

#include <cstring>
#include <vector>

#include "abi.h"
#include "c_api/guard.h"
#include "descriptors.h"
#include "device.h"
#include "pattern.h"
#include "plan/device_plan.h"
#include "plan/host_plan.h"
#include "registry.h"

namespace ts {
namespace {

const Kernel& kernel_for(int32_t number, int32_t op) {
    require(op >= TS_DDS_NT && op <= TS_SDD_TN, "op must be 0 to ", TS_SDD_TN, ", got ", op);
    const Kernel& kernel = kernel_at(number);
    require(kernel.covers(static_cast<Op>(op)), "op must be one that kernel ", kernel.name, " computes, got ",
            op);
    return kernel;
}

std::vector<int32_t> plan_of(const ts_pattern* source, int32_t number, int32_t op) {
    const Pattern pattern = check_pattern(source);
    const Kernel& kernel = kernel_for(number, op);
    require(pattern.cols.ptr != nullptr, "pattern.col_ptr must not be null: a plan needs both directions");
    validate_pattern(pattern);
    return build_plan(pattern, static_cast<Op>(op), kernel.plan);
}

}  // namespace

}  // namespace ts

using namespace ts;

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
        if (bytes < needed)
            fail(TS_WORKSPACE_TOO_SMALL, "bytes must be at least ", needed, " for this plan, got ", bytes);
        require(needed == 0 || plan != nullptr, "plan must not be null");
        if (needed > 0) std::memcpy(plan, words.data(), needed);
    });
}

ts_status_t ts_plan_key(const ts_pattern* source, int32_t number, int32_t op, int64_t* key) {
    return guard([&] {
        const Pattern pattern = check_pattern(source);
        const Kernel& kernel = kernel_for(number, op);
        check_pointer(key, "key");
        const bool has_plan = kernel.plan.tile != 0;
        if (has_plan) check_plan_shape(pattern, static_cast<Op>(op), kernel.plan);
        *key = has_plan ? plan_key(pattern, static_cast<Op>(op), kernel.plan) : 0;
    });
}

ts_status_t ts_plan_check(void) {
    return guard([] { check_plans(); });
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
