// Microseconds that products take: a sum of features, each multiplied by a coefficient that is not negative.
// Features follow from the problem, the traits of the kernel and the limits of the machine alone, and are the
// same for all kernels; coefficients are fitted to measurements (coefficients.inc). Host code;
// docs/developers/plans.md explains both.
#pragma once

#include <array>
#include <string>

#include "common/machine.h"
#include "common/problem.h"

namespace ts {

// Microseconds at the limits of the machine, or counts: launch, rounds, splits, groups, tiles. What decode
// and sdd kernels, which walk no steps of k, put in their place stands in estimate.cpp.
enum class Feature : int {
    launch,        // 1
    rounds,        // of tiles, by the clock
    splits,        // 1 where sums are cut into parts or groups are listed, by kernels of their own
    parts,         // their sums
    groups,        // how many there are
    whole_steps,   // of the tiles' steps over k, where the last round takes as long as any other
    mean_steps,    // were they dealt out evenly
    one_tile,      // of a single tile
    whole_halves,  // likewise, steps of tiles with half as many features
    mean_halves,
    whole_products,  // likewise, products with kept blocks
    mean_products,
    copies,        // evenly, of steps whose blocks lie apart
    longest,       // what the longest tile has more than the others
    tiles,         // evenly, ends of tiles
    memory,        // all operands and results once
    input_loads,   // activations, once for each tile
    input_misses,  // as far as L2 does not keep them between tiles
    value_loads,   // likewise values
    value_misses,
    packing,  // values that are written and read again before the product
    count
};
constexpr int kFeatureCount = static_cast<int>(Feature::count);
using Features = std::array<double, kFeatureCount>;

template <class Number>
constexpr Number& at(std::array<Number, kFeatureCount>& features, Feature feature) {
    return features[static_cast<size_t>(feature)];
}

// Features and microseconds of a kernel that computes the problem.
Features features_of(const Kernel& kernel, const Problem& problem, const Device& device);
double estimate(const Kernel& kernel, const Problem& problem, const Device& device);

// Features and microseconds of writing W out and multiplying by it with cuBLAS, or computing all of W and
// copying its blocks.
Features dense_features(const Problem& problem, const Device& device);
double estimate_dense(const Problem& problem, const Device& device);
std::string dense_family(const Problem& problem);

// Features and microseconds of writing values with metadata or scales as dense blocks; 0 where they are
// dense.
Features dequantize_features(const Problem& problem, const Device& device);
std::string dequantize_family(const Problem& problem);
double estimate_dequantize(const Problem& problem, const Device& device);

// Whose steps are whole ones of k.
constexpr bool is_narrow(const Kernel& kernel) {
    return kernel.plan.kind == PlanKind::aligned || kernel.plan.kind == PlanKind::lists;
}

double tiles_of(const Kernel& kernel, const Problem& problem);

// Into how many parts the sums of a dds kernel's tiles are cut, see Decision::parts.
int64_t parts_of(const Kernel& kernel, const Problem& problem, const Device& device);

// The name of a kernel's coefficients: its family, the product, the number format unless it has 16 bits, what
// tells it from others of its tile, and the tile; "_grouped" for grouped products of a kernel that computes
// others, too. Where a name has no coefficients, those of one weight count, or else those of the name with
// one word less before the tile.
std::string family_of(const Kernel& kernel, const Problem& problem);

// Operations of a multiprocessor in a microsecond, of a kernel and of cuBLAS.
double rate_of(const Kernel& kernel, const Problem& problem, const Machine& machine);
double dense_rate(const Problem& problem, const Machine& machine);

// Bytes of values with what belongs to them.
double stored_bytes(const Problem& problem);
double activation_bytes(const Problem& problem);
double moved_bytes(const Problem& problem);  // all of these

}  // namespace ts
