#include "common/estimate.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "common/machine.h"
#include "common/token_groups.h"

namespace ts {
namespace {

struct Coefficients {
    const char* gpu;
    const char* family;
    int32_t block;
    Features of;
};

// Sorted by GPU, family and block.
constexpr Coefficients kCoefficients[] = {
#include "common/coefficients.inc"
};
constexpr const char* kReference = "H100";  // where kernels of all families were measured

double divide_up(double a, double b) { return std::ceil(a / b); }

// The share of the columns of a random pattern in which at least one of some block rows has a block.
double present(double density, double rows) { return 1 - std::pow(1 - density, std::max(1.0, rows)); }

double& at(Features& features, Feature feature) { return features[static_cast<int>(feature)]; }

bool is_narrow(const Kernel& kernel) {
    return kernel.plan.kind == PlanKind::aligned || kernel.plan.kind == PlanKind::lists;
}
bool is_decode(const Kernel& kernel) { return kernel.max_tokens > 0; }
int cluster_of(const Kernel& kernel) { return kernel.min_compute_capability == 90 ? 2 : 1; }

// Operations of a multiprocessor in a microsecond. Before 9.0 there are no instructions that multiply float8.
double rate_of(const Kernel& kernel, const Problem& problem, const Machine& machine) {
    const bool sm90 = kernel.min_compute_capability >= 90;
    double rate = machine.tensor;
    if (problem.input_dtype == DType::float32) rate /= problem.precision == Precision::tf32 ? 2 : 6;
    if (problem.input_dtype == DType::int8) rate *= 2;
    if (problem.input_dtype == DType::float8_e4m3fn && sm90) rate *= 2;
    if (problem.values.is_compressed() && !is_decode(kernel)) rate *= 2;
    return rate;
}

double activation_bytes(const Problem& problem) {
    const Pattern& pattern = problem.pattern;
    const double of_token =
        static_cast<double>(pattern.group_out_features()) * element_size(problem.y_dtype()) +
        static_cast<double>(pattern.in_features) * element_size(problem.x_dtype());
    return static_cast<double>(problem.tokens) * of_token;
}

double moved_bytes(const Problem& problem) { return stored_bytes(problem) + activation_bytes(problem); }

// Bytes that are read again by each of some tiles, as far as L2 does not keep them.
double misses(double bytes, double times, double l2) { return bytes * times * bytes / (bytes + l2); }

// A grouped product as one of a single weight, which each token meets once: of as many tokens as spans have
// room for if groups are about equally large, so that each group's last span is filled by half.
Problem of_one_weight(Problem problem, int span_tokens) {
    const double groups = problem.pattern.groups, mean = static_cast<double>(problem.tokens) / groups;
    const double spans = groups * std::max(std::min(mean, 1.0), mean / span_tokens + 0.5);
    problem.tokens = static_cast<int64_t>(spans * span_tokens);
    problem.pattern.out_features /= problem.pattern.groups;
    problem.pattern.nnz /= problem.pattern.groups;
    problem.pattern.groups = 1;
    problem.offsets = nullptr;
    return problem;
}

// Decode kernels read the values of groups with tokens, for as many tokens as one of these has.
Problem of_busy_groups(Problem problem) {
    Pattern& pattern = problem.pattern;
    const int64_t groups = pattern.groups, busy = busy_groups(problem);
    pattern.out_features = pattern.out_features / groups * (problem.forward() ? busy : 1);
    pattern.in_features *= problem.forward() ? 1 : busy;
    pattern.nnz = pattern.nnz * busy / groups;
    pattern.groups = 1;
    problem.tokens = tokens_of_group(problem);
    problem.offsets = nullptr;
    return problem;
}

// Pieces of work that workers take in rounds: how many are full, and how many there are if dealt out evenly.
struct Rounds {
    double whole, mean;

