// Devices, as products ask for them.
#pragma once

#include <cstdint>

#include "tilesparse/tilesparse.h"

namespace bindings {

ts_device_info device_info(int32_t device, int32_t ordinal);

}  // namespace bindings
