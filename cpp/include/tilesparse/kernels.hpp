// Kernels of the library, and devices that they are chosen for.
#ifndef TILESPARSE_KERNELS_HPP_
#define TILESPARSE_KERNELS_HPP_

#include <tilesparse/error.hpp>
#include <tilesparse/types.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace tilesparse {
inline namespace v0_1 {

// A kernel by its number, 1 to ts_kernel_count(). Throws InvalidArgumentError.
inline ts_kernel_info kernel_info(std::int32_t kernel) {
    check_version();
    ts_kernel_info info{};
    info.struct_size = sizeof info;
    check(ts_kernel_get(kernel, &info));
    return info;
}

// All kernels of the library, by number from 1 on.
inline std::vector<ts_kernel_info> kernels() {
    check_version();
    std::vector<ts_kernel_info> infos;
    for (std::int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel) infos.push_back(kernel_info(kernel));
    return infos;
}

// Properties of the CPU, or of a CUDA device by its ordinal; -1 is the current one. Throws NoDeviceError.
inline ts_device_info device_info(Device device, std::int32_t ordinal = -1) {
    check_version();
    ts_device_info info{};
    info.struct_size = sizeof info;
    check(ts_device_get(static_cast<std::int32_t>(device), ordinal, &info));
    return info;
}

// The choice for a product, and its reason.
struct Choice {
    std::int32_t kernel;  // a number, see kernel_info(), or TS_RUN_DENSE
    std::string reason;

    bool is_dense() const { return kernel == TS_RUN_DENSE; }
};

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_KERNELS_HPP_
