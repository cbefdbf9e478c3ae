// Launching clusters of thread blocks that stay on their multiprocessors, and kernels that follow them.
#pragma once

#include <algorithm>
#include <array>

#include "common/launch.cuh"
#include "common/problem.h"

namespace ts::tma {

// How many clusters each device holds at a time, of each size, plus one; 0 where that was not asked.
constexpr int kMaxClusterSize = 8;
using KnownClusters = std::array<std::atomic<int>, kMaxDevices * kMaxClusterSize>;

// Asked once for each device and size of clusters, when the kernel's limit of shared memory is raised.
[[gnu::noinline]] inline cudaError_t resident_clusters(const void* kernel, KnownClusters& known,
                                                       const cudaLaunchConfig_t& config, int cluster_size,
                                                       int& count) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    std::atomic<int>& answer =
        known[device % kMaxDevices * kMaxClusterSize + (cluster_size - 1) % kMaxClusterSize];
    count = answer.load(std::memory_order_relaxed) - 1;
    if (count >= 0) return cudaSuccess;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(config.dynamicSmemBytes)))
        return error;
    if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &config)) return error;
    answer.store(count + 1, std::memory_order_relaxed);
    return cudaSuccess;
}

// At most as many clusters are launched as the device holds at a time, on as many multiprocessors as
// `device` says. `early`: while the kernel before it still runs, for which it waits by itself.
[[gnu::noinline]] inline cudaError_t launch_clusters(const void* kernel, KnownClusters& known,
                                                     const void* arguments, const Device& device,
                                                     int64_t clusters, int cluster_size, int threads,
                                                     int shared_bytes, void* stream, bool early) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster_size);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = early ? 2 : 1;
    int resident = 0;
    if (const cudaError_t error = resident_clusters(kernel, known, config, cluster_size, resident))
        return error;
    if (resident == 0) return cudaErrorLaunchOutOfResources;
    const int64_t most = std::min(resident, std::max(device.multiprocessors / cluster_size, 1));
    config.gridDim.x *= static_cast<unsigned>(std::min(clusters, most));
    void* parameters[] = {const_cast<void*>(arguments)};
    return cudaLaunchKernelExC(&config, kernel, parameters);
}

// `kKernel` takes one argument by value.
template <auto kKernel, class Arguments>
class ClusterLauncher {
  public:
    static cudaError_t launch(const Arguments& arguments, const Device& device, int64_t clusters,
                              int cluster_size, int threads, int shared_bytes, void* stream, bool early) {
        return launch_clusters(reinterpret_cast<const void*>(kKernel), known_, &arguments, device, clusters,
                               cluster_size, threads, shared_bytes, stream, early);
    }

    // How many clusters the device holds at a time.
    static cudaError_t resident(int cluster_size, int threads, int shared_bytes, int& count) {
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(cluster_size);
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = shared_bytes;
        config.attrs = &attribute;
        config.numAttrs = 1;
        return resident_clusters(reinterpret_cast<const void*>(kKernel), known_, config, cluster_size, count);
    }

  private:
    inline static KnownClusters known_{};
};

// See Kernel::clusters.
template <auto kKernel, class Arguments, class Traits>
int32_t count_clusters(int32_t& count) {
    return ClusterLauncher<kKernel, Arguments>::resident(Traits::kRanks, Traits::kThreads,
                                                         Traits::kSharedBytes, count);
}

// Launches a kernel while the one before it still runs, for which it waits by itself.
template <auto kKernel, int kSharedBytes, class Arguments>
cudaError_t launch_early(const Arguments& arguments, int64_t ctas, int threads, void* stream) {
    static_assert(kSharedBytes <= kUsualSharedBytes);
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &early;
    config.numAttrs = 1;
    void* parameters[] = {const_cast<Arguments*>(&arguments)};
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kKernel), parameters);
}

}  // namespace ts::tma
