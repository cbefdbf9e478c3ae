// Launching a kernel with all the shared memory it can use.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace ts::sm80 {

// Raises a kernel's limit of dynamic shared memory, once for each device.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes, std::atomic<uint64_t>& devices_done) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const uint64_t bit = uint64_t{1} << device % 64;
    if (devices_done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) devices_done.fetch_or(bit, std::memory_order_relaxed);
    return error;
}

// `kKernel` takes one argument by value.
template <auto kKernel, class Arguments>
cudaError_t launch(const Arguments& arguments, int blocks, int threads, int shared_bytes, int shared_limit,
                   void* stream) {
    static std::atomic<uint64_t> devices_done{0};
    const auto kernel = reinterpret_cast<const void*>(kKernel);
    if (const cudaError_t error = allow_shared_memory(kernel, shared_limit, devices_done)) return error;
    void* parameters[] = {const_cast<Arguments*>(&arguments)};
    return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), parameters, shared_bytes,
                            static_cast<cudaStream_t>(stream));
}

}  // namespace ts::sm80
