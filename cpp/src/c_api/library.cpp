// The public functions on the library itself: version, errors, kernels and devices.

#include <cstring>
#include <string>

#include "abi.h"
#include "c_api/guard.h"
#include "device.h"
#include "plan/host_plan.h"
#include "registry.h"

namespace ts {
namespace {

thread_local std::string last_error;

template <size_t size>
void copy_name(char (&target)[size], const std::string& source) {
    std::memset(target, 0, size);
    source.copy(target, size - 1);
}

// A set of dtypes by their numbers in the ABI, which begin at 1.
uint32_t abi_bits(uint32_t dtypes) { return dtypes << 1; }

}  // namespace

ts_status_t report(ts_status_t status, const char* sentence) noexcept {
    try {
        last_error = sentence;
    } catch (...) {
        last_error = "out of memory";  // short enough to need none
    }
    return status;
}

}  // namespace ts

using namespace ts;

const char* ts_version(void) { return TS_VERSION; }

int32_t ts_abi_version(void) { return TS_ABI_VERSION; }

const char* ts_last_error(void) { return last_error.c_str(); }

const char* ts_architectures(void) {
    const char* list = "";  // where there is no memory for it
    guard([&] { list = architectures().c_str(); });
    return list;
}

int32_t ts_kernel_count(void) {
    int32_t count = 0;
    guard([&] { count = static_cast<int32_t>(registry().size()); });
    return count;
}

const char* ts_status_string(ts_status_t status) {
    switch (status) {
        case TS_SUCCESS:
            return "success";
        case TS_INVALID_ARGUMENT:
            return "invalid argument";
        case TS_INVALID_PATTERN:
            return "invalid pattern";
        case TS_UNSUPPORTED:
            return "unsupported";
        case TS_NO_DEVICE:
            return "no device";
        case TS_WORKSPACE_TOO_SMALL:
            return "workspace too small";
        case TS_CUDA_ERROR:
            return "CUDA error";
        case TS_OUT_OF_MEMORY:
            return "out of memory";
        case TS_INTERNAL_ERROR:
            return "internal error";
        case TS_STALE_PLAN:
            return "stale plan";
        default:
            return "unknown status";
    }
}

ts_status_t ts_kernel_get(int32_t number, ts_kernel_info* info) {
    return guard([&] {
        checked_size(info, "info");
        const Kernel& kernel = kernel_at(number);
        ts_kernel_info result{};
        result.device = static_cast<int32_t>(kernel.device);
        result.min_compute_capability = kernel.min_compute_capability;
        result.ops = kernel.ops;
        result.dtypes = abi_bits(kernel.input_dtypes);
        result.precision = static_cast<int32_t>(kernel.precision);
        result.plan = plan_number(kernel.plan);
        result.tile_tokens = kernel.tile_tokens;
        result.tile_features = kernel.tile_features;
        result.max_tokens = kernel.max_tokens;
        copy_name(result.name, kernel.name);
        result.storages = kernel.storages;
        result.values_dtypes = abi_bits(kernel.values_dtypes);
        result.result_dtypes = abi_bits(kernel.result_dtypes);
        write_struct(result, info);
    });
}

ts_status_t ts_device_get(int32_t device, int32_t ordinal, ts_device_info* info) {
    return guard([&] {
        checked_size(info, "info");
        require(device == TS_CPU || device == TS_CUDA, "device must be 0 or 1, got ", device);
        const NamedDevice& found = device == TS_CPU ? cpu_device() : cuda_device(ordinal);
        ts_device_info result{};
        result.device = device;
        result.compute_capability = found.properties.compute_capability;
        result.multiprocessors = found.properties.multiprocessors;
        result.shared_memory = found.properties.shared_memory;
        result.max_cluster = found.properties.max_cluster;
        copy_name(result.name, found.name);
        write_struct(result, info);
    });
}
