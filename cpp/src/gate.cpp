#include "gate.h"

#include "device.h"
#include "error.h"

namespace ts {

#ifdef TILESPARSE_CUDA

void multiply_by_gate(const Gate& gate, void* stream) {
    launch_checked("gate", [&] { return gate::multiply(gate, stream); });
}

void differentiate_gate(const Gate& gate, void* stream) {
    launch_checked("gate_gradient", [&] { return gate::differentiate(gate, stream); });
}

#else

void multiply_by_gate(const Gate&, void*) { fail_without_cuda(); }
void differentiate_gate(const Gate&, void*) { fail_without_cuda(); }

#endif

}  // namespace ts
