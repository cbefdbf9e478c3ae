// GPUs and what bounds them: published figures, by which estimates of one GPU are scaled to others. Host
// code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "common/problem.h"

namespace ts {

struct Gpu {
    const char* name;  // part of the driver's
    int32_t compute_capability;
    int32_t multiprocessors;
    double gigahertz;
    double bandwidth;     // GB of memory in a second
    double tensor;        // TFLOP/s of tensor cores in 16 bits, sums in float32, without sparsity
    double l2;            // MB
    double mma_sync = 1;  // share of `tensor` that mma.sync reaches
};

// The first one of a compute capability stands for GPUs that are not here. 9.0 has instructions that are
// faster than mma.sync, which reaches 63 % of them (Luo et al., Benchmarking and Dissecting the Nvidia Hopper
// GPU Architecture, 2024); 10.x is taken to have the mma.sync of 9.0, which nobody measured here.
constexpr Gpu kGpus[] = {
    {"A100", 80, 108, 1.41, 2039, 312, 40},
    {"A10", 86, 72, 1.70, 600, 125, 6},
    {"A40", 86, 84, 1.74, 696, 150, 6},
    {"RTX 3090", 86, 82, 1.70, 936, 71, 6},
    {"Orin", 87, 16, 1.30, 204, 43, 4},
    {"L40S", 89, 142, 2.52, 864, 362, 96},
    {"L4", 89, 58, 2.04, 300, 121, 48},
    {"RTX 4090", 89, 128, 2.52, 1008, 165, 72},
    {"H100", 90, 132, 1.83, 3350, 989, 50, 0.63},
    {"H100 PCIe", 90, 114, 1.76, 2000, 756, 50, 0.63},
    {"H200", 90, 132, 1.83, 4800, 989, 50, 0.63},
    {"B200", 100, 148, 1.85, 8000, 2250, 126, 0.31},
    {"B300", 103, 148, 1.92, 8000, 2500, 126, 0.31},
    {"RTX 5090", 120, 170, 2.41, 1792, 210, 96},
    {"RTX PRO 6000", 120, 188, 2.60, 1792, 504, 128},
    {"GB10", 121, 48, 2.42, 273, 125, 24},
};

constexpr bool is_word(std::string_view text, std::string_view word) {
    const auto joins = [&](size_t at) {
        if (at >= text.size()) return false;
        const char c = text[at];
        return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    };
    for (size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1))
        if (!(at > 0 && joins(at - 1)) && !joins(at + word.size())) return true;
    return false;
}

// The one with the longest name that the driver's contains; else the first of the newest compute capability
// up to that of the device.
constexpr int32_t find_gpu(std::string_view name, int32_t compute_capability) {
    int32_t found = -1, other = 0;
    for (int32_t i = 0; i < static_cast<int32_t>(std::size(kGpus)); ++i) {
        const Gpu& gpu = kGpus[i];
        const bool named = gpu.compute_capability == compute_capability && is_word(name, gpu.name);
        if (named &&
            (found < 0 || std::string_view(gpu.name).size() > std::string_view(kGpus[found].name).size()))
            found = i;
        if (gpu.compute_capability <= compute_capability &&
            gpu.compute_capability > kGpus[other].compute_capability)
            other = i;
    }
    return found < 0 ? other : found;
}

// Limits of a device: as much of its GPU's as it has of the multiprocessors.
struct Machine {
    const Gpu& gpu;
    double multiprocessors;
    double memory;    // bytes in a microsecond
    double tensor;    // operations of a multiprocessor in a microsecond, in 16 bits
    double mma_sync;  // likewise, by mma.sync
    double l2;        // bytes
    double l2_rate;   // bytes of L2 in a microsecond, by 32 in each clock of a multiprocessor
    double slower;    // how many times as long as a 1.83 GHz clock its clock takes
};

inline Machine machine_of(const Device& device) {
    const Gpu& gpu = kGpus[device.gpu];
    const double count = std::max(device.multiprocessors, 1),
                 share = std::min(count / gpu.multiprocessors, 1.0);
    return {gpu,
            count,
            1e3 * gpu.bandwidth * share,
            1e6 * gpu.tensor / gpu.multiprocessors,
            1e6 * gpu.tensor * gpu.mma_sync / gpu.multiprocessors,
            1e6 * gpu.l2 * share,
            32e3 * gpu.gigahertz * count,
            1.83 / gpu.gigahertz};
}

}  // namespace ts
