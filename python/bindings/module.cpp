// tilesparse._C: the C ABI for Python, in integers and plain objects. Addresses are integers; only `Tensors`
// and what is made with it know tensors, through DLPack. Errors are raised as the classes of
// tilesparse.errors.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>
#include <link.h>

#include <string>
#include <string_view>
#include <vector>

#include "support.h"

using namespace bindings;

namespace {

// The files of all libtilesparse that this process has loaded.
std::vector<std::string> libraries() {
    std::vector<std::string> found;
    const auto look = [](dl_phdr_info* info, size_t, void* data) {
        const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (path.substr(path.rfind('/') + 1).starts_with("libtilesparse"))
            static_cast<std::vector<std::string>*>(data)->emplace_back(path);
        return 0;
    };
    dl_iterate_phdr(look, &found);
    return found;
}

// Refuses another library than the one this module was built with, which the loader may find: LD_LIBRARY_PATH
// comes before the package's own folder, and a program may have loaded one of its own.
void check_library() {
    if (std::string_view(ts_version()) == TS_VERSION && ts_abi_version() == TS_ABI_VERSION) return;
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&ts_version), &info);
    const std::string text =
        std::string("the library ") + (info.dli_fname == nullptr ? "libtilesparse" : info.dli_fname) +
        " is tilesparse " + ts_version() + " (ABI " + std::to_string(ts_abi_version()) +
        "), and this Python package is " TS_VERSION " (ABI " + std::to_string(TS_ABI_VERSION) +
        "); install the package again, and see that neither LD_LIBRARY_PATH nor the "
        "program that Python runs in brings another libtilesparse";
    throw nb::import_error(text.c_str());
}

}  // namespace

NB_MODULE(_C, m) {
    m.doc() = "The C ABI of TileSparse in integers and plain objects.";
    nb::set_leak_warnings(false);  // a descriptor may live as long as the interpreter

    check_library();
    bind_patterns(m);
    bind_devices(m);
    bind_products(m);
    bind_tensors(m);
    bind_calls(m);
    bind_values(m);
    bind_quantization(m);
    bind_plans(m);
    bind_encoder(m);
    bind_jax(m);
    m.def("libraries", &libraries);
    m.def("measurements_clear", [] { check(ts_measurements_clear()); });
    m.def("version", [] { return std::string(ts_version()); });
    m.def("abi_version", &ts_abi_version);
    m.def("architectures", [] { return std::string(ts_architectures()); });
}
