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

[[noreturn]] static void refuse() { fail(TS_NO_DEVICE, "this library was built without CUDA"); }
void multiply_by_gate(const Gate&, void*) { refuse(); }
void differentiate_gate(const Gate&, void*) { refuse(); }

#endif

}  // namespace ts
