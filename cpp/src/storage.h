// Conversions between storages of values, on either device.
#pragma once

#include "common/problem.h"
#include "operands.h"

namespace ts {

// Writes dense blocks in the dtype of the activations, from checked values in any storage.
void dequantize_values(const Problem& problem, void* dense, void* stream);

void compress_values(const Compression& compression, void* stream);

}  // namespace ts
