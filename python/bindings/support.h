// Shared by all groups of bindings: errors, addresses, structures, and the function that defines each group.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "tilesparse/tilesparse.h"

namespace bindings {

namespace nb = nanobind;
using namespace nb::literals;

using AnyTuple = nb::typed<nb::tuple, nb::any, nb::ellipsis>;

// Raises the class of tilesparse.errors for a status that is not TS_SUCCESS.
void check(ts_status_t status);

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Python has kernels by their place in kernels(), from 0; the C ABI has numbers from 1. TS_RUN_DENSE, which
// is negative, and other numbers that are no kernel stay as they are.
inline int32_t number_of(int32_t index) { return index < 0 ? index : index + 1; }
inline int32_t index_of(int32_t number) { return number < 0 ? number : number - 1; }

template <class T>
T make() {
    T value{};
    value.struct_size = sizeof value;
    return value;
}

// Copies a text into a field, and leaves a zero behind it; what is too long is no name.
template <size_t size>
void copy_text(char (&target)[size], const std::string& source, const char* name) {
    if (source.size() >= size)
        throw nb::value_error((std::string(name) + " must have at most " + std::to_string(size - 1) +
                               " bytes, got " + std::to_string(source.size()))
                                  .c_str());
    source.copy(target, size - 1);
}

void bind_patterns(nb::module_& m);
void bind_devices(nb::module_& m);
void bind_products(nb::module_& m);
void bind_tensors(nb::module_& m);
void bind_calls(nb::module_& m);
void bind_values(nb::module_& m);
void bind_quantization(nb::module_& m);
void bind_plans(nb::module_& m);
void bind_encoder(nb::module_& m);
void bind_jax(nb::module_& m);

}  // namespace bindings
