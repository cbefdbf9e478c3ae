// Arguments of the dds kernel in float64, and what its warps share.
#pragma once

#include "common/plan_view.cuh"
#include "sm80/dds_schedule.cuh"
#include "tma/ring.cuh"

namespace ts::sm90 {

struct Float64Arguments {
    CUtensorMap input;       // of pairs of float32
    sm80::DdsArguments dds;  // without `input` and what is known of it
};

struct Float64Tile {
    static constexpr int kTokens = 128;
    static constexpr int kFeatures = 128;
    static constexpr int kStep = 16;
    static constexpr int kWarpFeatures = 16;
    static constexpr int kWarps = kFeatures / kWarpFeatures;  // that multiply
    static constexpr int kThreads = 32 * kWarps + 128;
    static constexpr int kLineBytes = 128;
    static constexpr int kLine = kLineBytes / sizeof(double);
    static constexpr int kStageBytes = kTokens * kStep * sizeof(double);
    static constexpr int kMaxStages = 31;  // less than weights
};

// Where the weight of a warp's features in a step lies, in pairs of values, or:
constexpr uint32_t kNoWeight = ~0u;
constexpr uint32_t kEndOfSteps = kNoWeight - 1;

// What a CTA's warps know of each other, behind the stages. Steps are numbered over all tiles of the CTA.
struct Float64Progress {
    tma::Barrier full[Float64Tile::kMaxStages + 1];
    uint32_t weights[Float64Tile::kWarps][32];     // of each warp in a step, by its number modulo 32
    uint32_t candidates[Float64Tile::kWarps][32];  // likewise, of steps that are loaded next
    int needed[Float64Tile::kWarps];               // the first step that a warp that multiplies needs, and
    int loading;                                   // that the one that loads has not started
};

__device__ inline int read_now(const int& shared) {
    const int value = *static_cast<const volatile int*>(&shared);
    asm volatile("" ::: "memory");
    return value;
}
__device__ inline void write_now(int& shared, int value) {
    asm volatile("" ::: "memory");
    *static_cast<volatile int*>(&shared) = value;
}

}  // namespace ts::sm90
