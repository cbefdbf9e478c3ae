#include "common/estimate.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "common/list_plan.h"
#include "common/sdd_schedule.h"
#include "common/strip_plan.h"
#include "common/token_groups.h"

namespace ts {
namespace {

double divide_up(double a, double b) { return std::ceil(a / b); }

constexpr double kSumBytes = 2 * 4;  // of a partial sum, written and read

bool is_decode(const Kernel& kernel) { return kernel.max_tokens > 0; }

// Bytes that are read again by each of some tiles, as far as L2 does not keep them.
double misses(double bytes, double times, double l2) { return bytes * times * bytes / (bytes + l2); }

// A grouped product as one of a single weight, which each token meets once: of as many tokens as spans have
// room for. Groups that got some of the tokens, which go to groups at random, have a span or more; the last
// is filled by half.
Problem of_one_weight(Problem problem, int span_tokens) {
    const double groups = problem.pattern.groups, mean = static_cast<double>(problem.tokens) / groups;
    const double spans = groups * (1 - std::exp(-mean)) * std::max(1.0, mean / span_tokens + 0.5);
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
    const int cluster = kernel.cluster;
    const double tokens = static_cast<double>(problem.tokens), k = static_cast<double>(problem.k_size());
    const double features = static_cast<double>(problem.features()), density = problem.pattern.density();
    const double rows = problem.row_block(), columns = std::max(k / problem.k_block(), 1.0);
    const double across = divide_up(features, kernel.tile_features);
    const double along = divide_up(tokens, kernel.tile_tokens), tiles = across * along;
    const auto parts = static_cast<double>(parts_of(kernel, problem, device));
    const Rounds rounds(tiles * parts, std::max(1.0, std::floor(machine.multiprocessors / cluster)));

    const double united = kernel.united_features;
    const double share = problem.pattern.present(united / rows);
    const double halves = problem.pattern.present(united / 2 / rows);
    const double steps = is_narrow(kernel) ? 1 : share;  // of all k
    // Microseconds of all products of a part of a tile.
    const double tile = 2.0 * kernel.tile_tokens * kernel.tile_features * k /
                        (cluster * rate_of(kernel, problem, machine) * parts);
    // Block columns with a block are distributed about normally over tiles.
    const double deviation = std::sqrt(share * (1 - share) / columns);
    const double strips = std::max(1.0, divide_up(features, united));

    Features result{};
    at(result, Feature::launch) = 1;
    at(result, Feature::rounds) = rounds.whole * machine.slower;
    at(result, Feature::splits) = parts > 1 ? 1 : 0;
    if (parts > 1)
        at(result, Feature::parts) =
            tiles * parts * kernel.tile_tokens * kernel.tile_features * kSumBytes / machine.memory;
    at(result, Feature::whole_steps) = rounds.whole * steps * tile;
    at(result, Feature::mean_steps) = rounds.mean * steps * tile;
    at(result, Feature::one_tile) = (is_narrow(kernel) ? density : steps) * tile;
    at(result, Feature::whole_halves) = rounds.whole * halves * tile;
    at(result, Feature::mean_halves) = rounds.mean * halves * tile;
    at(result, Feature::whole_products) = rounds.whole * density * tile;
    at(result, Feature::mean_products) = rounds.mean * density * tile;
    if (!is_narrow(kernel)) at(result, Feature::copies) = rounds.mean * share * (1 - share) * tile;
    at(result, Feature::longest) = deviation * std::sqrt(2 * std::log(strips)) * tile;
    at(result, Feature::tiles) = tiles * cluster / machine.multiprocessors * machine.slower;
    at(result, Feature::memory) = moved_bytes(problem) / machine.memory;
    const double input = tokens * k * element_size(problem.input_dtype);
    const double values =
        static_cast<double>(problem.pattern.value_count()) * element_size(problem.values.dtype);
    at(result, Feature::input_loads) = input * share * across / machine.l2_rate;
    at(result, Feature::input_misses) = misses(input, share * across, machine.l2) / machine.memory;
    at(result, Feature::value_loads) = values * along / machine.l2_rate;
    at(result, Feature::value_misses) = misses(values, along, machine.l2) / machine.memory;
    if (is_narrow(kernel) && problem.prepacked == nullptr)
        at(result, Feature::packing) = std::max(1.3 * machine.slower, 2 * values / machine.memory);
    return result;
}

// Thread blocks of decode kernels have some block rows and up to 64 tokens.
Features decode_features(const Kernel& kernel, const Problem& problem, const Device& device) {
    constexpr double kChunk = 64, kLeast = 8;  // tokens
    constexpr int kMostRows = 64;
    const Machine machine = machine_of(device);
    const auto tokens = static_cast<double>(std::max<int64_t>(problem.tokens, 1));
    const double chunks = divide_up(tokens, kChunk), multiplied = std::clamp(tokens, kLeast, kChunk);
    const double features = static_cast<double>(problem.features());
    const double rows = std::min(problem.row_block(), kMostRows);
    const double products = static_cast<double>(problem.pattern.value_count()) / std::max(features, 1.0);
    const double token = 2 * rows * products / rate_of(kernel, problem, machine);  // of a thread block
    const Rounds rounds(chunks * features / rows, machine.multiprocessors);
    Features result{};
    at(result, Feature::launch) = 1;
    at(result, Feature::rounds) = rounds.whole * machine.slower;
    at(result, Feature::whole_steps) = token * kLeast;
    at(result, Feature::one_tile) = token * multiplied;
    at(result, Feature::whole_products) = rounds.whole * token * multiplied;
    at(result, Feature::mean_products) = rounds.mean * token * multiplied;
    at(result, Feature::mean_halves) = rounds.mean * token * tokens / chunks;
    at(result, Feature::copies) = rounds.mean * token * kLeast;
    at(result, Feature::tiles) = rounds.mean * machine.slower;
    at(result, Feature::input_loads) = rounds.mean * tokens / chunks / kChunk * machine.slower;
    at(result, Feature::memory) = moved_bytes(problem) / machine.memory;
    at(result, Feature::value_loads) = chunks * stored_bytes(problem) / machine.l2_rate;
    return result;
}

// Strips of features of y meet units of x; rows of tiles unite the block rows of 64 features, or of 128.
// Tiles of the last round may be split over the tokens.
Features sdd_features(const Kernel& kernel, const Problem& problem, const Device& device) {
    const Machine machine = machine_of(device);
    const Pattern& pattern = problem.pattern;
    const double density = pattern.density(), tokens = static_cast<double>(problem.tokens);
    const double area = static_cast<double>(pattern.out_features) * static_cast<double>(pattern.in_features);
    const double strip = kernel.united_features, tile_values = kernel.tile_values;
    const double united = pattern.present(strip / pattern.block_rows);
    double tiles = area * united / tile_values;
    if (kernel.plan.kind == PlanKind::lists) tiles = list_tiles(pattern) * kListTileValues / tile_values;
    if (kernel.plan.kind == PlanKind::strips && !are_wide_blocks(pattern)) tiles = strip_tiles(pattern);
    constexpr double kMost = 1 << 22;  // far from where anything depends on the last round
    const auto steps = static_cast<int>(std::min(divide_up(tokens, kSddStep), kMost));
    const SddShares shares(static_cast<int>(std::min(std::ceil(tiles), kMost)), steps,
                           machine.multiprocessors, 1, std::max(kernel.step_time, 1), kernel.step_time > 0);
    const bool splits = shares.is_split();
    const double last = splits ? static_cast<double>(shares.share) / steps : 1;  // of the last round's tiles
    Rounds rounds(tiles, machine.multiprocessors);
    rounds.whole += last - 1;
    const double all = 2 * tokens / rate_of(kernel, problem, machine), tile = tile_values * all;
    const double evenly = area * all / machine.multiprocessors;
    Features result{};
    at(result, Feature::launch) = 1;
    at(result, Feature::rounds) = rounds.whole * machine.slower;
    at(result, Feature::splits) = splits ? 1 : 0;
    if (splits)
        at(result, Feature::parts) =
            shares.partials(machine.multiprocessors) * tile_values * kSumBytes / machine.memory;
    at(result, Feature::whole_steps) = rounds.whole * tile;
    at(result, Feature::mean_steps) = rounds.mean * tile;
    at(result, Feature::one_tile) = last * tile;
    at(result, Feature::mean_products) = evenly * density;
    at(result, Feature::mean_halves) = evenly;
    at(result, Feature::copies) = evenly * pattern.present(128.0 / pattern.block_rows);
    at(result, Feature::tiles) = rounds.mean * machine.slower;
    at(result, Feature::memory) = moved_bytes(problem) / machine.memory;
    at(result, Feature::value_loads) = stored_bytes(problem) / machine.memory;
    return result;
}

}  // namespace

// Operations of a multiprocessor in a microsecond. mma.sync multiplies float8 as halves but on 8.9 and 12.x,
// and the instruction of 8.0 for float64 has half of the rate that those of 9.0 reach.
double rate_of(const Kernel& kernel, const Problem& problem, const Machine& machine) {
    const bool wgmma = kernel.instructions == Instructions::wgmma;
    double rate = wgmma ? machine.tensor : machine.mma_sync;
    if (problem.input_dtype == DType::float64) {
        const bool halved = kernel.min_compute_capability < 90 && machine.gpu.compute_capability >= 90;
        rate = machine.tensor / (halved ? 32 : 16);
    }
    if (problem.input_dtype == DType::float32) rate /= problem.precision == Precision::tf32 ? 2 : 6;
    if (problem.input_dtype == DType::int8) rate *= 2;
    const int32_t capability = machine.gpu.compute_capability;
    const bool multiplies_float8 = wgmma || capability == 89 || capability >= 120;
    if (problem.input_dtype == DType::float8_e4m3fn && multiplies_float8) rate *= 2;
    if (problem.values.is_compressed() && !is_decode(kernel)) rate *= 2;
    return rate;
}

double dense_rate(const Problem& problem, const Machine& machine) {
    if (problem.input_dtype == DType::float64) return machine.tensor / 16;
    if (problem.input_dtype != DType::float32) return machine.tensor;
    return machine.tensor / (problem.precision == Precision::tf32 ? 2 : 16);
}

double activation_bytes(const Problem& problem) {
    const Pattern& pattern = problem.pattern;
    const double of_token =
        static_cast<double>(pattern.group_out_features()) * element_size(problem.y_dtype()) +
        static_cast<double>(pattern.in_features) * element_size(problem.x_dtype());
    return static_cast<double>(problem.tokens) * of_token;
}

double moved_bytes(const Problem& problem) { return stored_bytes(problem) + activation_bytes(problem); }

double stored_bytes(const Problem& problem) {
    const Values& values = problem.values;
    const Pattern& pattern = problem.pattern;
    return static_cast<double>(values.bytes(pattern) + values.metadata_bytes(pattern) +
                               values.scale_bytes(pattern));
}

Features features_of(const Kernel& kernel, const Problem& problem, const Device& device) {
    Features result;
    if (problem.op == Op::sdd_tn) {
        constexpr int kSpan = 64;
        result = sdd_features(kernel, problem.grouped() ? of_one_weight(problem, kSpan) : problem, device);
    } else if (is_decode(kernel)) {
        result = decode_features(kernel, problem.grouped() ? of_busy_groups(problem) : problem, device);
    } else {
        result = tile_features(
            kernel, problem.grouped() ? of_one_weight(problem, kernel.tile_tokens) : problem, device);
    }
    if (!problem.grouped()) return result;
    at(result, Feature::splits) = 1;
    at(result, Feature::groups) = problem.pattern.groups;
    if (!is_decode(kernel)) at(result, Feature::memory) = moved_bytes(problem) / machine_of(device).memory;
    return result;
}

Features dense_features(const Problem& problem, const Device& device) {
    constexpr double kTileTokens = 128, kTileFeatures = 256;  // of cuBLAS, about
    const Machine machine = machine_of(device);
    const Pattern& pattern = problem.pattern;
    const bool sdd = problem.op == Op::sdd_tn;
    const double rows = static_cast<double>(sdd ? pattern.out_features : problem.tokens);
    const double columns = static_cast<double>(sdd ? pattern.in_features : problem.features());
    const double k = static_cast<double>(sdd ? problem.tokens : problem.k_size());
    const Rounds rounds(divide_up(rows, kTileTokens) * divide_up(columns, kTileFeatures),
                        machine.multiprocessors);
    const double tile = 2 * kTileTokens * kTileFeatures * k / dense_rate(problem, machine);
    const double weight = static_cast<double>(pattern.out_features) *
                          static_cast<double>(pattern.in_features) * element_size(problem.input_dtype);
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

Features dequantize_features(const Problem& problem, const Device& device) {
    const Machine machine = machine_of(device);
    Features result{};
    at(result, Feature::launch) = 1;
    at(result, Feature::memory) = stored_bytes(problem) / machine.memory;
    at(result, Feature::packing) = static_cast<double>(problem.dense_bytes()) / machine.memory;
    return result;
}

}  // namespace ts
