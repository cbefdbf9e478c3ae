// What host code needs to launch kernels of any architecture.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace ts {

constexpr int log2_of_block(int extent) { return extent == 16 ? 4 : extent == 32 ? 5 : extent == 64 ? 6 : 7; }

constexpr int kUsualSharedBytes = 48 << 10;  // that every kernel may have

// Raises a kernel's limit of dynamic shared memory, once for each device.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes, std::atomic<uint64_t>& devices_done) {
    if (bytes <= kUsualSharedBytes) return cudaSuccess;
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const uint64_t bit = uint64_t{1} << device % 64;
    if (devices_done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) devices_done.fetch_or(bit, std::memory_order_relaxed);
    return error;
}

}  // namespace ts
