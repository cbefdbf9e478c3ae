#include "gate.h"

#include "device.h"
#include "error.h"

namespace ts {

#ifdef TILESPARSE_CUDA

void multiply_by_gate(const Gate& gate, const Device& device, void* stream) {
    check_launch(gate::multiply(gate, device, stream), "gate");
}

size_t gate_workspace_size(const Gate& gate, const Device& device) {
    return gate::workspace_size(gate, device);
}

void differentiate_gate(const Gate& gate, const Device& device, void* workspace, void* stream) {
    check_launch(gate::differentiate(gate, device, workspace, stream), "gate_gradient");
}

#else

namespace {
[[noreturn]] void refuse() { fail(TS_NO_DEVICE, "this library was built without CUDA"); }
}  // namespace

void multiply_by_gate(const Gate&, const Device&, void*) { refuse(); }
size_t gate_workspace_size(const Gate&, const Device&) { refuse(); }
void differentiate_gate(const Gate&, const Device&, void*, void*) { refuse(); }

#endif

}  // namespace ts
