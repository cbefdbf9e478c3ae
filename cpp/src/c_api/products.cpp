// The public functions on products (the choice of a kernel, memory, the product itself) and on encoders.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "abi.h"
#include "c_api/guard.h"
#include "descriptors.h"
#include "device.h"
#include "dispatch.h"
#include "encoder.h"
#include "measurements.h"
#include "neurons.h"
#include "product.h"
#include "registry.h"

namespace ts {
namespace {

// The device that a caller describes, which must be of the kind that the problem is for.
NamedDevice described_device(const ts_device_info* info, const Problem& problem) {
    const NamedDevice device = check_device(read_struct(info, "device"));
    require(device.properties.type == problem.device, "device.device must be desc.device, ",
            static_cast<int32_t>(problem.device), ", got ", info->device);
    return device;
}

}  // namespace

}  // namespace ts

using namespace ts;

ts_status_t ts_matmul_select(const ts_matmul_desc* source, const ts_device_info* info, int32_t* kernel,
                             char* reason, size_t reason_bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(kernel, "kernel");
        const Problem problem = check_problem(desc);
        const NamedDevice device = described_device(info, problem);
        const Choice choice =
            choose(problem, device, {desc.kernel, desc.prefer, static_cast<Policy>(desc.policy)});
        log_choice(problem, device, choice);
        *kernel = choice.number;
        if (reason == nullptr || reason_bytes == 0) return;
        const std::string text = explain(problem, device, choice);
        reason[text.copy(reason, reason_bytes - 1)] = '\0';
    });
}

ts_status_t ts_matmul_workspace_size(const ts_matmul_desc* source, size_t* bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(bytes, "bytes");
        const Problem problem = check_problem(desc);
        const NamedDevice& device = device_of(problem);
        *bytes = problem.skip == Skip::nothing
                     ? workspace_size(problem, device.properties, choose(problem, device, wish_of(desc)))
                     : skip_workspace_size(problem, device.properties);
    });
}

ts_status_t ts_matmul(const ts_matmul_desc* source, void* workspace, size_t workspace_bytes,
                      ts_stream_t stream) {
    return guard([&] { matmul(read_struct(source, "desc"), workspace, workspace_bytes, stream); });
}

ts_status_t ts_matmul_estimate(const ts_matmul_desc* source, const ts_device_info* info, int32_t kernel,
                               double* microseconds) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(microseconds, "microseconds");
        const Problem problem = check_problem(desc);
        const NamedDevice device = described_device(info, problem);
        *microseconds = estimate(problem, device.properties, kernel).value_or(0);
    });
}

ts_status_t ts_matmul_features(const ts_matmul_desc* source, const ts_device_info* info, int32_t kernel,
                               double* features, int32_t* count, char* family, size_t family_bytes) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        check_pointer(features, "features");
        check_pointer(count, "count");
        const Problem problem = check_problem(desc);
        const NamedDevice device = described_device(info, problem);
        const std::vector<FeatureList> found = ts::features(problem, device.properties, kernel);
        const auto needed = static_cast<int32_t>(found.size()) * kFeatureCount;
        require(*count >= needed, "count must be at least ", needed, ", got ", *count);
        std::string names;
        for (const FeatureList& list : found) {
            features = std::copy(list.values.begin(), list.values.end(), features);
            names += (names.empty() ? "" : "+") + list.family;
        }
        *count = needed;
        if (family != nullptr && family_bytes > 0) family[names.copy(family, family_bytes - 1)] = '\0';
    });
}

ts_status_t ts_measurement_add(const ts_matmul_desc* source, const ts_device_info* info, int32_t kernel,
                               double microseconds, double dense_microseconds) {
    return guard([&] {
        const ts_matmul_desc desc = read_struct(source, "desc");
        const Problem problem = check_problem(desc);
        const NamedDevice device = described_device(info, problem);
        kernel_at(kernel);
        require(microseconds > 0 && std::isfinite(microseconds),
                "microseconds must be a finite number above 0, got ", microseconds);
        require(dense_microseconds >= 0 && std::isfinite(dense_microseconds),
                "dense_microseconds must be 0 or a finite number above 0, got ", dense_microseconds);
        estimate(problem, device.properties, kernel);  // refuses a kernel that does not compute it
        add_measurement(problem, device, {kernel, microseconds, dense_microseconds});
    });
}

ts_status_t ts_measurements_clear(void) {
    return guard([] { clear_measurements(); });
}

ts_status_t ts_encoder_workspace_size(const ts_encoder_desc* desc, size_t* bytes) {
    return guard([&] {
        check_pointer(bytes, "bytes");
        *bytes = encoder_workspace_size(read_struct(desc, "desc"));
    });
}

ts_status_t ts_encoder(const ts_encoder_desc* desc, void* workspace, size_t workspace_bytes, ts_stream_t) {
    return guard([&] { run_encoder(read_struct(desc, "desc"), workspace, workspace_bytes); });
}
