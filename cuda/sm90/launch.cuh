// What the host side of all kernels of this folder has in common.
#pragma once

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

}  // namespace ts::sm90
