#include "product.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace bindings {

void bind_products(nb::module_& m) {
    nb::class_<Product>(m, "Product")
        .def(nb::init<const ts_pattern&, int32_t, int32_t, int32_t, int64_t, int32_t, int32_t, bool, int32_t,
                      int32_t, int32_t, int64_t, int32_t, int64_t, bool, int64_t, int32_t, int32_t, int32_t,
                      int32_t, const std::string&, bool, bool, int32_t, bool, bool, int64_t>(),
             "pattern"_a, "op"_a, "dtype"_a, "device"_a, "tokens"_a, nb::kw_only(), "activation"_a = 0,
             "precision"_a = 0, "accumulate"_a = false, "kernel"_a = 0, "policy"_a = 0, "x_layout"_a = 0,
             "ldx"_a = 0, "y_layout"_a = 0, "ldy"_a = 0, "residual"_a = false, "ldr"_a = 0, "storage"_a = 0,
             "values_dtype"_a = -1, "row_scales"_a = 0, "result_dtype"_a = -1, "prefer"_a = "",
             "gated"_a = false, "bias_gradient"_a = false, "bias_gradient_dtype"_a = -1,
             "accumulate_bias"_a = false, "grouped"_a = false, "x_scales_ld"_a = 0)
        .def("estimate", &Product::estimate, "device_info"_a, "kernel"_a)
        .def("features", &Product::features, "device_info"_a, "kernel"_a)
        .def("add_measurement", &Product::add_measurement, "device_info"_a, "kernel"_a, "microseconds"_a,
             "dense_microseconds"_a)
        .def("select", &Product::select, "device_info"_a)
        .def("resolve", &Product::resolve)
        .def("use_plan", &Product::use_plan, "plan"_a, "bytes"_a, "key"_a)
        .def("packed_size", &Product::packed_size)
        .def("pack", &Product::pack, "values"_a, "packed"_a, "bytes"_a, "stream"_a)
        .def("use_packed", &Product::use_packed, "packed"_a, "bytes"_a, "key"_a)
        .def("workspace_size", &Product::workspace_size)
        .def("expand", &Product::expand, "values"_a, "metadata"_a, "scales"_a, "plain"_a, "bytes"_a,
             "stream"_a)
        .def("run", &Product::run, "x"_a, "y"_a, "values"_a, "bias"_a, "residual"_a, "workspace"_a,
             "stream"_a, "metadata"_a = 0, "scales"_a = 0, "x_scales"_a = 0, "group_offsets"_a = 0);
}

}  // namespace bindings
