#include "sums/sums.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "common/sums.cuh"

namespace ts::sums {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAhead = 8;
constexpr int kWarpsOfMultiprocessor = 32;

template <class Element>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sums sums) {
    sum_items<Element, kAhead, false>(sums, blockIdx.x * kWarps + threadIdx.x / 32, gridDim.x * kWarps,
                                      threadIdx.x % 32);
}

// 32 features by 8 threads that add every eighth part, whose sums one of them adds.
template <class Sum, class Result>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const __grid_constant__ Sums sums, Result* result, bool accumulate) {
    __shared__ Sum shared[kWarps][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t feature = int64_t{blockIdx.x} * 32 + lane;
    const auto* const partial = static_cast<const Sum*>(sums.partial) + feature;
    Sum sum = 0;
    if (feature < sums.features)
        for (int part = warp; part < sums.parts; part += kWarps) sum += partial[part * sums.features];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || feature >= sums.features) return;
    for (int i = 1; i < kWarps; ++i) sum += shared[i][lane];
    if (accumulate) sum += static_cast<Sum>(result[feature]);
    if constexpr (sizeof(Sum) == 8)
        result[feature] = sum;
    else
        result[feature] = from_float<Result>(sum);
}

template <class Element, class Result>
cudaError_t add_as(const Problem& problem, const Sums& sums, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>((sums.features + 31) / 32);
    add_kernel<SumOf<Element>><<<blocks, kThreads, 0, stream>>>(
        sums, static_cast<Result*>(problem.bias_gradient.data), problem.bias_gradient.accumulate);
    return cudaGetLastError();
}

template <class Element>
cudaError_t sum_as(const Sums& sums, const Device& device, cudaStream_t stream) {
    const int64_t blocks = (int64_t{sums.pieces} * sums.parts + kWarps - 1) / kWarps;
    const int64_t most = int64_t{device.multiprocessors} * (kWarpsOfMultiprocessor / kWarps);
    sum_kernel<Element><<<static_cast<unsigned>(std::min(blocks, most)), kThreads, 0, stream>>>(sums);
    return cudaGetLastError();
}

int64_t warps_of(const Device& device) { return int64_t{device.multiprocessors} * kWarpsOfMultiprocessor; }

}  // namespace

Sums share(const Problem& problem, int64_t warps, void* partial) {
    constexpr int64_t kLeastTokens = 64;  // of a part, so that adding the parts stays short
    constexpr int64_t kAlignment = 16;    // tokens, so that lines of them begin aligned
    const bool row_major = problem.y.layout == Layout::row_major;
    const int64_t features = problem.pattern.out_features, line = 512 / element_size(problem.dtype);
    const int64_t pieces = row_major ? (features + line - 1) / line : features;
    const int64_t most = std::max<int64_t>(1, problem.tokens / kLeastTokens);
    const int64_t parts = std::clamp<int64_t>(pieces == 0 ? 1 : warps / pieces, 1, most);
    const int64_t span = (problem.tokens + parts - 1) / parts;
    return {problem.y.data,
            partial,
            problem.y.ld,
            problem.tokens,
            features,
            (span + kAlignment - 1) / kAlignment * kAlignment,
            static_cast<int>(pieces),
            static_cast<int>(parts),
            row_major};
}

size_t partial_bytes(const Problem& problem, int64_t warps) {
    const Sums sums = share(problem, warps, nullptr);
    return static_cast<size_t>(sums.parts) * sums.features * (problem.dtype == DType::float64 ? 8 : 4);
}

int32_t add_partial(const Problem& problem, const Sums& sums, void* stream) {
    if (sums.features == 0) return cudaSuccess;
    const auto on = static_cast<cudaStream_t>(stream);
    const bool wide = problem.bias_gradient.dtype != problem.dtype;  // float32 for 16 bits
    switch (problem.dtype) {
        case DType::float64:
            return add_as<double, double>(problem, sums, on);
        case DType::float32:
            return add_as<float, float>(problem, sums, on);
        case DType::float16:
            return wide ? add_as<__half, float>(problem, sums, on)
                        : add_as<__half, __half>(problem, sums, on);
        default:
            return wide ? add_as<__nv_bfloat16, float>(problem, sums, on)
                        : add_as<__nv_bfloat16, __nv_bfloat16>(problem, sums, on);
    }
}

size_t workspace_size(const Problem& problem, const Device& device) {
    return partial_bytes(problem, warps_of(device));
}

int32_t sum(const Problem& problem, const Device& device, void* workspace, void* stream) {
    const Sums sums = share(problem, warps_of(device), workspace);
    if (sums.features == 0) return cudaSuccess;
    const auto on = static_cast<cudaStream_t>(stream);
    const auto sum_all = [&] {
        switch (problem.dtype) {
            case DType::float64:
                return sum_as<double>(sums, device, on);
            case DType::float32:
                return sum_as<float>(sums, device, on);
            case DType::float16:
                return sum_as<__half>(sums, device, on);
            default:
                return sum_as<__nv_bfloat16>(sums, device, on);
        }
    };
    if (const cudaError_t error = sum_all()) return error;
    return add_partial(problem, sums, stream);
}

}  // namespace ts::sums
