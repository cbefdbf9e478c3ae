// Plans, made on the host and on the GPU.
#include <nanobind/stl/pair.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "support.h"

namespace bindings {
namespace {

int64_t plan_key(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    int64_t key = 0;
    check(ts_plan_key(&pattern, number_of(kernel), op, &key));
    return key;
}

size_t plan_size(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    size_t bytes = 0;
    check(ts_plan_size(&pattern, number_of(kernel), op, &bytes));
    return bytes;
}

void plan_build(const ts_pattern& pattern, int32_t kernel, int32_t op, uintptr_t address, size_t bytes) {
    check(ts_plan_build(&pattern, number_of(kernel), op, pointer<void>(address), bytes));
}

std::pair<size_t, size_t> plan_device_size(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    size_t plan = 0, workspace = 0;
    check(ts_plan_device_size(&pattern, number_of(kernel), op, &plan, &workspace));
    return {plan, workspace};
}

void plan_device_build(const ts_pattern& pattern, int32_t kernel, int32_t op, uintptr_t plan,
                       size_t plan_bytes, uintptr_t workspace, size_t workspace_bytes, uintptr_t stream) {
    check(ts_plan_device_build(&pattern, number_of(kernel), op, pointer<void>(plan), plan_bytes,
                               pointer<void>(workspace), workspace_bytes, pointer<CUstream_st>(stream)));
}

}  // namespace

void bind_plans(nb::module_& m) {
    m.def("plan_key", &plan_key, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_size", &plan_size, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_build", &plan_build, "pattern"_a, "kernel"_a, "op"_a, "address"_a, "bytes"_a);
    m.def("plan_device_size", &plan_device_size, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_device_build", &plan_device_build, "pattern"_a, "kernel"_a, "op"_a, "plan"_a, "plan_bytes"_a,
          "workspace"_a, "workspace_bytes"_a, "stream"_a);
}

}  // namespace bindings
