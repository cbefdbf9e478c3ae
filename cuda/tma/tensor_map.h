// Tensor maps: how TMA copies boxes between global and shared memory.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "common/problem.h"
#include "tma/ring.cuh"

namespace ts::tma {

// One dimension of a tensor, innermost first.
struct Extent {
    int64_t size;
    int64_t stride;  // elements; that of the innermost is 1
    int box;
};

// cuTensorMapEncodeTiled of the driver, which is not linked so that the library loads without one.
using Encoder = PFN_cuTensorMapEncodeTiled_v12000;
inline cudaError_t find_encoder(Encoder& encoder) {
    static std::atomic<Encoder> known{nullptr};
    encoder = known.load(std::memory_order_relaxed);
    if (encoder != nullptr) return cudaSuccess;
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess || entry == nullptr) return cudaErrorNotSupported;
    encoder = reinterpret_cast<Encoder>(entry);
    known.store(encoder, std::memory_order_relaxed);
    return cudaSuccess;
}

inline CUtensorMapSwizzle swizzle_of(int bytes) {
    return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
           : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
           : bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                         : CU_TENSOR_MAP_SWIZZLE_NONE;
}

// How TMA calls the elements.
inline CUtensorMapDataType map_type(DType dtype) {
    return dtype == DType::float32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
           : dtype == DType::bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline int element_bytes(CUtensorMapDataType type) {
    if (type == CU_TENSOR_MAP_DATA_TYPE_UINT8) return 1;
    return type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 || type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 ? 4 : 2;
}

constexpr int kMaxDimensions = 4;

// All that a tensor map is made of.
struct Tensor {
    const void* data;
    cuuint64_t sizes[kMaxDimensions];
    cuuint64_t strides[kMaxDimensions - 1];  // bytes; neighbours of the innermost dimension touch
    cuuint32_t boxes[kMaxDimensions];
    uint16_t dimensions;
    uint16_t type;
    uint32_t promotion;
};
static_assert(sizeof(Tensor) == 11 * sizeof(uint64_t));  // no padding: compared and hashed byte by byte

inline cudaError_t encode_tiled(CUtensorMap& map, const Tensor& tensor) {
    Encoder encode = nullptr;
    if (const cudaError_t error = find_encoder(encode)) return error;
    constexpr cuuint32_t kSteps[kMaxDimensions] = {1, 1, 1, 1};
    const auto type = static_cast<CUtensorMapDataType>(tensor.type);
    const CUresult result =
        encode(&map, type, tensor.dimensions, const_cast<void*>(tensor.data), tensor.sizes, tensor.strides,
               tensor.boxes, kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle_of(static_cast<int>(tensor.boxes[0]) * element_bytes(type)),
               static_cast<CUtensorMapL2promotion>(tensor.promotion), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The maps a thread has encoded before. Finding one takes 10 to 20 ns, encoding it 100 to 200.
struct KnownMaps {
    static constexpr int kPlaces = 256;
    struct Place {
        CUtensorMap map;
        Tensor tensor;  // without dimensions where there is none
    };
    Place places[kPlaces];

    Place& place_of(const Tensor& tensor) {
        uint64_t words[sizeof(Tensor) / sizeof(uint64_t)], hash = 0;
        std::memcpy(words, &tensor, sizeof(Tensor));
        for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        return places[hash >> 56];
    }
};
static_assert(KnownMaps::kPlaces == 1 << 8);  // of the hash, the bits that all words reach

// Describes a tensor. The innermost box is 16, 32, 64 or 128 bytes wide, and shared memory is swizzled over
// its width, but for 16. What lies outside of the tensor reads as zero and is not written.
inline cudaError_t encode(CUtensorMap& map, CUtensorMapDataType type, const void* data,
                          std::initializer_list<Extent> extents,
                          CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    Tensor tensor{};
    tensor.data = data;
    for (const Extent& extent : extents) {
        tensor.sizes[tensor.dimensions] = static_cast<cuuint64_t>(extent.size);
        if (tensor.dimensions > 0)
            tensor.strides[tensor.dimensions - 1] =
                static_cast<cuuint64_t>(extent.stride * element_bytes(type));
        tensor.boxes[tensor.dimensions++] = static_cast<cuuint32_t>(extent.box);
    }
    tensor.type = static_cast<uint16_t>(type);
    tensor.promotion = static_cast<uint32_t>(promotion);
    thread_local KnownMaps known;
    KnownMaps::Place& place = known.place_of(tensor);
    if (std::memcmp(&place.tensor, &tensor, sizeof(Tensor)) != 0) {
        place.tensor.dimensions = 0;
        if (const cudaError_t error = encode_tiled(place.map, tensor)) return error;
        place.tensor = tensor;
    }
    map = place.map;
    return cudaSuccess;
}
inline cudaError_t encode(CUtensorMap& map, DType dtype, const void* data,
                          std::initializer_list<Extent> extents,
                          CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    return encode(map, map_type(dtype), data, extents, promotion);
}

// Boxes of rows of a row-major matrix that end where some range of rows does: what is beyond the range reads
// as zero and is not written, wherever it ends. Rows are counted in a dimension of kRangeRows so that a box's
// last row of the range is the last one there is; two further dimensions move the box to where the range
// lies. Of these the last has the stride 2^34 less a row, kRangeRows times which are 2^64 less kRangeRows
// rows. (Triton's ragged descriptors work likewise.) load_range_box() and store_range_box() have the
// coordinates.
inline cudaError_t encode_ranges(CUtensorMap& map, DType dtype, const Matrix& matrix, int64_t features,
                                 int box_features, int box_rows) {
    const int64_t whole = (int64_t{1} << 34) / element_bytes(map_type(dtype));
    return encode(map, dtype, matrix.data,
                  {{features, 1, box_features},
                   {kRangeRows, matrix.ld, box_rows},
                   {INT32_MAX, matrix.ld, 1},
                   {INT32_MAX, whole - matrix.ld, 1}});
}

// Why TMA cannot store results of so many tokens, or nullptr: it writes whole 16 bytes of a line, also past
// its end.
inline const char* refuses_results(const Matrix& output, int64_t tokens) {
    return output.layout == Layout::column_major && tokens % 8 != 0
               ? "it stores column-major results of a multiple of 8 tokens only"
               : nullptr;
}

}  // namespace ts::tma
