// The weight formats of dds kernels for narrow blocks (see common/weight.h), which multiply from registers.
// The weight is packed first, see dds_narrow_pack.cuh; here is what a packed block looks like.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "common/tf32.cuh"
#include "common/weight.h"
#include "sm90/wgmma.cuh"

namespace ts::sm90 {

// A packed block is [kBlock features][kBlock of k]. Of its lines of kLine bytes, vectors of 16 are swizzled
// as TMA does over that width, so that eight features can be read from shared memory at once.
template <class Math, int kBlock_>
struct DenseNarrowWeight : DenseStorage {
    using Value = typename Math::Value;
    static constexpr int kBlock = kBlock_;
    static constexpr int kBlockBytes = kBlock * kBlock * sizeof(Value);

    // One warp packs a block, which is features by k or, transposed, k by features, in lines of `width`
    // elements. A lane moves vectors, which it reads side by side with the other lanes.
    template <bool kTransposed>
    __device__ static void pack(const Value* block, int width, char* packed, int lane) {
        constexpr int kAll = kBlock * kVectors / 32;
        alignas(16) Value elements[kAll][kVector];
        int places[kAll];
#pragma unroll
        for (int i = 0; i < kAll; ++i) {
            const int index = i * 32 + lane;
            const int feature = kTransposed ? index % kBlock : index / kVectors;
            const int vector = kTransposed ? index / kBlock : index % kVectors;
            if (kTransposed) {
#pragma unroll
                for (int k = 0; k < kVector; ++k)
                    elements[i][k] = block[(vector * kVector + k) * width + feature];
            } else {
                reinterpret_cast<uint4&>(elements[i]) =
                    reinterpret_cast<const uint4*>(block + feature * width)[vector];
            }
            if constexpr (std::is_same_v<Value, float> && Math::kPrecision == Precision::tf32)
#pragma unroll
                for (float& value : elements[i]) value = __uint_as_float(round_to_tf32(value));
            places[i] = place(feature, vector);
        }
#pragma unroll
        for (int i = 0; i < kAll; ++i)
            *reinterpret_cast<uint4*>(packed + places[i]) = reinterpret_cast<const uint4&>(elements[i]);
    }

    // A lane's read of the first 32 bytes of k, of 16 features from `first` on, begins here in a block.
    __device__ static uint32_t first_place(int first, int lane) {
        return place(first + lane % 16, lane / 16);
    }

    // The i-th 32 bytes of k. `at`: first_place in some block, from the beginning of `blocks` on.
    __device__ static void read(WeightFragment& fragment, const char* blocks, uint32_t at, int i) {
        const auto& line = *reinterpret_cast<const cute::uint128_t*>(blocks + (at ^ i * 32));
        cute::SM75_U32x4_LDSM_N::copy(line, fragment[0], fragment[1], fragment[2], fragment[3]);
    }

  private:
    static constexpr int kVector = 16 / sizeof(Value);  // elements of k
    static constexpr int kVectors = kBlock / kVector;
    static constexpr int kLine = kBlock * sizeof(Value);

    __device__ static int place(int feature, int vector) {
        return feature * kLine + (vector ^ (feature * kLine / 128 & kVectors - 1)) * 16;
    }
};

}  // namespace ts::sm90
