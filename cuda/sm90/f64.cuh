// float64 with the instructions of 9.0, which multiply twice as fast as those of 8.0: the kernels of sm80
// otherwise.
#pragma once

#include <cute/arch/mma_sm90.hpp>

#include "sm80/math.cuh"
#include "sm90/launch.cuh"

namespace ts::sm90 {

struct Of16x8x8 {
    __device__ static void fma(double (&c)[4], const double (&a)[4], const double (&b)[2]) {
        cute::SM90::MMA_16x8x8_F64F64F64F64_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0],
                                                    b[1], c[0], c[1], c[2], c[3]);
    }
};

using f64_k8 = sm80::Float64<Of16x8x8, 2>;

// A row of sdd of sm80 whose code is for 9.0 alone. No measurement of 16 bits speaks for it: what a tile
// unites and does not have costs more here.
template <class Host>
struct Float64Row {
    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, 0, 1)) return reason;
        return Host::refuses(problem, device);
    }
    static constexpr Kernel row(const char* name) {
        Kernel row = Host::row(name);
        row.family = "sm90_sdd_f64";
        row.min_compute_capability = 90;
        row.refuses = refuses;
        return row;
    }
};

}  // namespace ts::sm90
