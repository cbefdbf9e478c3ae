// Which kernel computes a problem.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/estimate.h"
#include "common/problem.h"
#include "measurements.h"

namespace ts {

// The answers that may be chosen: see TS_POLICY_SPARSE and the constants after it.
enum class Policy : int32_t { sparse = 0, automatic = 1, dense = 2 };

// The caller's requests besides the product.
struct Wish {
    int32_t kernel = 0;            // ts_matmul_desc.kernel
    std::string_view prefer = {};  // ts_matmul_desc.prefer
    Policy policy = Policy::sparse;
};

struct Choice {
    int32_t number;        // of the kernel, or TS_RUN_DENSE
    const Kernel* kernel;  // the best one, also where dense is chosen; nullptr if none computes the problem
    const char* reason;
    bool dequantizes = false;                  // the kernel is given dense blocks
    std::optional<Measurement> measured = {};  // by which was chosen
    Decision decision = {};                    // for the kernel and what it is given
};

// The problem as such a kernel is given it, with dense blocks, wherever they lie.
Problem with_dense_blocks(const Problem& problem, void* dense);

// A function of the problem (shapes, layouts, flags), the device, the wish, TILESPARSE_KERNEL, which is read
// before the first choice, and measurements. The kernel that is wished comes before the policy. Throws
// TS_UNSUPPORTED, saying what was refused and why, where dense is not allowed and no kernel computes the
// problem, and TS_INVALID_ARGUMENT where the preference, or TILESPARSE_KERNEL, names no kernel.
Choice choose(const Problem& problem, const NamedDevice& device, const Wish& wish);

// The reason and, where there are any, the times.
std::string explain(const Problem& problem, const NamedDevice& device, const Choice& choice);

// Microseconds that are estimated for a kernel by its number, or TS_RUN_DENSE. Throws
// TS_UNSUPPORTED where the kernel does not compute the problem.
std::optional<double> estimate(const Problem& problem, const Device& device, int32_t kernel);

// The features of an estimate, see common/estimate.h, and the name of its coefficients; a second list where
// values are dequantized first.
struct FeatureList {
    std::string family;
    Features values;
};
std::vector<FeatureList> features(const Problem& problem, const Device& device, int32_t kernel);

// With TILESPARSE_LOG=1, one line on standard error per shape: what was chosen and why.
void log_choice(const Problem& problem, const NamedDevice& device, const Choice& choice);

}  // namespace ts
