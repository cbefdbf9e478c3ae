// Devices and the kernels of the library.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "devices.h"
#include "support.h"

namespace bindings {
namespace {

ts_device_info make_device(int32_t device, int32_t compute_capability, int32_t multiprocessors,
                           int32_t shared_memory, const std::string& name, int32_t max_cluster) {
    auto info = make<ts_device_info>();
    copy_text(info.name, name, "name");
    info.device = device;
    info.compute_capability = compute_capability;
    info.multiprocessors = multiprocessors;
    info.shared_memory = shared_memory;
    info.max_cluster = max_cluster;
    return info;
}

std::vector<ts_kernel_info> kernels() {
    std::vector<ts_kernel_info> all(ts_kernel_count(), make<ts_kernel_info>());
    for (size_t i = 0; i < all.size(); ++i) check(ts_kernel_get(static_cast<int32_t>(i + 1), &all[i]));
    return all;
}

}  // namespace

ts_device_info device_info(int32_t device, int32_t ordinal) {
    auto info = make<ts_device_info>();
    check(ts_device_get(device, ordinal, &info));
    return info;
}

void bind_devices(nb::module_& m) {
    nb::class_<ts_device_info>(m, "DeviceInfo")
        .def(
            "__init__",
            [](ts_device_info* self, int32_t device, int32_t compute_capability, int32_t multiprocessors,
               int32_t shared_memory, const std::string& name, int32_t max_cluster) {
                new (self) ts_device_info(make_device(device, compute_capability, multiprocessors,
                                                      shared_memory, name, max_cluster));
            },
            "device"_a, "compute_capability"_a, "multiprocessors"_a, "shared_memory"_a, "name"_a = "",
            "max_cluster"_a = 0)
        .def_ro("device", &ts_device_info::device)
        .def_ro("compute_capability", &ts_device_info::compute_capability)
        .def_ro("multiprocessors", &ts_device_info::multiprocessors)
        .def_ro("shared_memory", &ts_device_info::shared_memory)
        .def_ro("max_cluster", &ts_device_info::max_cluster)
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
        .def_ro("storages", &ts_kernel_info::storages)
        .def_ro("values_dtypes", &ts_kernel_info::values_dtypes)
        .def_ro("result_dtypes", &ts_kernel_info::result_dtypes)
        .def_prop_ro("name", [](const ts_kernel_info& self) { return std::string(self.name); });

    m.def("kernels", &kernels);
    m.def("device_info", &device_info, "device"_a, "ordinal"_a = -1);
}

}  // namespace bindings
