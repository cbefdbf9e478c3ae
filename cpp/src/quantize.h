// Activations in 8 bits on either device; see ts_quantize.
#pragma once

#include "elementwise/quantize.h"

namespace ts {

using quantize::Quantization;

void quantize_activations(const Quantization& quantization, void* stream);

}  // namespace ts
