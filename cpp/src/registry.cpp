#include "registry.h"

#include "cpu/cpu.h"

// Generated from tiles.def: one TS_KERNEL(architecture, name) per row; empty without CUDA.
#define TS_KERNEL(architecture, name) \
    namespace architecture {          \
    const Kernel& name();             \
    }
namespace ts {
#include "tilesparse_kernels.inc"
}  // namespace ts
#undef TS_KERNEL

namespace ts {
namespace {

std::vector<const Kernel*> collect() {
    std::vector<const Kernel*> kernels;
    for (const Kernel& kernel : cpu::kernels()) kernels.push_back(&kernel);
#define TS_KERNEL(architecture, name) kernels.push_back(&architecture::name());
#include "tilesparse_kernels.inc"
#undef TS_KERNEL
    return kernels;
}

std::string list_architectures() {
    std::string list = "cpu";
    int32_t last = 0;
    for (const Kernel* kernel : registry()) {
        if (kernel->min_compute_capability == last) continue;
        last = kernel->min_compute_capability;
        list += ",sm_" + std::to_string(last);
    }
    return list;
}

}  // namespace

const std::vector<const Kernel*>& registry() {
    static const std::vector<const Kernel*> kernels = collect();
    return kernels;
}

const std::string& architectures() {
    static const std::string list = list_architectures();
    return list;
}

}  // namespace ts
