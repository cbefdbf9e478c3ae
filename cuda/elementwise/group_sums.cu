#include "elementwise/group_sums.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/epilogue.cuh"
#include "common/launch.cuh"

namespace ts::group_sums {
namespace {

constexpr int kColumns = 8, kLines = 32, kThreads = kColumns * kLines;  // 128 bytes of 32 tokens at a time
constexpr int kAhead = 4;

constexpr int width_of(int element) { return 16 / element; }

// A block for each group and piece of the features. Each thread adds every 32nd token of the group, and the
// sums of threads are added in order: results do not depend on the other groups.
template <class Element, class Result>
__global__ void __launch_bounds__(kThreads) group_kernel(const __grid_constant__ GroupSums of, int pieces) {
    using Sum = std::conditional_t<sizeof(Element) == 8, double, float>;
    constexpr int kWidth = width_of(sizeof(Element)), kFeatures = kColumns * kWidth;
    __shared__ Sum shared[kLines][kFeatures];
    const int column = threadIdx.x % kColumns, line = threadIdx.x / kColumns;
    const int64_t first_feature = int64_t{blockIdx.x} % pieces * kFeatures, group = blockIdx.x / pieces;
    // Whatever the offsets are, nothing outside of y is read.
    const auto offset = [&](int64_t i) {
        return max(int64_t{0}, min(int64_t{__ldg(of.offsets + i)}, of.tokens));
    };
    const int64_t end = offset(group + 1), ld = of.y.ld, feature = first_feature + column * kWidth;
    Sum sums[kWidth] = {};
    const auto add = [&](const uint4& vector) {
        const auto* const elements = reinterpret_cast<const Element*>(&vector);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[i] += static_cast<Sum>(elements[i]);
    };
    if (feature < of.features) {
        const auto* const y = static_cast<const Element*>(of.y.data) + feature;
        int64_t token = offset(group) + line;
        for (; token + (kAhead - 1) * kLines < end; token += kAhead * kLines) {
            uint4 vectors[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                vectors[i] = __ldg(reinterpret_cast<const uint4*>(y + (token + i * kLines) * ld));
#pragma unroll
            for (int i = 0; i < kAhead; ++i) add(vectors[i]);
        }
        for (; token < end; token += kLines) add(__ldg(reinterpret_cast<const uint4*>(y + token * ld)));
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) shared[line][column * kWidth + i] = sums[i];
    __syncthreads();
    const int own = threadIdx.x;
    if (own >= kFeatures || first_feature + own >= of.features) return;
    Sum sum = 0;
    for (int i = 0; i < kLines; ++i) sum += shared[i][own];
    Result& result = static_cast<Result*>(of.sums)[group * of.features + first_feature + own];
    if constexpr (sizeof(Sum) == 8)
        result = sum;
    else
        result = from_float<Result>(sum);
}

template <class Element, class Result>
cudaError_t run_as(const GroupSums& of, void* stream) {
    constexpr int kFeatures = kColumns * width_of(sizeof(Element));
    const int64_t pieces = (of.features + kFeatures - 1) / kFeatures;
    return launch_kernel(group_kernel<Element, Result>, pieces * of.groups, kThreads, stream, of,
                         static_cast<int>(pieces));
}

template <class Element>
cudaError_t run_from(const GroupSums& of, void* stream) {
    return of.result_dtype == of.dtype ? run_as<Element, Element>(of, stream)
                                       : run_as<Element, float>(of, stream);
}

}  // namespace

int32_t run(const GroupSums& of, void* stream) {
    if (of.features == 0) return cudaSuccess;
    switch (of.dtype) {
        case DType::float64:
            return run_as<double, double>(of, stream);
        case DType::float32:
            return run_as<float, float>(of, stream);
        case DType::float16:
            return run_from<__half>(of, stream);
        default:
            return run_from<__nv_bfloat16>(of, stream);
    }
}

}  // namespace ts::group_sums
