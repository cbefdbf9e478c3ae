// factor * activation(gate) and the gradients of both, on the current CUDA device.
#pragma once

#include "elementwise/gate.h"

namespace ts {

using gate::Gate;

void multiply_by_gate(const Gate& gate, void* stream);
void differentiate_gate(const Gate& gate, void* stream);

}  // namespace ts
