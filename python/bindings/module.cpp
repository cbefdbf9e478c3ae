// tilesparse._C: the C ABI for Python, in integers and plain objects. Addresses are integers; nothing
// here knows tensors. Errors are raised as the classes of tilesparse.errors.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tilesparse/tilesparse.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

const char* error_class(ts_status_t status) {
    switch (status) {
        case TS_INVALID_ARGUMENT:
        case TS_WORKSPACE_TOO_SMALL:
            return "InvalidArgumentError";
        case TS_INVALID_PATTERN:
            return "InvalidPatternError";
        case TS_UNSUPPORTED:
            return "UnsupportedError";
        case TS_NO_DEVICE:
            return "NoDeviceError";
        case TS_CUDA_ERROR:
            return "CudaError";
        default:
            return "InternalError";
    }
}

void check(ts_status_t status) {
    if (status == TS_SUCCESS) return;
    if (status == TS_OUT_OF_MEMORY) throw std::bad_alloc();
    const nb::object type = nb::module_::import_("tilesparse.errors").attr(error_class(status));
    PyErr_SetString(type.ptr(), ts_last_error());
    throw nb::python_error();
}

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
T make() {
    T value{};
    value.struct_size = sizeof value;
    return value;
}

ts_pattern make_pattern(int32_t block_rows, int32_t block_cols, int64_t out_features, int64_t in_features,
                        int64_t nnz, uintptr_t row_ptr, uintptr_t col_idx, uintptr_t row_slot,
                        uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot) {
    auto pattern = make<ts_pattern>();
    pattern.block_rows = block_rows;
    pattern.block_cols = block_cols;
    pattern.out_features = out_features;
    pattern.in_features = in_features;
    pattern.nnz = nnz;
    pattern.row_ptr = pointer<int32_t>(row_ptr);
    pattern.col_idx = pointer<int32_t>(col_idx);
    pattern.row_slot = pointer<int32_t>(row_slot);
    pattern.col_ptr = pointer<int32_t>(col_ptr);
    pattern.row_idx = pointer<int32_t>(row_idx);
    pattern.col_slot = pointer<int32_t>(col_slot);
    return pattern;
}

ts_device_info make_device(int32_t device, int32_t compute_capability, int32_t multiprocessors,
                           int32_t shared_memory) {
    auto info = make<ts_device_info>();
    info.device = device;
    info.compute_capability = compute_capability;
    info.multiprocessors = multiprocessors;
    info.shared_memory = shared_memory;
    return info;
}

ts_device_info device_info(int32_t device, int32_t ordinal) {
    auto info = make<ts_device_info>();
    check(ts_device_get(device, ordinal, &info));
    return info;
}

std::vector<ts_kernel_info> kernels() {
    std::vector<ts_kernel_info> all(ts_kernel_count(), make<ts_kernel_info>());
    for (size_t i = 0; i < all.size(); ++i) check(ts_kernel_get(static_cast<int32_t>(i), &all[i]));
    return all;
}

void pattern_transpose(const ts_pattern& pattern, uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot) {
    check(ts_pattern_transpose(&pattern, pointer<int32_t>(col_ptr), pointer<int32_t>(row_idx),
                               pointer<int32_t>(col_slot)));
}

int64_t plan_key(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    int64_t key = 0;
    check(ts_plan_key(&pattern, kernel, op, &key));
    return key;
}

size_t plan_size(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    size_t bytes = 0;
    check(ts_plan_size(&pattern, kernel, op, &bytes));
    return bytes;
}

void plan_build(const ts_pattern& pattern, int32_t kernel, int32_t op, uintptr_t address, size_t bytes) {
    check(ts_plan_build(&pattern, kernel, op, pointer<void>(address), bytes));
}

std::pair<size_t, size_t> plan_device_size(const ts_pattern& pattern, int32_t kernel, int32_t op) {
    size_t plan = 0, workspace = 0;
    check(ts_plan_device_size(&pattern, kernel, op, &plan, &workspace));
    return {plan, workspace};
}

void plan_device_build(const ts_pattern& pattern, int32_t kernel, int32_t op, uintptr_t plan,
                       size_t plan_bytes, uintptr_t workspace, size_t workspace_bytes, uintptr_t stream) {
    check(ts_plan_device_build(&pattern, kernel, op, pointer<void>(plan), plan_bytes,
                               pointer<void>(workspace), workspace_bytes, pointer<CUstream_st>(stream)));
}

size_t pattern_device_transpose_size(const ts_pattern& pattern) {
    size_t bytes = 0;
    check(ts_pattern_device_transpose_size(&pattern, &bytes));
    return bytes;
}

void pattern_device_transpose(const ts_pattern& pattern, uintptr_t col_ptr, uintptr_t row_idx,
                              uintptr_t col_slot, uintptr_t workspace, size_t workspace_bytes,
                              uintptr_t stream) {
    check(ts_pattern_device_transpose(&pattern, pointer<int32_t>(col_ptr), pointer<int32_t>(row_idx),
                                      pointer<int32_t>(col_slot), pointer<void>(workspace), workspace_bytes,
                                      pointer<CUstream_st>(stream)));
}

