// Checks of single fields, which descriptors of products and of element-wise functions have in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/problem.h"
#include "error.h"
#include "tilesparse/tilesparse.h"

namespace ts {

constexpr int32_t kActivationDTypes = 4;  // the first ones of the dtypes
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

// The ABI numbers dtypes from 1, as 0 is its default.
inline int32_t abi_number(DType dtype) { return static_cast<int32_t>(dtype) + 1; }

// One of the first `count` dtypes.
inline DType check_dtype(int32_t value, int32_t count, const char* name, const char* field = "") {
    require(value >= 1 && value <= count, name, field, " must be 1 to ", count, ", got ", value);
    return static_cast<DType>(value - 1);
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

// Checks the leading dimension of scales [features / kScaleGroup][ld].
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
template <class Source>
Matrix check_matrix(const Source& source, int64_t tokens, int64_t features, const char* name) {
    const auto layout = check_enum<Layout>(source.layout, 2, name, ".layout");
    if (tokens == 0 || features == 0) return {nullptr, 0, layout};
    check_elements(tokens, features, name);
    return {source.data, source.ld, layout};
}

}  // namespace ts
