#include "registry.h"

#include <set>

#include "cpu/cpu.h"
#include "error.h"

// Generated: one TS_KERNEL(folder, name) per row of an architecture's tiles.def; empty without CUDA.
#define TS_KERNEL(folder, name) \
    namespace folder {          \
    const Kernel& name();       \
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
#define TS_KERNEL(folder, name) kernels.push_back(&folder::name());
#include "tilesparse_kernels.inc"
#undef TS_KERNEL
    return kernels;
}

std::string list_architectures() {
    std::set<int32_t> capabilities;
    for (const Kernel* kernel : registry())
        if (kernel->device == DeviceType::cuda) capabilities.insert(kernel->min_compute_capability);
    std::string list = "cpu";
    for (const int32_t capability : capabilities) list += ",sm_" + std::to_string(capability);
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

const Kernel& kernel_at(int32_t number) {
    const auto& kernels = registry();
    require(number >= 1 && number <= static_cast<int32_t>(kernels.size()), "kernel must be 1 to ",
            kernels.size(), ", got ", number);
    return *kernels[number - 1];
}

}  // namespace ts
