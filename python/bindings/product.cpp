#include "product.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <type_traits>

namespace bindings {
namespace {

// Reads keyword arguments. They are checked by name and type as other arguments are.
ProductOptions options_of(const nb::kwargs& given) {
    ProductOptions options;
    for (const auto [key, value] : given) {
        const auto name = nb::cast<std::string>(key);
        bool known = false;
        options.visit([&, given = nb::handle(value)](const char* field_name, auto& field) {
            if (name != field_name) return;
            known = true;
            if (!nb::try_cast<std::remove_reference_t<decltype(field)>>(given, field))
                throw nb::type_error((name + " has another type").c_str());
        });
        if (!known) throw nb::type_error(("Product has no argument " + name).c_str());
    }
    return options;
}

constexpr const char* kSignature =
    "def __init__(self, pattern: Pattern, op: int, dtype: int, device: int, tokens: int, *, "
    "activation: int = 0, precision: int = 0, kernel: int = 0, policy: int = 0, x_layout: int = 0, "
    "ldx: int = 0, y_layout: int = 0, ldy: int = 0, residual: bool = False, ldr: int = 0, "
    "gated: bool = False, storage: int = 0, values_dtype: int = 0, granularity: int = 0, "
    "x_scales_ld: int = 0, result_dtype: int = 0, accumulate: bool = False, bias_gradient: bool = False, "
    "bias_gradient_dtype: int = 0, accumulate_bias: bool = False, grouped: bool = False, "
    "skip: int = 0, threshold: float = 0, prefer: str = '') -> None";

}  // namespace

void bind_products(nb::module_& m) {
    nb::class_<Product>(m, "Product")
        .def(
            "__init__",
            [](Product* self, const ts_pattern& pattern, int32_t op, int32_t dtype, int32_t device,
               int64_t tokens, const nb::kwargs& options) {
                new (self) Product(pattern, op, dtype, device, tokens, options_of(options));
            },
            "pattern"_a, "op"_a, "dtype"_a, "device"_a, "tokens"_a, "options"_a, nb::sig(kSignature))
        .def("estimate", &Product::estimate, "device_info"_a, "kernel"_a)
        .def("features", &Product::features, "device_info"_a, "kernel"_a)
        .def("add_measurement", &Product::add_measurement, "device_info"_a, "kernel"_a, "microseconds"_a,
             "dense_microseconds"_a)
        .def("select", &Product::select, "device_info"_a)
        .def("resolve", &Product::resolve)
        .def("use_plan", &Product::use_plan, "plan"_a, "bytes"_a, "key"_a)
        .def("prepacked_size", &Product::prepacked_size)
        .def("prepack", &Product::prepack, "values"_a, "prepacked"_a, "bytes"_a, "stream"_a)
        .def("use_prepacked", &Product::use_prepacked, "prepacked"_a, "bytes"_a, "key"_a)
        .def("workspace_size", &Product::workspace_size)
        .def("dequantize", &Product::dequantize, "values"_a, "metadata"_a, "scales"_a, "dense"_a, "bytes"_a,
             "stream"_a)
        .def("run", &Product::run, "x"_a, "y"_a, "values"_a, "bias"_a, "residual"_a, "workspace"_a,
             "stream"_a, "metadata"_a = 0, "scales"_a = 0, "x_scales"_a = 0, "group_offsets"_a = 0);
}

}  // namespace bindings