    Rounds(double pieces, double workers)
        : whole(std::max(1.0, std::ceil(pieces / workers))), mean(pieces / workers) {}
};

Features tile_features(const Kernel& kernel, const Problem& problem, const Device& device) {
    const Machine machine = machine_of(device);
    const int cluster = cluster_of(kernel);
    const double tokens = static_cast<double>(problem.tokens), k = static_cast<double>(problem.k_size());
    const double features = static_cast<double>(problem.features()), density = problem.pattern.density();
    const double rows = problem.row_block(), columns = k / problem.k_block();
    const double across = divide_up(features, kernel.tile_features);
    const double along = divide_up(tokens, kernel.tile_tokens), tiles = across * along;
    const auto parts = static_cast<double>(parts_of(kernel, problem, device));
    const Rounds rounds(tiles * parts, std::max(1.0, std::floor(machine.multiprocessors / cluster)));

    constexpr double kCtaFeatures = 128;  // whose block rows are walked together
    const double share = present(density, kCtaFeatures / rows);
    const double steps = is_narrow(kernel) ? 1 : share;  // of all k
    const double tile = 2.0 * kernel.tile_tokens * kernel.tile_features * k /
                        (cluster * rate_of(kernel, problem, machine));  // microseconds of all its products
    // Block columns with a block are distributed about normally over tiles.
    const double deviation = std::sqrt(columns * share * (1 - share)) / columns;
    const double strips = std::max(1.0, divide_up(features, kCtaFeatures));

    Features result{};
    at(result, Feature::launch) = 1;
    at(result, Feature::rounds) = rounds.whole * machine.slower;
    at(result, Feature::splits) = parts > 1;
    at(result, Feature::whole_steps) = rounds.whole * steps * tile / parts;
    at(result, Feature::mean_steps) = rounds.mean * steps * tile / parts;
    at(result, Feature::whole_products) = rounds.whole * density * tile / parts;
    at(result, Feature::mean_products) = rounds.mean * density * tile / parts;
    at(result, Feature::half_steps) = rounds.mean * present(density, kCtaFeatures / 2 / rows) * tile / parts;
    if (!is_narrow(kernel)) at(result, Feature::copies) = rounds.mean * share * (1 - share) * tile / parts;
    at(result, Feature::longest) = deviation * std::sqrt(2 * std::log(strips)) * tile / rounds.whole;
    at(result, Feature::tiles) = tiles * cluster / machine.multiprocessors * machine.slower;
    at(result, Feature::memory) = moved_bytes(problem) / machine.memory;
    const double input = tokens * k * element_size(problem.input_dtype);
    at(result, Feature::input_misses) = misses(input, share * across, machine.l2) / machine.memory;
    const double values = static_cast<double>(problem.pattern.value_count()) * element_size(problem.values.dtype);
    at(result, Feature::value_misses) = misses(values, along, machine.l2) / machine.memory;
    if (is_narrow(kernel) && problem.packed == nullptr)
        at(result, Feature::packing) = std::max(1.3 * machine.slower, 2 * values / machine.memory);
    return result;
}

// Thread blocks of decode kernels have some block rows and up to 64 tokens.
Features decode_features(const Problem& problem, const Device& device) {
    constexpr int kChunk = 64, kLeast = 8, kMostRows = 64;
    const Machine machine = machine_of(device);
    const int64_t tokens = std::max<int64_t>(problem.tokens, 1);
    const double chunks = divide_up(static_cast<double>(tokens), kChunk);
    const double features = static_cast<double>(problem.features());
    const double rows = std::min(problem.row_block(), kMostRows);
    const double products = static_cast<double>(problem.pattern.value_count()) / std::max(features, 1.0);
    const double tile = 2.0 * std::clamp<double>(static_cast<double>(tokens), kLeast, kChunk) * rows * products /
                        machine.tensor;
    const Rounds rounds(chunks * features / rows, machine.multiprocessors);
    const double stored = stored_bytes(problem);
    Features result{};
    at(result, Feature::launch) = 1;
    at(result, Feature::rounds) = rounds.whole * machine.slower;
    at(result, Feature::whole_products) = rounds.whole * tile;
    at(result, Feature::mean_products) = rounds.mean * tile;
    at(result, Feature::half_steps) = rounds.mean * tile * static_cast<double>(tokens) /
                                      (chunks * std::clamp<double>(static_cast<double>(tokens), kLeast, kChunk));
    at(result, Feature::copies) = rounds.mean * 2 * kLeast * rows * products / machine.tensor;
    at(result, Feature::memory) = moved_bytes(problem) / machine.memory;
    at(result, Feature::value_misses) = chunks * stored / machine.memory;
    return result;
}

// Strips of features of y meet units of x; rows of tiles unite the block rows of 64 features, or of 128.
Features sdd_features(const Kernel& kernel, const Problem& problem, const Device& device) {
    const Machine machine = machine_of(device);
    const bool sm90 = kernel.min_compute_capability == 90;
    const Pattern& pattern = problem.pattern;
    const double density = pattern.density(), tokens = static_cast<double>(problem.tokens);
    const double area = static_cast<double>(pattern.out_features) * static_cast<double>(pattern.in_features);
    const double united = kernel.plan.kind == PlanKind::lists ? std::sqrt(density)
                          : present(density, (sm90 ? 64.0 : kernel.tile_features) / pattern.block_rows);
    const double tile_values = sm90 ? 128.0 * 256 : kernel.tile_features * (kernel.tile_tokens > 0 ? kernel.tile_tokens : 256.0);
    const Rounds rounds(area * united / tile_values, machine.multiprocessors);
    const double rate = rate_of(kernel, problem, machine), tile = 2 * tile_values * tokens / rate;
    Features result{};
    at(result, Feature::launch) = 1;
    at(result, Feature::rounds) = rounds.whole * machine.slower;
    at(result, Feature::whole_steps) = rounds.whole * tile;
    at(result, Feature::mean_steps) = rounds.mean * tile;
    at(result, Feature::mean_products) = area * density * 2 * tokens / rate / machine.multiprocessors;
    at(result, Feature::half_steps) = area * 2 * tokens / rate / machine.multiprocessors;
    at(result, Feature::memory) = moved_bytes(problem) / machine.memory;
    return result;
}

// Of kept products, at the peak of tensor cores.
double product_time(const Problem& problem, double density, double rate, const Machine& machine) {
    const double products = 2.0 * static_cast<double>(problem.tokens) *
                            static_cast<double>(problem.pattern.group_out_features()) *
                            static_cast<double>(problem.pattern.in_features) * density;
    return products / (rate * machine.multiprocessors);
}

double dense_rate(const Problem& problem, const Machine& machine) {
    if (problem.input_dtype != DType::float32) return machine.tensor;
    return machine.tensor / (problem.precision == Precision::tf32 ? 2 : 16);
}

int32_t block_of(const Problem& problem) {
    return std::min(problem.pattern.block_rows, problem.pattern.block_cols);
}

// By binary search; nullptr if there are none.
const Coefficients* find(std::string_view gpu, std::string_view family, int32_t block) {
    const auto* const end = std::end(kCoefficients);
    const auto* const found = std::lower_bound(
        std::begin(kCoefficients), end, 0, [&](const Coefficients& one, int) {
            if (const int order = std::string_view(one.gpu).compare(gpu)) return order < 0;
            if (const int order = std::string_view(one.family).compare(family)) return order < 0;
            return one.block < block;
        });
    const bool is = found != end && found->gpu == gpu && found->family == family && found->block == block;
    return is ? found : nullptr;
}

// What was fitted on this GPU, or else on another one, whose features were those of its own limits; of the
// family, or else of kernels like it; of the block, or else of any. Everything has coefficients: what no
// measurement is near takes twice what the limits of the machine allow.
const Features& coefficients_of(std::string_view gpu, std::string_view family, int32_t block) {
    static const Features limits = [] {
        Features result;
        result.fill(2);
        for (const Feature none : {Feature::half_steps, Feature::copies, Feature::mean_steps})
            at(result, none) = 0;
        at(result, Feature::launch) = 8;
        return result;
    }();
    while (true) {
        for (const std::string_view of : {gpu, std::string_view(kReference)})
            for (const int32_t of_block : {block, 0})
                if (const Coefficients* const found = find(of, family, of_block)) return found->of;
        const size_t last = family.rfind('_');
        if (last == family.npos) return limits;
        family = family.substr(0, last);
    }
}

double sum(const Features& coefficients, const Features& features) {
    double result = 0;
    for (int i = 0; i < kFeatureCount; ++i) result += coefficients[i] * features[i];
    return result;
}

std::string_view gpu_of(const Device& device) { return kGpus[device.gpu].name; }

}  // namespace

double stored_bytes(const Problem& problem) {
    const Values& values = problem.values;
    const Pattern& pattern = problem.pattern;
    return static_cast<double>(values.bytes(pattern) + values.metadata_bytes(pattern) +
                               values.scale_bytes(pattern));
}

int64_t parts_of(const Kernel& kernel, const Problem& problem, const Device& device) {
    if (!kernel.splits) return 1;
    Problem counted = problem;
    if (is_quantized(problem.input_dtype)) counted.pattern.in_features /= 2;  // steps have twice as much k
    const double tiles = divide_up(static_cast<double>(problem.tokens), kernel.tile_tokens) *
                         divide_up(static_cast<double>(problem.features()), kernel.tile_features);
    const int64_t workers = device.multiprocessors / cluster_of(kernel);
    int64_t parts = part_count(counted, static_cast<int64_t>(tiles), workers);
    if (!is_narrow(kernel)) return parts;
    constexpr int64_t kMost = 4;       // eight thread blocks
    constexpr double kFilled = 0.92;  // such clusters leave some multiprocessors idle
    parts = std::min(parts, kMost);
    while (parts > 1 && tiles * static_cast<double>(parts) > kFilled * static_cast<double>(workers)) --parts;
    return parts;
}

std::string family_of(const Kernel& kernel, const Problem& problem) {
    const bool forward = problem.forward();
    std::string name, tile;
    std::string_view rest = kernel.name;
    bool has_op = problem.op == Op::sdd_tn;
    while (!rest.empty()) {
        const std::string_view word = rest.substr(0, rest.find('_'));
        rest.remove_prefix(std::min(rest.size(), word.size() + 1));
        if (word == "bf16" || word == "f16" || word == "f32") continue;
        has_op |= word == "nt" || word == "nn";
        const bool is_tile = rest.empty() && word.find('x') != word.npos && word.front() <= '9';
        std::string& end = is_tile ? tile : name;
        if (!name.empty()) end += '_';
        end += word;
    }
    if (!has_op) name += forward ? "_nt" : "_nn";
    return name + tile;
}

Features features_of(const Kernel& kernel, const Problem& problem, const Device& device) {
    Features result;
    if (problem.op == Op::sdd_tn) {
        constexpr int kSpan = 64;
        result = sdd_features(kernel, problem.grouped() ? of_one_weight(problem, kSpan) : problem, device);
    } else if (is_decode(kernel)) {
        result = decode_features(problem.grouped() ? of_busy_groups(problem) : problem, device);
    } else {
        result = tile_features(
            kernel, problem.grouped() ? of_one_weight(problem, kernel.tile_tokens) : problem, device);
    }
    if (problem.grouped()) {
        at(result, Feature::splits) += 1;
        at(result, Feature::memory) = moved_bytes(problem) / machine_of(device).memory;
    }
    return result;
}

double estimate(const Kernel& kernel, const Problem& problem, const Device& device) {
    const std::string family = family_of(kernel, problem);
    const double time = sum(coefficients_of(gpu_of(device), family, block_of(problem)),
                            features_of(kernel, problem, device));
    const Machine machine = machine_of(device);
    // Values of groups without tokens need not be read.
    const double bytes = problem.grouped() ? activation_bytes(problem) : moved_bytes(problem);
    const double rate = rate_of(kernel, problem, machine);
    return std::max({time, product_time(problem, problem.pattern.density(), rate, machine), bytes / machine.memory});
}

std::string dense_family(const Problem& problem) {
    const char* const op = problem.op == Op::sdd_tn ? "dense_tn" : problem.forward() ? "dense_nt" : "dense_nn";
    if (problem.input_dtype != DType::float32) return op;
    return std::string(op) + (problem.precision == Precision::tf32 ? "_tf32" : "_fp32");
}

Features dense_features(const Problem& problem, const Device& device) {
    constexpr double kTileTokens = 128, kTileFeatures = 256;  // of cuBLAS, about
    const Machine machine = machine_of(device);
    const Pattern& pattern = problem.pattern;
    const bool sdd = problem.op == Op::sdd_tn;
    const double rows = static_cast<double>(sdd ? pattern.out_features : problem.tokens);
    const double columns = static_cast<double>(sdd ? pattern.in_features : problem.features());
    const double k = static_cast<double>(sdd ? problem.tokens : problem.k_size());
    const Rounds rounds(divide_up(rows, kTileTokens) * divide_up(columns, kTileFeatures), machine.multiprocessors);
    const double tile = 2 * kTileTokens * kTileFeatures * k / dense_rate(problem, machine);
    const double weight = static_cast<double>(pattern.out_features) * static_cast<double>(pattern.in_features) *
                          element_size(problem.input_dtype);
    Features result{};
    at(result, Feature::launch) = 1;
    at(result, Feature::rounds) = rounds.whole * machine.slower;
    at(result, Feature::whole_steps) = rounds.whole * tile;
    at(result, Feature::mean_steps) = rounds.mean * tile;
    at(result, Feature::memory) = (weight + activation_bytes(problem)) / machine.memory;
    at(result, Feature::value_misses) = weight / machine.memory;
    at(result, Feature::packing) = static_cast<double>(problem.dense_bytes()) / machine.memory;
    return result;
}

double estimate_dense(const Problem& problem, const Device& device) {
    const double time = sum(coefficients_of(gpu_of(device), dense_family(problem), block_of(problem)),
                            dense_features(problem, device));
    const Machine machine = machine_of(device);
    return std::max({time, product_time(problem, 1, dense_rate(problem, machine), machine),
                     activation_bytes(problem) / machine.memory});
}

double estimate_dequantize(const Problem& problem, const Device& device) {
    constexpr double kStart = 4, kRate = 0.52;  // of memory's
    const Machine machine = machine_of(device);
    const double bytes = static_cast<double>(problem.values.bytes(problem.pattern) + problem.dense_bytes());
    return kStart * machine.slower + bytes / (kRate * machine.memory);
}

}  // namespace ts
