// factor * activation(gate) and the gradients of both, on the current CUDA device.
#pragma once

#include <cstddef>

#include "common/problem.h"
#include "gate/gate.h"

namespace ts {

using gate::Gate;

void multiply_by_gate(const Gate& gate, const Device& device, void* stream);

// Bytes of scratch memory for the sums over tokens; without any nothing is needed.
size_t gate_workspace_size(const Gate& gate, const Device& device);

void differentiate_gate(const Gate& gate, const Device& device, void* workspace, void* stream);

}  // namespace ts
