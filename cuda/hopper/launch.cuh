// Shared by the host side of all kernels of this folder.
#pragma once

#include "common/machine.h"
#include "common/problem.h"

namespace ts::sm90 {

// Why a device cannot run a kernel of this architecture, or nullptr. Native code for 9.0 runs nowhere else.
// `cluster`: thread blocks of a cluster, of which the device has to hold one.
inline const char* refuses(const Device& device, int shared_bytes, int cluster) {
    if (device.compute_capability != 90) return "its code is for compute capability 9.0 alone";
    if (device.max_cluster != 0 && device.max_cluster < cluster)
        return "the device has no room for clusters of thread blocks";
    return device.shared_memory < shared_bytes ? "the device has too little shared memory" : nullptr;
}

// As much of the device's L2 as so many bytes are of the 50 MB of an H100 and an H200, on which the orders in
// which kernels walk tiles were measured.
inline int64_t share_of_l2(const Device& device, int64_t of_hopper) {
    constexpr double kHopper = 50e6;
    return static_cast<int64_t>(static_cast<double>(of_hopper) * (machine_of(device).l2 / kHopper));
}

// Fields that all rows of this folder share. `Host`: the host side of a kernel.
template <class Host>
constexpr Kernel make_row(const char* name, const char* family) {
    Kernel row{};
    row.name = name;
    row.family = family;
    row.instructions = Instructions::wgmma;
    row.device = DeviceType::cuda;
    row.min_compute_capability = 90;
    row.plan = Host::kPlan;
    row.refuses = Host::refuses;
    row.workspace_size = Host::workspace_size;
    row.launch = Host::launch;
    return row;
}

}  // namespace ts::sm90

// Defines the function by which the registry finds a row. The last arguments are the host side of the kernel.
#define TS_SM90_ROW(name, ...)                                  \
    namespace ts::sm90 {                                        \
    const Kernel& name() {                                      \
        static constexpr Kernel kRow = __VA_ARGS__::row(#name); \
        return kRow;                                            \
    }                                                           \
    }
