// Host code that launches kernels of any architecture.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <climits>
#include <cstdint>

#include "common/problem.h"

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

// Registers of a thread of a kernel on the current device, asked once for each.
inline cudaError_t registers_of(const void* kernel, std::array<std::atomic<int>, kMaxDevices>& known,
                                int& registers) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    std::atomic<int>& answer = known[device % kMaxDevices];
    registers = answer.load(std::memory_order_relaxed);
    if (registers > 0) return cudaSuccess;
    cudaFuncAttributes attributes{};
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
    registers = attributes.numRegs;
    answer.store(registers, std::memory_order_relaxed);
    return cudaSuccess;
}

template <class T>
struct Same {
    using Type = T;
};

// Launches a kernel that needs no more than it has by itself. Every launch of the library reports what it
// returns: cudaGetLastError, by which launches with <<<>>> are checked, also gives and takes away an error
// that was there before, which is the caller's.
template <class... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t blocks, int threads, void* stream,
                          typename Same<Parameters>::Type... arguments) {
    if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
    void* parameters[] = {&arguments...};
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                            dim3(static_cast<unsigned>(threads)), parameters, 0,
                            static_cast<cudaStream_t>(stream));
}

}  // namespace ts
