#include "device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>

#include "common/machine.h"
#include "cpu/cpu.h"
#include "error.h"
#include "registry.h"
#include "threads.h"

#ifdef TILESPARSE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ts {

const NamedDevice& cpu_device() {
    static const NamedDevice cpu{{DeviceType::cpu, 0, processors(), 0}, "CPU"};
    return cpu;
}

#ifdef TILESPARSE_CUDA

namespace {

std::string version_text(int version) {
    return std::to_string(version / 1000) + '.' + std::to_string(version % 1000 / 10);
}

// Compares the CUDA version of the driver (0 without one) with that of this build.
std::string describe_driver() {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    if (driver == 0)
        return "there is no NVIDIA driver (libcuda.so.1); install one, in a container give it the GPU, or "
               "compute on the CPU";
    return "the NVIDIA driver is for CUDA " + version_text(driver) +
           " and this library was built with CUDA " + version_text(CUDART_VERSION) +
           "; install a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) +
           ".0 or newer, build the library with the older CUDA, or compute on the CPU";
}

// Advice on an error, or nothing.
std::string advice(cudaError_t code) {
    switch (code) {
        case cudaErrorInsufficientDriver:
        case cudaErrorUnsupportedPtxVersion:
            return "; " + describe_driver();
        case cudaErrorStubLibrary:
            return "; the libcuda.so.1 that was found is the stub for linking; take its folder from "
                   "LD_LIBRARY_PATH";
        case cudaErrorNoDevice:
            return "; the driver shows this process no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES";
        case cudaErrorNoKernelImageForDevice:
            return "; the library has code for " + architectures() +
                   ": build it for this GPU, see TILESPARSE_ARCHITECTURES";
        default:
            return "";
    }
}

void check_device_call(cudaError_t code, const LastError& last_error) {
    if (code == cudaSuccess) return;
    last_error.forget(code);
    fail(TS_NO_DEVICE, "no usable CUDA device: ", cudaGetErrorString(code), advice(code));
}

constexpr char kLimits[] = "TILESPARSE_DEVICE_LIMITS";

// The property of a device that a limit lowers.
int32_t& limited_property(Device& device, std::string_view name) {
    constexpr std::pair<const char*, int32_t Device::*> kProperties[] = {
        {"compute_capability", &Device::compute_capability},
        {"multiprocessors", &Device::multiprocessors},
        {"shared_memory", &Device::shared_memory},
        {"max_cluster", &Device::max_cluster}};
    for (const auto& [known, property] : kProperties)
        if (name == known) return device.*property;
    fail(TS_INVALID_ARGUMENT, kLimits, " may limit compute_capability, multiprocessors, shared_memory and ",
         "max_cluster, got \"", name, '"');
}

// Lowers what a device has to the limits that the environment sets: so tests run kernels as a smaller GPU
// would. Written as "multiprocessors=16,shared_memory=101376"; the name shows that there are some.
NamedDevice limited(NamedDevice device) {
    const char* const variable = std::getenv(kLimits);
    if (variable == nullptr || *variable == '\0') return device;
    for (std::string_view rest = variable; !rest.empty();) {
        const std::string_view limit = rest.substr(0, rest.find(','));
        rest.remove_prefix(std::min(limit.size() + 1, rest.size()));
        const size_t sign = std::min(limit.find('='), limit.size());
        int32_t& property = limited_property(device.properties, limit.substr(0, sign));
        const char* const end = limit.data() + limit.size();
        int32_t most = 0;
        const auto [read, error] =
            std::from_chars(limit.data() + std::min(sign + 1, limit.size()), end, most);
        require(error == std::errc() && read == end && most > 0, kLimits,
                " must give each limit as NAME=POSITIVE_INTEGER, got \"", limit, '"');
        property = property == 0 ? most : std::min(property, most);  // 0: not known, and no limit
    }
    device.name += " (limited)";
    return device;
}

NamedDevice query_device(int32_t ordinal, const LastError& last_error) {
    cudaDeviceProp properties;
    check_device_call(cudaGetDeviceProperties(&properties, ordinal), last_error);
    const int32_t capability = properties.major * 10 + properties.minor;
    return {
        {DeviceType::cuda, capability, properties.multiProcessorCount,
         static_cast<int32_t>(properties.sharedMemPerBlockOptin), 0, find_gpu(properties.name, capability)},
        properties.name};
}

// Adds the clusters that the current device has room for. Every kernel with clusters takes one multiprocessor
// per thread block, so one kernel is asked for all.
NamedDevice with_clusters(NamedDevice device, const LastError& last_error) {
    for (const Kernel* kernel : registry()) {
        if (kernel->clusters == nullptr) continue;
        if (kernel->min_compute_capability != device.properties.compute_capability) continue;
        int32_t count = 0;
        check_device_call(static_cast<cudaError_t>(kernel->clusters(count)), last_error);
        device.properties.max_cluster = count > 0 ? 2 : 1;
        break;
    }
    return device;
}

}  // namespace

