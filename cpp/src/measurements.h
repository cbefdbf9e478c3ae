// Measured times of kernels, which come before estimates.
#pragma once

#include <optional>

#include "common/problem.h"
#include "device.h"

namespace ts {

struct Measurement {
    int32_t kernel;  // the number of the fastest
    double time;     // microseconds
    double dense;    // likewise; 0: not measured
};

// The measurement for a problem; ts_measurement_add says which problems share one.
std::optional<Measurement> find_measurement(const Problem& problem, const NamedDevice& device);

void add_measurement(const Problem& problem, const NamedDevice& device, const Measurement& measurement);
void clear_measurements();

}  // namespace ts
