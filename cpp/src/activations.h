// Gates and activations in 8 bits: the calls on either device, see ts_gate and ts_quantize.
#pragma once

#include "elementwise/gate.h"
#include "elementwise/quantize.h"

namespace ts {

using gate::Gate;
using quantize::Quantization;

// On the current CUDA device.
void multiply_by_gate(const Gate& gate, void* stream);
void differentiate_gate(const Gate& gate, void* stream);

void quantize_activations(const Quantization& quantization, void* stream);

}  // namespace ts
