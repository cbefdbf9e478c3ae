// What the machine offers.
#pragma once

#include <string>

#include "common/problem.h"

namespace ts {

struct NamedDevice {
    Device properties;
    std::string name;
};

const NamedDevice& cpu_device();

// Properties of a CUDA device, -1 for the current one; read once per device. Throws TS_NO_DEVICE
// where there is no driver, no such device or no CUDA in the library.
const NamedDevice& cuda_device(int32_t ordinal);

// Throws TS_CUDA_ERROR unless the code of a launch is 0.
void check_launch(int32_t code, const char* kernel);

}  // namespace ts
