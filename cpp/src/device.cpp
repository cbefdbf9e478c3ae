#include "device.h"

#include <array>
#include <mutex>

#include "cpu/cpu.h"
#include "error.h"

#ifdef TILESPARSE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ts {

const NamedDevice& cpu_device() {
    static const NamedDevice cpu{{DeviceType::cpu, 0, cpu::processors(), 0}, "CPU"};
    return cpu;
}

#ifdef TILESPARSE_CUDA

namespace {

constexpr int32_t kMaxDevices = 64;

void check_device_call(cudaError_t code) {
    if (code == cudaSuccess) return;
    cudaGetLastError();  // the error is reported here and must not surface in a later call
    fail(TS_NO_DEVICE, "no usable CUDA device: ", cudaGetErrorString(code));
}

NamedDevice query_device(int32_t ordinal) {
    cudaDeviceProp properties;
    check_device_call(cudaGetDeviceProperties(&properties, ordinal));
    return {{DeviceType::cuda, properties.major * 10 + properties.minor, properties.multiProcessorCount,
             static_cast<int32_t>(properties.sharedMemPerBlockOptin)},
            properties.name};
}

}  // namespace

const NamedDevice& cuda_device(int32_t ordinal) {
    static std::array<NamedDevice, kMaxDevices> devices;
    static std::array<std::once_flag, kMaxDevices> known;
    if (ordinal < 0) check_device_call(cudaGetDevice(&ordinal));
    require(ordinal < kMaxDevices, "ordinal is ", ordinal, "; at most ", kMaxDevices - 1, " is allowed");
    std::call_once(known[ordinal], [&] { devices[ordinal] = query_device(ordinal); });
    return devices[ordinal];
}

void check_launch(int32_t code, const char* kernel) {
    if (code == cudaSuccess) return;
    cudaGetLastError();
    fail(TS_CUDA_ERROR, kernel, ": ", cudaGetErrorString(static_cast<cudaError_t>(code)));
}

#else

const NamedDevice& cuda_device(int32_t) { fail(TS_NO_DEVICE, "this library was built without CUDA"); }

void check_launch(int32_t code, const char* kernel) {
    if (code != 0) fail(TS_INTERNAL_ERROR, kernel, ": code ", code);
}

#endif

}  // namespace ts
