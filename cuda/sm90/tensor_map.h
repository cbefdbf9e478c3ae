// Tensor maps: how TMA copies boxes between global and shared memory.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "common/problem.h"

namespace ts::sm90 {

// One dimension of a tensor, innermost first.
struct Extent {
    int64_t size;
    int64_t stride;  // elements; that of the innermost is 1
    int box;
};

// cuTensorMapEncodeTiled of the driver, which is not linked so that the library loads without one.
inline PFN_cuTensorMapEncodeTiled_v12000 encoder() {
    static const auto function = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                                   cudaEnableDefault, &found);
#else
        const cudaError_t error =
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
        if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) entry = nullptr;
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
    }();
    return function;
}

inline CUtensorMapSwizzle swizzle_of(int bytes) {
    return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
           : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                         : CU_TENSOR_MAP_SWIZZLE_32B;
}

// Describes a tensor of 2-byte elements. The innermost box is 16, 32 or 64 elements wide, and shared memory
// is swizzled over its width. What lies outside of the tensor reads as zero and is not written.
inline cudaError_t encode(CUtensorMap& map, DType dtype, const void* data,
                          std::initializer_list<Extent> extents,
                          CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    constexpr int kMaxRank = 3;
    constexpr int kSize = 2;
    cuuint64_t sizes[kMaxRank], strides[kMaxRank];
    cuuint32_t boxes[kMaxRank], steps[kMaxRank];
    cuuint32_t rank = 0;
    for (const Extent& extent : extents) {
        sizes[rank] = static_cast<cuuint64_t>(extent.size);
        strides[rank] = static_cast<cuuint64_t>(extent.stride) * kSize;
        boxes[rank] = static_cast<cuuint32_t>(extent.box);
        steps[rank++] = 1;
    }
    const auto encode_tiled = encoder();
    if (encode_tiled == nullptr) return cudaErrorNotSupported;
    const CUresult result = encode_tiled(
        &map, dtype == DType::bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        rank, const_cast<void*>(data), sizes, strides + 1, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle_of(static_cast<int>(boxes[0]) * kSize), promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Why TMA cannot store results of so many tokens, or nullptr: it writes whole 16 bytes of a line, also past
// its end.
inline const char* refuses_results(const Matrix& output, int64_t tokens) {
    return output.layout == Layout::feature_major && tokens % 8 != 0
               ? "it stores feature-major results of a multiple of 8 tokens only"
               : nullptr;
}

}  // namespace ts::sm90