const NamedDevice& cuda_device(int32_t ordinal) {
    static std::array<NamedDevice, kMaxDevices> devices, current_devices;
    static std::array<std::once_flag, kMaxDevices> known, known_as_current;
    require(ordinal >= -1 && ordinal < kMaxDevices, "ordinal must be -1 to ", kMaxDevices - 1, ", got ",
            ordinal);
    const LastError last_error;
    int current = 0;
    check_device_call(cudaGetDevice(&current), last_error);
    if (ordinal < 0) ordinal = current;
    require(ordinal < kMaxDevices, "the current device must be 0 to ", kMaxDevices - 1, ", got ", ordinal);
    std::call_once(known[ordinal], [&] { devices[ordinal] = limited(query_device(ordinal, last_error)); });
    if (ordinal != current) return devices[ordinal];
    std::call_once(known_as_current[ordinal], [&] {
        current_devices[ordinal] = limited(with_clusters(query_device(ordinal, last_error), last_error));
    });
    return current_devices[ordinal];
}

LastError::LastError() : before_(cudaPeekAtLastError()) {}

void LastError::forget(int32_t code) const {
    if (before_ != code && cudaPeekAtLastError() == code) cudaGetLastError();
}

void check_launch(int32_t code, const char* kernel, const LastError& last_error) {
    const auto error = static_cast<cudaError_t>(code);
    if (error == cudaSuccess) return;
    last_error.forget(code);
    fail(TS_CUDA_ERROR, kernel, ": ", cudaGetErrorString(error), advice(error));
}

namespace {

std::atomic<int32_t*> reported = nullptr;  // once a product with a plan was launched

// A word of host memory that every device writes to: the number of a kernel, or 0.
int32_t* stale_kernel() {
    static int32_t* const word = [] {
        void* memory = nullptr;
        const LastError last_error;
        // A capture under way in this thread is none of its business.
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        check_launch(cudaThreadExchangeStreamCaptureMode(&mode), "plans", last_error);
        const cudaError_t error =
            cudaHostAlloc(&memory, sizeof(int32_t), cudaHostAllocPortable | cudaHostAllocMapped);
        check_launch(cudaThreadExchangeStreamCaptureMode(&mode), "plans", last_error);
        check_launch(error, "plans", last_error);
        return reported = new (memory) int32_t{0};
    }();
    return word;
}

}  // namespace

PlanReport plan_report(int32_t kernel) { return {stale_kernel(), kernel}; }

void check_plans() {
    int32_t* const found = reported;
    if (found == nullptr) return;
    const std::atomic_ref<int32_t> word(*found);
    if (word.load(std::memory_order_relaxed) == 0) return;
    const int32_t kernel = word.exchange(0);
    if (kernel == 0) return;  // another thread has it
    fail(TS_STALE_PLAN, "plan.data must hold the plan of its product until the product has run: kernel ",
         kernel_at(kernel).name, " found another one there in an earlier call, which wrote no results");
}

#else

PlanReport plan_report(int32_t) { return {}; }
void check_plans() {}

const NamedDevice& cuda_device(int32_t) { fail_without_cuda(); }

LastError::LastError() : before_(0) {}
void LastError::forget(int32_t) const {}

void check_launch(int32_t code, const char* kernel, const LastError&) {
    if (code != 0) fail(TS_INTERNAL_ERROR, kernel, ": code ", code);
}

#endif

void fail_without_cuda() {
    fail(TS_NO_DEVICE,
         "this library was built without CUDA kernels; build it with TILESPARSE_CUDA=ON, or compute on the "
         "CPU");
}

}  // namespace ts
