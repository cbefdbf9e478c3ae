#include "elementwise/combine.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "common/epilogue.cuh"
#include "common/launch.cuh"

namespace ts::combine {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int kAhead = 4;  // vectors that a thread waits for at once

template <class Element>
using SumOf = std::conditional_t<sizeof(Element) == 8, double, float>;
template <class Element>
constexpr int kWidth = 16 / sizeof(Element);

// Elements of a row that a thread reads and writes at once.
template <class Element>
union Elements {
    uint4 vector;
    Element values[kWidth<Element>];
    __device__ Elements() {}
};

// The row of y at a place; -1 if y has no such row, which then counts as zeros.
__device__ inline int64_t row_at(const Combination& of, int64_t place) {
    const int64_t row = __ldg(of.rows + place);
    return row >= 0 && row < of.count() ? row : -1;
}

template <class Element>
__device__ inline uint4 load(const Matrix& matrix, int64_t row, int64_t feature) {
    const auto* const from = static_cast<const Element*>(matrix.data) + row * matrix.ld + feature;
    return __ldg(reinterpret_cast<const uint4*>(from));
}

template <class Element>
__device__ inline void store(const Elements<Element>& from, const Matrix& matrix, int64_t row,
                             int64_t feature) {
    auto* const to = static_cast<Element*>(matrix.data) + row * matrix.ld + feature;
    *reinterpret_cast<uint4*>(to) = from.vector;
}

template <class Element>
__device__ inline Element rounded(SumOf<Element> sum) {
    if constexpr (sizeof(Element) == 8)
        return sum;
    else
        return from_float<Element>(sum);
}

template <class Element>
__device__ inline SumOf<Element> weight_at(const Combination& of, int64_t place) {
    if (of.weights == nullptr) return 1;
    return static_cast<SumOf<Element>>(__ldg(static_cast<const Element*>(of.weights) + place));
}

// A thread adds up some neighbouring features of a token, choice by choice.
template <class Element>
__global__ void __launch_bounds__(kThreads) add_up_kernel(const __grid_constant__ Combination of) {
    const auto width = static_cast<unsigned>(of.features / kWidth<Element>);
    const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, token = index / width;
    const int64_t feature = index % width * kWidth<Element>;
    if (token >= of.tokens) return;
    SumOf<Element> sums[kWidth<Element>] = {};
    for (int64_t first = 0; first < of.choices; first += kAhead) {
        Elements<Element> terms[kAhead];
        SumOf<Element> weights[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int64_t place = token * of.choices + first + i;
            const int64_t row = first + i < of.choices ? row_at(of, place) : -1;
            terms[i].vector = row < 0 ? uint4{} : load<Element>(of.y, row, feature);
            weights[i] = row < 0 ? 0 : weight_at<Element>(of, place);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int j = 0; j < kWidth<Element>; ++j)
                sums[j] += weights[i] * static_cast<SumOf<Element>>(terms[i].values[j]);
    }
    Elements<Element> result;
#pragma unroll
    for (int j = 0; j < kWidth<Element>; ++j) result.values[j] = rounded<Element>(sums[j]);
    store(result, of.result, token, feature);
}

// A warp has a row of y: it writes the row's gradient, and the product of the row and the token's gradient,
// which the warps beside it read as well.
template <class Element, bool kOfY, bool kOfWeights>
__global__ void __launch_bounds__(kThreads) differentiate_kernel(const __grid_constant__ Combination of) {
    using Sum = SumOf<Element>;
    constexpr int kStep = kWarp * kWidth<Element>;
    const int64_t place = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
    if (place >= of.count()) return;
    const int lane = threadIdx.x % kWarp;
    const int64_t token = place / of.choices, row = row_at(of, place);
    const Sum weight = weight_at<Element>(of, place);
    const int64_t features = row < 0 ? 0 : of.features;
    Sum dot = 0;
    for (int64_t first = lane * kWidth<Element>; first < features; first += kAhead * kStep) {
        Elements<Element> slopes[kAhead], terms[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int64_t feature = first + i * kStep;
            if (feature >= features) break;
            slopes[i].vector = load<Element>(of.result, token, feature);
            if constexpr (kOfWeights) terms[i].vector = load<Element>(of.y, row, feature);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int64_t feature = first + i * kStep;
            if (feature >= features) break;
#pragma unroll
            for (int j = 0; j < kWidth<Element>; ++j) {
                const auto slope = static_cast<Sum>(slopes[i].values[j]);
                if constexpr (kOfWeights) dot += slope * static_cast<Sum>(terms[i].values[j]);
                if (kOfY && of.weights != nullptr) slopes[i].values[j] = rounded<Element>(weight * slope);
            }
            if constexpr (kOfY) store(slopes[i], of.of_y, row, feature);
        }
    }
    if constexpr (kOfWeights) {
        for (int distance = kWarp / 2; distance > 0; distance /= 2)
            dot += __shfl_xor_sync(~0u, dot, distance);
        if (lane == 0) static_cast<Element*>(of.of_weights)[place] = rounded<Element>(dot);
    }
}

using Kernel = void (*)(Combination);

template <class Element>
Kernel gradient_kernel(const Combination& of) {
    if (of.of_weights == nullptr) return differentiate_kernel<Element, true, false>;
    return of.wants_y ? differentiate_kernel<Element, true, true>
                      : differentiate_kernel<Element, false, true>;
}

template <class Find>
Kernel of_dtype(DType dtype, const Find& find) {
    switch (dtype) {
        case DType::float64:
            return find(double{});
        case DType::float32:
            return find(float{});
        case DType::float16:
            return find(__half{});
        default:
            return find(__nv_bfloat16{});
    }
}

int32_t launch(Kernel kernel, int64_t threads, const Combination& of, void* stream) {
    if (threads == 0) return cudaSuccess;
    return launch_kernel(kernel, (threads + kThreads - 1) / kThreads, kThreads, stream, of);
}

}  // namespace

int32_t add_up(const Combination& of, void* stream) {
    const Kernel kernel = of_dtype(of.dtype, [](auto element) { return add_up_kernel<decltype(element)>; });
    return launch(kernel, of.tokens * (of.features * element_size(of.dtype) / 16), of, stream);
}

int32_t differentiate(const Combination& of, void* stream) {
    const Kernel kernel =
        of_dtype(of.dtype, [&](auto element) { return gradient_kernel<decltype(element)>(of); });
    return launch(kernel, of.count() * kWarp, of, stream);
}

}  // namespace ts::combine
