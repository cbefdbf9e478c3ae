#include "common/estimate.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

namespace ts {
namespace {

using Factors = std::array<float, kFeatureCount>;

// Names stand in place, so that the table has no addresses that loading the library would have to fill in.
struct Coefficients {
    char gpu[5], family[40];
    uint8_t rows, columns;  // of a block, along features and k; 0 for all
    Factors of;
};

// Sorted by GPU, family and block.
constexpr Coefficients kCoefficients[] = {
#include "common/coefficients.inc"
};
constexpr const char* kMeasured[] = {"H100", "H200"};  // those that speak for others first

// Microseconds of kept products at the peak of tensor cores.
double product_time(const Problem& problem, double density, double rate, const Machine& machine) {
    const double products = 2.0 * static_cast<double>(problem.tokens) *
                            static_cast<double>(problem.pattern.group_out_features()) *
                            static_cast<double>(problem.pattern.in_features) * density;
    return products / (rate * machine.multiprocessors);
}

// By binary search; nullptr if there are none.
const Coefficients* find(std::string_view gpu, std::string_view family, int32_t rows, int32_t columns) {
    const auto* const end = std::end(kCoefficients);
    const auto* const found =
        std::lower_bound(std::begin(kCoefficients), end, 0, [&](const Coefficients& one, int) {
            if (const int order = std::string_view(one.gpu).compare(gpu)) return order < 0;
            if (const int order = std::string_view(one.family).compare(family)) return order < 0;
            return one.rows != rows ? one.rows < rows : one.columns < columns;
        });
    const bool is = found != end && found->gpu == gpu && found->family == family && found->rows == rows &&
                    found->columns == columns;
    return is ? found : nullptr;
}

// Coefficients of a family that no measurement is near: twice the limits of the machine.
constexpr Factors limits() {
    Factors result{};
    at(result, Feature::launch) = 8;
    for (const Feature feature :
         {Feature::whole_steps, Feature::whole_products, Feature::memory, Feature::packing})
        at(result, feature) = 2;
    return result;
}

// Tokens by features, at the end of a name.
bool is_tile(std::string_view word) {
    return !word.empty() && word.front() >= '0' && word.front() <= '9' && word.find('x') != word.npos;
}

constexpr std::string_view kFloat8 = "_float8", kFast8 = "_fast8";

// The family that speaks for one of which nothing was measured: with usual sums, or else of one weight, or
// else of the same tile with one word less, or none.
std::string relative_of(std::string family) {
    const size_t fast = family.find(kFast8);
    if (fast != family.npos) return family.replace(fast, kFast8.size(), kFloat8);
    const size_t last = family.rfind('_');
    if (last == family.npos) return {};
    const bool has_tile = is_tile(std::string_view(family).substr(last + 1));
    const std::string name = has_tile ? family.substr(0, last) : family;
    const size_t word = name.rfind('_');
    if (word == name.npos) return {};
    return name.substr(0, word) + (has_tile ? family.substr(last) : "");
}

const Coefficients* find_measured(const Device& device, std::string_view family, int32_t rows,
                                  int32_t columns) {
    const Coefficients* found = find(kGpus[device.gpu].name, family, rows, columns);
    for (const char* const gpu : kMeasured)
        if (found == nullptr) found = find(gpu, family, rows, columns);
    return found;
}

// Coefficients fitted on this GPU, or else on another one, whose features were those of its own limits; for
// the family, or else for kernels like it; for the block, or else for square ones or any.
const Factors& coefficients_of(const Device& device, std::string family, const Problem& problem) {
    static constexpr Factors kLimits = limits();
    const int32_t rows = problem.row_block(), columns = problem.k_block(), side = std::min(rows, columns);
    for (; !family.empty(); family = relative_of(family))
        for (const auto& block : {std::pair(rows, columns), std::pair(side, side), std::pair(0, 0)})
            if (const Coefficients* const found = find_measured(device, family, block.first, block.second))
                return found->of;
    return kLimits;
}

// The number format of a family's name: nothing for 16 bits.
std::string number_format(const Kernel& kernel, const Problem& problem) {
    if (kernel.covers(DType::float64)) return "_f64";
    if (kernel.covers(DType::float32)) return kernel.precision == Precision::tf32 ? "_tf32" : "_tf32x3";
    if (kernel.covers(DType::int8)) return "_int8";
    if (!kernel.covers(DType::float8_e4m3fn)) return "";
    if (kernel.accumulation == Accumulation::scaled) return "_float8_scaled";
    // Sums that are carried over may stay with the tensor cores, and promoted ones have another kernel
    // beside.
    const bool differs =
        kernel.accumulation == Accumulation::carried ||
        (kernel.accumulation == Accumulation::promoted && kernel.instructions == Instructions::wgmma);
    return std::string(differs && problem.precision == Precision::fast ? kFast8 : kFloat8);
}

std::string tile_name(int32_t rows, int32_t columns) {
    std::string name = "_";
    name += std::to_string(rows);
    name += 'x';
    return name += std::to_string(columns);
}

// Not less than the machine needs. Kernels that it limits keep their order.
double within_limits(double time, double products, double bytes) {
    constexpr double kOrder = 1e-3;
    const double least = std::max(products, bytes);
    return std::max(time, least + kOrder * time);
}

double sum(const Factors& coefficients, const Features& features) {
    double result = 0;
    for (int i = 0; i < kFeatureCount; ++i) result += coefficients[i] * features[i];
    return result;
}

}  // namespace

std::string family_of(const Kernel& kernel, const Problem& problem) {
    const bool sdd = problem.op == Op::sdd_tn;
    std::string name = kernel.family;
    name += sdd ? "_tn" : problem.forward() ? "_nt" : "_nn";
    name += number_format(kernel, problem);
    name += kernel.variant;
    const PlanShape& plan = kernel.plan;
    if (sdd && plan.tile > 0)
        name += tile_name(plan.tile * plan.ranks, plan.step);
    else if (kernel.tile_tokens > 0)
        name += tile_name(kernel.tile_tokens, kernel.tile_features);
    const bool computes_others = kernel.grouped != bits_of(1);
    if (problem.grouped() && computes_others) name += "_grouped";
    return name;
}

std::string dense_family(const Problem& problem) {
    const char* const op = problem.op == Op::sdd_tn ? "dense_tn"
                           : problem.forward()      ? "dense_nt"
                                                    : "dense_nn";
    if (problem.input_dtype == DType::float64) return std::string(op) + "_f64";
    if (problem.input_dtype != DType::float32) return op;
    return std::string(op) + (problem.precision == Precision::tf32 ? "_tf32" : "_fp32");
}

std::string dequantize_family(const Problem& problem) {
    const bool bytes = problem.values.dtype == DType::int8 || problem.values.dtype == DType::float8_e4m3fn;
    return std::string("dequantize") + (problem.values.is_compressed() ? "_2_4" : "") +
           (bytes                                ? "_8_bits"
            : is_quantized(problem.values.dtype) ? "_4_bits"
                                                 : "");
}

double estimate(const Kernel& kernel, const Problem& problem, const Device& device) {
    const std::string family = family_of(kernel, problem);
    const double time = sum(coefficients_of(device, family, problem), features_of(kernel, problem, device));
    const Machine machine = machine_of(device);
    // Values of groups without tokens need not be read.
    const double bytes = problem.grouped() ? activation_bytes(problem) : moved_bytes(problem);
    const double rate = rate_of(kernel, problem, machine);
    return within_limits(time, product_time(problem, problem.pattern.density(), rate, machine),
                         bytes / machine.memory);
}

double estimate_dense(const Problem& problem, const Device& device) {
    const double time =
        sum(coefficients_of(device, dense_family(problem), problem), dense_features(problem, device));
    const Machine machine = machine_of(device);
    return within_limits(time, product_time(problem, 1, dense_rate(problem, machine), machine),
                         activation_bytes(problem) / machine.memory);
}

double estimate_dequantize(const Problem& problem, const Device& device) {
    const Values& values = problem.values;
    if (values.storage == Storage::dense && values.dtype == problem.input_dtype) return 0;
    return sum(coefficients_of(device, dequantize_family(problem), problem),
               dequantize_features(problem, device));
}

}  // namespace ts
