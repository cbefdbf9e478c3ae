// Checks of single fields, which descriptors of products and of element-wise functions have in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/problem.h"
#include "error.h"
#include "tilesparse/tilesparse.h"

namespace ts {

constexpr int32_t kActivationDTypes = 4;  // of the dtypes, the first ones
constexpr int64_t kMaxGroups = 1024;
constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();
// CUDA kernels number tokens and features in 32 bits and look by less than the difference past the last one.
constexpr int64_t kMaxDeviceExtent = (int64_t{1} << 31) - (1 << 16);

template <class Enum, class... Name>
Enum check_enum(int32_t value, int32_t count, const Name&... name) {
    require(value >= 0 && value < count, name..., " must be 0 ", count == 2 ? "or " : "to ", count - 1,
            ", got ", value);
    return static_cast<Enum>(value);
}

inline void check_extent(int64_t extent, const char* name, DeviceType device) {
    const int64_t most = device == DeviceType::cuda ? kMaxDeviceExtent : kMaxExtent;
    require(extent >= 0 && extent <= most, name, " must be 0 to ", most,
            device == DeviceType::cuda ? " on a CUDA device" : "", ", got ", extent);
}

inline void check_features(int64_t features, int32_t block, const char* name, const char* block_name,
                           DeviceType device) {
    check_extent(features, name, device);
    require(features % block == 0, name, " must be a multiple of ", block_name, ", got ", features);
}

// Of scales [features / kScaleGroup][ld].
inline void check_scales_ld(int64_t ld, int64_t tokens, const char* name) {
    const int64_t least = std::max<int64_t>(tokens, 1);
    require(ld >= least && ld <= kMaxExtent, name, " must be ", least, " to ", kMaxExtent, ", got ", ld);
}

// No address space holds more elements, and nothing that is worked out from so many overflows.
constexpr int64_t kMaxElements = int64_t{1} << 47;

inline void check_elements(int64_t tokens, int64_t features, const char* name) {
    require(features == 0 || tokens <= kMaxElements / features, name, " must have at most ", kMaxElements,
            " elements, got ", tokens, " tokens of ", features, " features");
}

// An empty matrix is neither read nor written: its address is dropped.
inline Matrix check_matrix(const ts_matrix& source, int64_t tokens, int64_t features, const char* name) {
    require(source.reserved == 0, name, ".reserved must be 0, got ", source.reserved);
    const auto layout = check_enum<Layout>(source.layout, 2, name, ".layout");
    if (tokens == 0 || features == 0) return {nullptr, 0, layout};
    check_elements(tokens, features, name);
    return {source.data, source.ld, layout};
}

}  // namespace ts