// One product but for the addresses of its operands: what stays the same from call to call. Kept by those who
// make it together with the memory it names.
class Product {
  public:
    Product(const ts_pattern& pattern, int32_t op, int32_t dtype, int32_t device, int64_t tokens,
            int32_t activation, int32_t precision, bool accumulate, int32_t kernel, int32_t policy,
            int32_t x_layout, int64_t ldx, int32_t y_layout, int64_t ldy, bool residual, int64_t ldr)
        : pattern_(pattern), desc_(make<ts_matmul_desc>()) {
        desc_.op = op;
        desc_.dtype = dtype;
        desc_.device = device;
        desc_.tokens = tokens;
        desc_.activation = activation;
        desc_.precision = precision;
        desc_.accumulate = accumulate;
        desc_.kernel = kernel;
        desc_.policy = policy;
        desc_.x = {nullptr, ldx, x_layout, 0};
        desc_.y = {nullptr, ldy, y_layout, 0};
        // Any address will do until there is one: it is not followed.
        desc_.residual = {residual ? this : nullptr, ldr, y_layout, 0};
    }

    // The kernel for that device, or TS_EXPAND_AND_RUN_DENSE, and why.
    std::pair<int32_t, std::string> select(const ts_device_info& device) const {
        const auto desc = described();
        int32_t index = -1;
        char reason[256];
        check(ts_matmul_select(&desc, &device, &index, reason, sizeof reason));
        return {index, reason};
    }

    // Settles on the kernel for the current device: its index, and the `plan` of its ts_kernel_info.
    std::pair<int32_t, int32_t> resolve() {
        const auto [index, reason] = select(device_info(desc_.device, -1));
        auto chosen = make<ts_kernel_info>();
        check(ts_kernel_get(index, &chosen));
        desc_.kernel = index + 1;
        return {index, chosen.plan};
    }

    void use_plan(uintptr_t plan, size_t bytes, int64_t key) {
        desc_.plan = pointer<void>(plan);
        desc_.plan_bytes = bytes;
        desc_.plan_key = key;
    }

    size_t packed_size() const {
        const auto desc = described();
        size_t bytes = 0;
        check(ts_values_packed_size(&desc, &bytes));
        return bytes;
    }

    void pack(uintptr_t values, uintptr_t packed, size_t bytes, uintptr_t stream) const {
        auto desc = described();
        desc.values = pointer<void>(values);
        desc.packed = nullptr;
        check(ts_values_pack(&desc, pointer<void>(packed), bytes, pointer<CUstream_st>(stream)));
    }

    void use_packed(uintptr_t packed, size_t bytes) {
        desc_.packed = pointer<void>(packed);
        desc_.packed_bytes = bytes;
    }

    size_t workspace_size() {
        const auto desc = described();
        check(ts_matmul_workspace_size(&desc, &workspace_bytes_));
        return workspace_bytes_;
    }

    void run(uintptr_t x, uintptr_t y, uintptr_t values, uintptr_t bias, uintptr_t residual,
             uintptr_t workspace, uintptr_t stream) const {
        ts_matmul_desc desc = described();
        desc.x.data = pointer<void>(x);
        desc.y.data = pointer<void>(y);
        desc.values = pointer<void>(values);
        desc.bias = pointer<void>(bias);
        desc.residual.data = pointer<void>(residual);
        ts_status_t status;
        if (desc.device == TS_CPU) {
            const nb::gil_scoped_release release;  // a product on the CPU takes long; a launch does not
            status = ts_matmul(&desc, pointer<void>(workspace), workspace_bytes_, nullptr);
        } else {
            status =
                ts_matmul(&desc, pointer<void>(workspace), workspace_bytes_, pointer<CUstream_st>(stream));
        }
        check(status);
    }

  private:
    // The descriptor as of now: a copy of this object has a pattern of its own.
    ts_matmul_desc described() const {
        ts_matmul_desc desc = desc_;
        desc.pattern = &pattern_;
        return desc;
    }

    ts_pattern pattern_;
    ts_matmul_desc desc_;
    size_t workspace_bytes_ = 0;
};

}  // namespace

