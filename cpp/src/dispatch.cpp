#include "dispatch.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>

#include "common/estimate.h"
#include "descriptors.h"
#include "error.h"
#include "registry.h"

namespace ts {
namespace {

// Environment variables, read before the first choice and never again.
struct Settings {
    std::string kernel;
    bool log;
};

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

const Settings& settings() {
    static const Settings settings{variable("TILESPARSE_KERNEL"), variable("TILESPARSE_LOG") == "1"};
    return settings;
}

// True if the kernel has to be given dense blocks instead of the values, which only dds reads.
bool dequantizes(const Kernel& kernel, const Problem& problem) {
    return problem.op != Op::sdd_tn && !kernel.covers(problem.values, problem.input_dtype);
}

const char* why_not(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (dequantizes(kernel, problem)) {
        const Problem given = with_dense_blocks(problem, nullptr);
        return dequantizes(kernel, given) ? "it reads neither these values nor dense blocks"
                                          : why_not(kernel, given, device);
    }
    if (kernel.device != device.type) return "it is for another kind of device";
    if (!kernel.covers(problem.op)) return "it computes another product";
    if (!kernel.covers(problem.input_dtype)) return "it computes another dtype";
    if (const char* reason = kernel.refuses_form(problem)) return reason;
    if (!kernel.any_block && !problem.pattern.is_regular())
        return "its blocks have sides of 16, 32, 64 or 128 that divide the matrix";
    if (!kernel.writes(problem.result_dtype, problem.input_dtype)) return "its results have another dtype";
    if (device.type == DeviceType::cuda) {
        if (problem.input_dtype == DType::float32 && kernel.precision != problem.precision &&
            !kernel.any_block)
            return "it has another float32 precision";
        if (device.compute_capability < kernel.min_compute_capability)
            return "the device's compute capability is lower";
    }
    if (kernel.max_tokens > 0 && problem.tokens > kernel.max_tokens) return "it is for fewer tokens";
    return kernel.refuses(problem, device);
}

std::optional<double> estimate_of(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (!kernel.estimated()) return std::nullopt;
    if (!dequantizes(kernel, problem)) return ts::estimate(kernel, problem, device);
    return ts::estimate(kernel, with_dense_blocks(problem, nullptr), device) +
           estimate_dequantize(problem, device);
}

std::optional<double> estimate_of_dense(const Problem& problem, const Device& device) {
    if (device.type == DeviceType::cpu || problem.grouped()) return std::nullopt;
    return estimate_dense(with_dense_blocks(problem, nullptr), device) + estimate_dequantize(problem, device);
}

const char* reason_for(const Kernel& kernel) {
    if (kernel.device == DeviceType::cpu) return "the best instruction set of this processor for the dtype";
    return kernel.max_tokens > 0 ? "made for so small a batch" : "the least estimated time on this device";
}

// The kernel with the least estimate of those that compute the problem and whose names begin with `prefix`.
// Without estimates the first that reads the values as they are, or else the first. nullptr if there is none.
Choice best(const Problem& problem, const Device& device, std::string_view prefix) {
    Choice choice{TS_RUN_DENSE, nullptr, nullptr};
    double least = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < registry().size(); ++i) {
        const Kernel& kernel = *registry()[i];
        if (!std::string_view(kernel.name).starts_with(prefix)) continue;
        if (why_not(kernel, problem, device) != nullptr) continue;
        const std::optional<double> time = estimate_of(kernel, problem, device);
        const bool better = time ? *time < least : choice.dequantizes && !dequantizes(kernel, problem);
        if (choice.kernel != nullptr && !better) continue;
        choice = {static_cast<int32_t>(i) + 1, &kernel, reason_for(kernel), dequantizes(kernel, problem)};
        least = time.value_or(least);
    }
    return choice;
}

// A kernel by its number, which must compute the problem.
const Kernel& checked_kernel(const Problem& problem, const Device& device, int32_t number) {
    const Kernel& kernel = kernel_at(number);
    if (const char* reason = why_not(kernel, problem, device))
        fail(TS_UNSUPPORTED, "kernel ", kernel.name, " cannot compute this: ", reason);
    return kernel;
}

Choice force(const Problem& problem, const Device& device, int32_t forced) {
    const size_t count = registry().size();
    require(forced <= static_cast<int32_t>(count) && forced > 0, "kernel must be 0 to ", count, ", got ",
            forced);
    const Kernel& kernel = checked_kernel(problem, device, forced);
    return {forced, &kernel, "the caller names it", dequantizes(kernel, problem)};
}

// Throws for a GPU that is older than all kernels, whatever the product is.
void check_capability(const Device& device) {
    if (device.type == DeviceType::cpu) return;
    int32_t oldest = std::numeric_limits<int32_t>::max();
    for (const Kernel* kernel : registry())
        if (kernel->device == DeviceType::cuda) oldest = std::min(oldest, kernel->min_compute_capability);
    const int32_t capability = device.compute_capability;
    if (oldest == std::numeric_limits<int32_t>::max())
        fail(TS_UNSUPPORTED,
             "this library was built without CUDA kernels; build it with TILESPARSE_CUDA=ON, or compute "
             "on the CPU or densely");
    if (capability < oldest)
        fail(TS_UNSUPPORTED, "this CUDA device has compute capability ", capability / 10, '.',
             capability % 10, ", and the kernels of this library need ", oldest / 10, '.', oldest % 10,
             " or newer; compute on the CPU, or densely");
}

[[noreturn]] void fail_unsupported(const Problem& problem, const Device& device) {
    check_capability(device);
    std::string refusals;
    for (const Kernel* kernel : registry())
        if (kernel->device == device.type && kernel->covers(problem.op) &&
            kernel->covers(problem.input_dtype))
            refusals += std::string("; ") + kernel->name + ": " + why_not(*kernel, problem, device);
    if (refusals.empty()) refusals = "; the library has none for this product and dtype on this device";
    fail(TS_UNSUPPORTED, "no kernel computes ", to_string(problem.op), " in ", to_string(problem.input_dtype),
         " on ", device.type == DeviceType::cpu ? "the CPU" : "this CUDA device", refusals);
}

// The beginning of the names of kernels that are preferred, by the caller or else by the environment.
struct Preference {
    std::string_view prefix;
    const char* by;  // whom
    const char* reason;
};

Preference preference_of(const Wish& wish) {
    if (!wish.prefer.empty()) return {wish.prefer, "prefer", "the caller prefers it"};
    return {settings().kernel, "TILESPARSE_KERNEL", "TILESPARSE_KERNEL names it"};
}

void check_preference(const Preference& preference) {
    const auto& kernels = registry();
    const auto fits = [&](const Kernel* kernel) {
        return std::string_view(kernel->name).starts_with(preference.prefix);
    };
    if (std::any_of(kernels.begin(), kernels.end(), fits)) return;
    std::string names;
    for (const Kernel* kernel : kernels) names += (names.empty() ? "" : ", ") + std::string(kernel->name);
    fail(TS_INVALID_ARGUMENT, preference.by, " must be the beginning of a kernel's name, got ",
         preference.prefix, "; kernels are ", names);
}

// The measured choice, if its kernel computes this problem, too.
Choice best_measured(const Problem& problem, const NamedDevice& device) {
    const std::optional<Measurement> found = find_measurement(problem, device);
    if (!found) return {TS_RUN_DENSE, nullptr, nullptr};
    const Kernel& kernel = kernel_at(found->kernel);
    if (why_not(kernel, problem, device.properties)) return {TS_RUN_DENSE, nullptr, nullptr};
    return {found->kernel, &kernel, "the fastest when measured on this device", dequantizes(kernel, problem),
            found};
}

// The best of the kernels that are preferred, or of all if none of these computes the problem.
Choice best_wished(const Problem& problem, const NamedDevice& device, const Preference& preference) {
    if (!preference.prefix.empty()) {
        check_preference(preference);
        Choice choice = best(problem, device.properties, preference.prefix);
        choice.reason = preference.reason;
        if (choice.kernel != nullptr) return choice;
    }
    const Choice choice = best_measured(problem, device);
    return choice.kernel != nullptr ? choice : best(problem, device.properties, "");
}

bool is_preferred(const Choice& choice, const Preference& preference) {
    return !preference.prefix.empty() && choice.kernel != nullptr &&
           std::string_view(choice.kernel->name).starts_with(preference.prefix);
}

// Why dense is chosen, or nullptr if the best kernel is.
const char* why_dense(const Choice& sparse, const Problem& problem, const Device& device,
                      const Preference& preference, Policy policy) {
    if (policy == Policy::dense) return "the caller asks for dense";
    if (policy == Policy::sparse || problem.grouped() || is_preferred(sparse, preference)) return nullptr;
    if (sparse.kernel == nullptr) return "no kernel computes it";
    if (sparse.measured && sparse.measured->dense > 0)
        return sparse.measured->dense < sparse.measured->time ? "dense was measured to be faster" : nullptr;
    const std::optional<double> time = estimate_of(*sparse.kernel, problem, device),
                                dense = estimate_of_dense(problem, device);
    return time && dense && *dense < *time ? "dense is estimated to be faster" : nullptr;
}

// How values are stored, as " values=2:4,int8"; nothing for dense blocks in the dtype of the activations.
void print_stored(std::ostream& line, const Values& values, DType activations) {
    const bool has_dtype = values.dtype != activations;
    if (!values.is_compressed() && !has_dtype) return;
    line << " values=" << (values.is_compressed() ? "2:4" : "");
    if (has_dtype) line << (values.is_compressed() ? "," : "") << to_string(values.dtype);
}

std::string microseconds(const char* what, double time) {
    char text[64];
    std::snprintf(text, sizeof text, "%s %.*f us", what, time < 100 ? 1 : 0, time);
    return text;
}

Choice with_decision(Choice choice, const Problem& problem, const Device& device) {
    if (const auto decide = choice.kernel->decide)
        choice.decision = decide(*choice.kernel,
                                 choice.dequantizes ? with_dense_blocks(problem, nullptr) : problem, device);
    return choice;
}

}  // namespace

