// What kernels were measured to take, which counts for more than what is estimated.
#pragma once

#include <optional>

#include "common/problem.h"
#include "device.h"

namespace ts {

struct Measurement {
    int32_t kernel;  // in the registry, the fastest
    double time;     // microseconds
    double dense;    // likewise; 0: not measured
};

// What counts for a problem; see ts_measurement_add for which do.
std::optional<Measurement> find_measurement(const Problem& problem, const NamedDevice& device);

void add_measurement(const Problem& problem, const NamedDevice& device, const Measurement& measurement);
void clear_measurements();

}  // namespace ts
