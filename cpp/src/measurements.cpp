#include "measurements.h"

#include <array>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <vector>

namespace ts {
namespace {

// All in which a problem must agree with one that was measured, but for the device's name.
using Key = std::array<int64_t, 17>;

Key key_of(const Problem& problem, const Device& device) {
    const Pattern& pattern = problem.pattern;
    const auto number = [](auto value) { return static_cast<int64_t>(value); };
    return {number(device.type),
            device.compute_capability,
            device.multiprocessors,
            number(problem.op),
            number(problem.input_dtype),
            number(problem.result_dtype),
            number(problem.precision),
            number(problem.values.dtype),
            number(problem.values.storage),
            number(problem.x.layout) << 1 | number(problem.y.layout),
            pattern.out_features,
            pattern.in_features,
            pattern.block_rows,
            pattern.block_cols,
            problem.grouped() ? pattern.groups : 0,
            problem.scales_inside() ? 1 : 0,
            number(std::bit_ceil(static_cast<uint64_t>(problem.tokens)))};
}

struct Entry {
    std::string device;
    int64_t nnz;
    Measurement measurement;
};

struct Table {
    std::shared_mutex mutex;
    std::map<Key, std::vector<Entry>> entries;
};

Table& table() {
    static Table table;
    return table;
}

}  // namespace

std::optional<Measurement> find_measurement(const Problem& problem, const NamedDevice& device) {
    constexpr int64_t kShare = 8;  // of its blocks, by which a measured pattern may differ
    Table& known = table();
    const std::shared_lock lock(known.mutex);
    if (known.entries.empty()) return std::nullopt;
    const auto found = known.entries.find(key_of(problem, device.properties));
    if (found == known.entries.end()) return std::nullopt;
    const int64_t nnz = problem.pattern.nnz;
    const Entry* nearest = nullptr;
    for (const Entry& entry : found->second)
        if (entry.device == device.name && std::abs(nnz - entry.nnz) * kShare <= entry.nnz)
            if (nearest == nullptr || std::abs(nnz - entry.nnz) < std::abs(nnz - nearest->nnz))
                nearest = &entry;
    return nearest == nullptr ? std::nullopt : std::optional(nearest->measurement);
}

void add_measurement(const Problem& problem, const NamedDevice& device, const Measurement& measurement) {
    Table& known = table();
    const Entry added{device.name, problem.pattern.nnz, measurement};
    const std::unique_lock lock(known.mutex);
    std::vector<Entry>& entries = known.entries[key_of(problem, device.properties)];
    for (Entry& entry : entries)
        if (entry.device == added.device && entry.nnz == added.nnz) {
            entry.measurement = measurement;
            return;
        }
    entries.push_back(added);
}

void clear_measurements() {
    Table& known = table();
    const std::unique_lock lock(known.mutex);
    known.entries.clear();
}

}  // namespace ts