NB_MODULE(_C, m) {
    m.doc() = "The C ABI of TileSparse in integers and plain objects.";
    nb::set_leak_warnings(false);  // a descriptor may live as long as the interpreter

    nb::class_<ts_pattern>(m, "Pattern")
        .def(
            "__init__",
            [](ts_pattern* self, int32_t block_rows, int32_t block_cols, int64_t out_features,
               int64_t in_features, int64_t nnz, uintptr_t row_ptr, uintptr_t col_idx, uintptr_t row_slot,
               uintptr_t col_ptr, uintptr_t row_idx, uintptr_t col_slot) {
                new (self) ts_pattern(make_pattern(block_rows, block_cols, out_features, in_features, nnz,
                                                   row_ptr, col_idx, row_slot, col_ptr, row_idx, col_slot));
            },
            "block_rows"_a, "block_cols"_a, "out_features"_a, "in_features"_a, "nnz"_a, "row_ptr"_a,
            "col_idx"_a, "row_slot"_a, "col_ptr"_a = 0, "row_idx"_a = 0, "col_slot"_a = 0);

    nb::class_<ts_device_info>(m, "DeviceInfo")
        .def(
            "__init__",
            [](ts_device_info* self, int32_t device, int32_t compute_capability, int32_t multiprocessors,
               int32_t shared_memory) {
                new (self)
                    ts_device_info(make_device(device, compute_capability, multiprocessors, shared_memory));
            },
            "device"_a, "compute_capability"_a, "multiprocessors"_a, "shared_memory"_a)
        .def_ro("device", &ts_device_info::device)
        .def_ro("compute_capability", &ts_device_info::compute_capability)
        .def_ro("multiprocessors", &ts_device_info::multiprocessors)
        .def_ro("shared_memory", &ts_device_info::shared_memory)
        .def_prop_ro("name", [](const ts_device_info& self) { return std::string(self.name); });

    nb::class_<ts_kernel_info>(m, "KernelInfo")
        .def_ro("device", &ts_kernel_info::device)
        .def_ro("min_compute_capability", &ts_kernel_info::min_compute_capability)
        .def_ro("ops", &ts_kernel_info::ops)
        .def_ro("dtypes", &ts_kernel_info::dtypes)
        .def_ro("precision", &ts_kernel_info::precision)
        .def_ro("plan", &ts_kernel_info::plan)
        .def_ro("tile_tokens", &ts_kernel_info::tile_tokens)
        .def_ro("tile_features", &ts_kernel_info::tile_features)
        .def_ro("max_tokens", &ts_kernel_info::max_tokens)
        .def_prop_ro("name", [](const ts_kernel_info& self) { return std::string(self.name); });

    nb::class_<Product>(m, "Product")
        .def(nb::init<const ts_pattern&, int32_t, int32_t, int32_t, int64_t, int32_t, int32_t, bool, int32_t,
                      int32_t, int32_t, int64_t, int32_t, int64_t, bool, int64_t>(),
             "pattern"_a, "op"_a, "dtype"_a, "device"_a, "tokens"_a, nb::kw_only(), "activation"_a = 0,
             "precision"_a = 0, "accumulate"_a = false, "kernel"_a = 0, "policy"_a = 0, "x_layout"_a = 0,
             "ldx"_a = 0, "y_layout"_a = 0, "ldy"_a = 0, "residual"_a = false, "ldr"_a = 0)
        .def("select", &Product::select, "device_info"_a)
        .def("resolve", &Product::resolve)
        .def("use_plan", &Product::use_plan, "plan"_a, "bytes"_a, "key"_a)
        .def("packed_size", &Product::packed_size)
        .def("pack", &Product::pack, "values"_a, "packed"_a, "bytes"_a, "stream"_a)
        .def("use_packed", &Product::use_packed, "packed"_a, "bytes"_a)
        .def("workspace_size", &Product::workspace_size)
        .def("run", &Product::run, "x"_a, "y"_a, "values"_a, "bias"_a, "residual"_a, "workspace"_a,
             "stream"_a);

    m.def("version", [] { return std::string(ts_version()); });
    m.def("abi_version", &ts_abi_version);
    m.def("architectures", [] { return std::string(ts_architectures()); });
    m.def("kernels", &kernels);
    m.def("device_info", &device_info, "device"_a, "ordinal"_a = -1);
    m.def(
        "pattern_validate", [](const ts_pattern& pattern) { check(ts_pattern_validate(&pattern)); },
        "pattern"_a);
    m.def("pattern_transpose", &pattern_transpose, "pattern"_a, "col_ptr"_a, "row_idx"_a, "col_slot"_a);
    m.def("plan_key", &plan_key, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_size", &plan_size, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_build", &plan_build, "pattern"_a, "kernel"_a, "op"_a, "address"_a, "bytes"_a);
    m.def("plan_device_size", &plan_device_size, "pattern"_a, "kernel"_a, "op"_a);
    m.def("plan_device_build", &plan_device_build, "pattern"_a, "kernel"_a, "op"_a, "plan"_a, "plan_bytes"_a,
          "workspace"_a, "workspace_bytes"_a, "stream"_a);
    m.def("pattern_device_transpose_size", &pattern_device_transpose_size, "pattern"_a);
    m.def("pattern_device_transpose", &pattern_device_transpose, "pattern"_a, "col_ptr"_a, "row_idx"_a,
          "col_slot"_a, "workspace"_a, "workspace_bytes"_a, "stream"_a);
}