Problem with_dense_blocks(const Problem& problem, void* dense) {
    Problem result = problem;
    const Values scaled = is_quantized(problem.input_dtype) ? problem.values : Values{};
    result.values = {dense, nullptr, scaled.scales, scaled.scales_per, problem.input_dtype, Storage::dense};
    result.prepacked = nullptr;
    return result;
}

Choice choose(const Problem& problem, const NamedDevice& device, const Wish& wish) {
    if (wish.kernel != 0)
        return with_decision(force(problem, device.properties, wish.kernel), problem, device.properties);
    const Preference preference = preference_of(wish);
    const Choice choice = best_wished(problem, device, preference);
    if (const char* reason = why_dense(choice, problem, device.properties, preference, wish.policy))
        return {TS_RUN_DENSE, choice.kernel, reason, false, choice.measured};
    if (choice.kernel == nullptr) fail_unsupported(problem, device.properties);
    return with_decision(choice, problem, device.properties);
}

std::optional<double> estimate(const Problem& problem, const Device& device, int32_t kernel) {
    if (kernel == TS_RUN_DENSE) return estimate_of_dense(problem, device);
    return estimate_of(checked_kernel(problem, device, kernel), problem, device);
}

std::vector<FeatureList> features(const Problem& problem, const Device& device, int32_t number) {
    require(device.type == DeviceType::cuda, "device.device must be 1, which has estimates, got 0");
    const Problem dense = with_dense_blocks(problem, nullptr);
    if (number == TS_RUN_DENSE) return {{dense_family(dense), dense_features(dense, device)}};
    const Kernel& kernel = checked_kernel(problem, device, number);
    if (!kernel.estimated()) fail(TS_UNSUPPORTED, "kernel ", kernel.name, " has no estimate");
    if (!dequantizes(kernel, problem))
        return {{family_of(kernel, problem), features_of(kernel, problem, device)}};
    return {{family_of(kernel, dense), features_of(kernel, dense, device)},
            {dequantize_family(problem), dequantize_features(problem, device)}};
}

