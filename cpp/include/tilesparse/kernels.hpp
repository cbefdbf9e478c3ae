// Kernels of the library, and devices that they are chosen for.
#ifndef TILESPARSE_KERNELS_HPP_
#define TILESPARSE_KERNELS_HPP_

#include <tilesparse/error.hpp>
#include <tilesparse/types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tilesparse {
inline namespace v0_1 {

// All kernels of the library, in the order of their indices.
inline std::vector<ts_kernel_info> kernels() {
    check_version();
    std::vector<ts_kernel_info> infos(static_cast<std::size_t>(ts_kernel_count()));
    for (std::size_t i = 0; i < infos.size(); ++i) {
        infos[i].struct_size = sizeof infos[i];
        check(ts_kernel_get(static_cast<std::int32_t>(i), &infos[i]));
    }
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
    std::int32_t kernel;  // an index of kernels(), or TS_RUN_DENSE
    std::string reason;

    bool is_dense() const { return kernel == TS_RUN_DENSE; }
};

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_KERNELS_HPP_
