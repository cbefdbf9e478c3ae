#include "dispatch.h"

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>

#include "error.h"
#include "problem.h"
#include "registry.h"

namespace ts {
namespace {

// What the environment says, read before the first choice and never again.
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

bool computes(uint32_t dtypes, DType dtype, DType activations) {
    return dtypes == 0 ? dtype == activations : (dtypes >> static_cast<int>(dtype) & 1) != 0;
}

// Whether a kernel has to be given the expansion of the values.
bool expands(const Kernel& kernel, const Problem& problem) {
    return !kernel.covers(problem.values, problem.dtype);
}

const char* why_not(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (expands(kernel, problem)) {
        const Problem plain = expanded(problem, nullptr);
        return expands(kernel, plain) ? "its values are neither like these nor plain"
                                      : why_not(kernel, plain, device);
    }
    if (kernel.device != device.type) return "it is for another kind of device";
    if (!kernel.covers(problem.op)) return "it computes another product";
    if (!kernel.covers(problem.dtype)) return "it computes another dtype";
    if (!computes(kernel.result_dtypes, problem.result_dtype, problem.dtype))
        return "its results have another dtype";
    if (device.type == DeviceType::cuda) {
        if (problem.dtype == DType::float32 && kernel.precision != problem.precision)
            return "it has another float32 precision";
        if (device.compute_capability < kernel.min_compute_capability)
            return "the device's compute capability is lower";
    }
    if (kernel.max_tokens > 0 && problem.tokens > kernel.max_tokens) return "it is for fewer tokens";
    return kernel.refuses(problem, device);
}

// Microseconds of expanding values before a product.
double expansion_time(const Problem& problem) {
    constexpr double kStart = 4, kBytes = 2.5e6;  // a microsecond, on an H200
    const int64_t read = problem.values.bytes(problem.pattern);
    return kStart + static_cast<double>(read + problem.expanded_bytes()) / kBytes;
}

std::optional<double> estimate_of(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (kernel.estimate == nullptr) return std::nullopt;
    if (!expands(kernel, problem)) return kernel.estimate(kernel, problem, device);
    return kernel.estimate(kernel, expanded(problem, nullptr), device) + expansion_time(problem);
}

// Of the first architecture on whose devices dense products were measured.
std::optional<double> estimate_of_dense(const Problem& problem, const Device& device) {
    if (device.type == DeviceType::cpu) return std::nullopt;
    const bool plain = problem.values.storage == Storage::plain && problem.values.dtype == problem.dtype;
    for (const DenseEstimate estimate : dense_estimates())
        if (const std::optional<double> time = estimate(expanded(problem, nullptr), device))
            return *time + (plain ? 0 : expansion_time(problem));
    return std::nullopt;
}

const char* reason_for(const Kernel& kernel) {
    if (kernel.device == DeviceType::cpu) return "the best instruction set of this processor for the dtype";
    if (kernel.max_tokens > 0) return "made for so few tokens";
    return "the least estimated time on this device";
}

// The kernel with the least estimate of those that compute the problem and whose names begin with `prefix`,
// the first one of several or where there are no estimates. kernel is nullptr if there is none.
Choice best(const Problem& problem, const Device& device, std::string_view prefix) {
    Choice choice{TS_EXPAND_AND_RUN_DENSE, nullptr, nullptr};
    double least = std::numeric_limits<double>::infinity();
    const auto& kernels = registry();
    for (size_t i = 0; i < kernels.size(); ++i) {
        const Kernel& kernel = *kernels[i];
        if (!std::string_view(kernel.name).starts_with(prefix)) continue;
        if (why_not(kernel, problem, device) != nullptr) continue;
        const std::optional<double> time = estimate_of(kernel, problem, device);
        if (choice.kernel != nullptr && !(time && *time < least)) continue;
        choice = {static_cast<int32_t>(i), &kernel, reason_for(kernel), expands(kernel, problem)};
        least = time.value_or(least);
    }
    return choice;
}

Choice force(const Problem& problem, const Device& device, int32_t forced) {
    const auto& kernels = registry();
    require(forced <= static_cast<int32_t>(kernels.size()) && forced > 0, "kernel is ", forced,
            "; allowed are 0 to ", kernels.size());
    const Kernel& kernel = *kernels[forced - 1];
    if (const char* reason = why_not(kernel, problem, device))
        fail(TS_UNSUPPORTED, "kernel ", kernel.name, " cannot compute this: ", reason);
    return {forced - 1, &kernel, "the caller names it", expands(kernel, problem)};
}

[[noreturn]] void fail_unsupported(const Problem& problem, const Device& device) {
    std::string refusals;
    for (const Kernel* kernel : registry())
        if (kernel->device == device.type && kernel->covers(problem.op) && kernel->covers(problem.dtype))
            refusals += std::string("; ") + kernel->name + ": " + why_not(*kernel, problem, device);
    if (refusals.empty()) refusals = "; the library has none for this product and dtype on this device";
    fail(TS_UNSUPPORTED, "no kernel computes ", to_string(problem.op), " in ", to_string(problem.dtype),
         " on ", device.type == DeviceType::cpu ? "the CPU" : "this CUDA device", refusals);
}

bool is_known(const std::string& prefix) {
    for (const Kernel* kernel : registry())
        if (std::string_view(kernel->name).starts_with(prefix)) return true;
    return false;
}

void check_setting(const std::string& prefix) {
    static const bool known = is_known(prefix);
    if (known) return;
    std::string names;
    for (const Kernel* kernel : registry()) names += (names.empty() ? "" : ", ") + std::string(kernel->name);
    fail(TS_INVALID_ARGUMENT, "TILESPARSE_KERNEL is ", prefix,
         ", with which no kernel's name begins; there are ", names);
}

// The best of the kernels that TILESPARSE_KERNEL names, or of all if it names none that computes the problem.
Choice best_named(const Problem& problem, const Device& device) {
    const std::string& prefix = settings().kernel;
    check_setting(prefix);
    Choice choice = best(problem, device, prefix);
    if (prefix.empty()) return choice;
    if (choice.kernel == nullptr) return best(problem, device, "");
    choice.reason = "TILESPARSE_KERNEL names it";
    return choice;
}

bool is_named(const Choice& choice) {
    const std::string& prefix = settings().kernel;
    return !prefix.empty() && choice.kernel != nullptr &&
           std::string_view(choice.kernel->name).starts_with(prefix);
}

// Why dense is chosen, or nullptr if the best kernel is.
const char* why_dense(const Choice& sparse, const Problem& problem, const Device& device, Policy policy) {
    if (policy == Policy::dense) return "the caller asks for dense";
    if (policy == Policy::sparse || is_named(sparse)) return nullptr;
    if (sparse.kernel == nullptr) return "no kernel computes it";
    const std::optional<double> time = estimate_of(*sparse.kernel, problem, device),
                                dense = estimate_of_dense(problem, device);
    return time && dense && *dense < *time ? "dense is estimated to be faster" : nullptr;
}

// How values are stored, as " values=2:4,int8"; nothing of plain ones in the dtype of the activations.
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

}  // namespace

Problem expanded(const Problem& problem, void* plain) {
    Problem result = problem;
    result.values = {plain, nullptr, nullptr, false, problem.dtype, Storage::plain};
    result.packed = nullptr;
    return result;
}

Choice choose(const Problem& problem, const Device& device, int32_t forced, Policy policy) {
    if (forced != 0) return force(problem, device, forced);
    const Choice choice = best_named(problem, device);
    if (const char* reason = why_dense(choice, problem, device, policy))
        return {TS_EXPAND_AND_RUN_DENSE, choice.kernel, reason};
    if (choice.kernel == nullptr) fail_unsupported(problem, device);
    return choice;
}

std::string explain(const Problem& problem, const Device& device, const Choice& choice) {
    std::string text = choice.reason;
    if (choice.expands) text += "; it is given expanded values";
    const std::optional<double> dense = estimate_of_dense(problem, device);
    if (choice.kernel != nullptr)
        if (const std::optional<double> time = estimate_of(*choice.kernel, problem, device))
            text += microseconds("; estimated", *time) +
                    (choice.index < 0 ? std::string(" by ") + choice.kernel->name : "");
    if (device.type == DeviceType::cpu) return text;
    return text + (dense ? microseconds(", dense", *dense) : ", dense was not measured on such a device");
}

void log_choice(const Problem& problem, const Device& device, const Choice& choice) {
    if (!settings().log) return;
    const Pattern& pattern = problem.pattern;
    std::ostringstream line;
    line << "tilesparse: " << to_string(problem.op) << ' ' << to_string(problem.dtype);
    print_stored(line, problem.values, problem.dtype);
    line << " tokens=" << problem.tokens << " out=" << pattern.out_features << " in=" << pattern.in_features
         << " block=" << pattern.block_rows << 'x' << pattern.block_cols << ": "
         << (choice.index < 0 ? "dense" : choice.kernel->name);
    static std::mutex mutex;
    static std::set<std::string> seen;  // without the reason: who names a kernel may have been told it before
    const std::lock_guard lock(mutex);
    if (!seen.insert(line.str()).second) return;
    line << " (" << explain(problem, device, choice) << ")\n";
    std::fputs(line.str().c_str(), stderr);
}

}  // namespace ts
