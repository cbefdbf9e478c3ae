// Launching a kernel with all the shared memory it can use.
#pragma once

#include "common/launch.cuh"

namespace ts::sm80 {

// How many steps ahead a ring is filled. Two stages fewer than there are let a warp start the next
// copies before the slowest one is done with the step before: 20 % faster on an H200 than one fewer.
inline int lookahead(int stages) { return stages > 2 ? stages - 2 : 1; }

// The most stages of a kernel, up to Traits::kMaxStages, that fit into some bytes of shared memory.
template <class Traits>
int stages_within(int bytes) {
    int stages = Traits::kMaxStages;
    while (stages > 0 && Traits::shared_bytes(stages) > bytes) --stages;
    return stages;
}

// A row of the registry with what is the same for all kernels of this folder.
template <class Launcher>
constexpr Kernel make_row(const char* name, const char* family) {
    Kernel row{};
    row.name = name;
    row.family = family;
    row.device = DeviceType::cuda;
    row.min_compute_capability = 80;
    row.refuses = Launcher::refuses;
    row.workspace_size = Launcher::workspace_size;
    row.launch = Launcher::launch;
    return row;
}

[[gnu::noinline]] inline cudaError_t launch(const void* kernel, std::atomic<uint64_t>& devices_done,
                                            const void* arguments, dim3 blocks, int threads, int shared_bytes,
                                            int shared_limit, void* stream) {
    if (const cudaError_t error = allow_shared_memory(kernel, shared_limit, devices_done)) return error;
    void* parameters[] = {const_cast<void*>(arguments)};
    return cudaLaunchKernel(kernel, blocks, dim3(threads), parameters, shared_bytes,
                            static_cast<cudaStream_t>(stream));
}

// `kKernel` takes one argument by value.
template <auto kKernel, class Arguments>
cudaError_t launch(const Arguments& arguments, dim3 blocks, int threads, int shared_bytes, int shared_limit,
                   void* stream) {
    static std::atomic<uint64_t> devices_done{0};
    return launch(reinterpret_cast<const void*>(kKernel), devices_done, &arguments, blocks, threads,
                  shared_bytes, shared_limit, stream);
}

}  // namespace ts::sm80