std::string explain(const Problem& problem, const NamedDevice& device, const Choice& choice) {
    std::string text = choice.reason;
    if (choice.dequantizes) text += "; it is given dense blocks";
    std::string by;
    if (choice.number < 0 && choice.kernel != nullptr) by = std::string(" by ") + choice.kernel->name;
    if (choice.measured) {
        text += microseconds("; measured", choice.measured->time) + by;
        return choice.measured->dense > 0 ? text + microseconds(", dense", choice.measured->dense) : text;
    }
    if (choice.kernel != nullptr)
        if (const std::optional<double> time = estimate_of(*choice.kernel, problem, device.properties))
            text += microseconds("; estimated", *time) + by;
    const std::optional<double> dense = estimate_of_dense(problem, device.properties);
    return dense ? text + microseconds(", dense", *dense) : text;
}

void log_choice(const Problem& problem, const NamedDevice& device, const Choice& choice) {
    if (!settings().log) return;
    const Pattern& pattern = problem.pattern;
    std::ostringstream line;
    line << "tilesparse: " << to_string(problem.op) << ' ' << to_string(problem.input_dtype);
    print_stored(line, problem.values, problem.input_dtype);
    line << " tokens=" << problem.tokens << " out=" << pattern.out_features << " in=" << pattern.in_features
         << " block=" << pattern.block_rows << 'x' << pattern.block_cols
         << (problem.grouped() ? " groups=" + std::to_string(pattern.groups) : "") << ": "
         << (choice.number < 0 ? "dense" : choice.kernel->name);
    static std::mutex mutex;
    static std::set<std::string> seen;  // without the reason: who names a kernel may have been told it before
    const std::lock_guard lock(mutex);
    if (!seen.insert(line.str()).second) return;
    line << " (" << explain(problem, device, choice) << ")\n";
    std::fputs(line.str().c_str(), stderr);
}

}  // namespace ts
