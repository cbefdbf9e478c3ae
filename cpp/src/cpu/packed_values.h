// Values of int8 as AMX multiplies them: panels of 32 features, each a list of steps along k. A step has 16,
// 32 or 64 numbers of k for each feature, [2][depth / 4][16 features][4].
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/problem.h"

namespace ts::cpu {

constexpr int64_t kPanelFeatures = 32;

struct PackedValues {
    int32_t depth;         // of a step
    const int32_t* first;  // [panels + 1] steps
    const int32_t* k;      // of each step, where it begins
    const int8_t* values;  // [steps][depth * 32]
};

// Room for packed values; 0 for blocks that panels cannot have.
size_t packed_values_size(const Problem& problem);
int32_t pack_values(const Problem& problem, void* packed, void* stream);
PackedValues packed_values(const Pattern& pattern, const void* packed);

}  // namespace ts::cpu
