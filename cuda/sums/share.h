// How sums over tokens are shared and added, for kernels that sum what they write.
#pragma once

#include "sums/sums.h"

namespace ts::sums {

// `least_tokens`: of a part at least. Many of them keep adding the parts short.
Sums share(int64_t tokens, int64_t features, DType dtype, bool row_major, int64_t warps,
           int64_t least_tokens = 64);

// Warps that a device holds at a time; thread blocks of 8 of them, at most as many, for all items.
int64_t warps_of(const Device& device);
unsigned block_count(const Sums& sums, const Device& device);

int32_t add_partial(const BiasGradient& gradient, const Sums& sums, void* stream);

}  // namespace ts::sums
