// Transposes of words over the lanes of a warp, by which each lane gets neighbours to store.
#pragma once

#include <cstdint>

namespace ts::sm90 {

// Transposes 2 x 2 words over lanes whose numbers differ in one bit.
__device__ inline void exchange(uint32_t& low, uint32_t& high, int bit) {
    const bool upper = threadIdx.x & bit;
    const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, bit);
    (upper ? low : high) = other;
}

// Transposes 4 x 4 words of four lanes. Of 32 neighbours that they hold, each two of every eight, every lane
// gets eight.
__device__ inline void exchange(uint32_t (&words)[4]) {
    exchange(words[0], words[1], 1);
    exchange(words[2], words[3], 1);
    exchange(words[0], words[2], 2);
    exchange(words[1], words[3], 2);
}

}  // namespace ts::sm90
