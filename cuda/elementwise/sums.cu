#include "elementwise/sums.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "common/launch.cuh"
#include "elementwise/derivatives.cuh"
#include "elementwise/sums.cuh"

namespace ts::sums {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAhead = 8;
constexpr int kWarpsOfMultiprocessor = 32;

// The same items as of sum_items, row-major. What is summed is the gradient of z before it is rounded.
template <class Element, Activation kActivation>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ Sums sums, const Element* z, const Element* gradient,
                      Element* result) {
    constexpr int kWidth = 16 / sizeof(Element), kLines = 4;
    const int warps = gridDim.x * kWarps, lane = threadIdx.x % 32;
    for (int item = blockIdx.x * kWarps + threadIdx.x / 32; item < sums.pieces * sums.parts; item += warps) {
        const int64_t feature = (int64_t{item % sums.pieces} * 32 + lane) * kWidth;
        const int64_t part = item / sums.pieces, end = min((part + 1) * sums.span, sums.tokens);
        if (feature >= sums.features) continue;
        float sum[kWidth] = {};
        const auto activate_lines = [&](int64_t token, auto count) {
            constexpr int kCount = decltype(count)::value;
            uint4 of_result[kCount], of_z[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const int64_t at = (token + i) * sums.features + feature;
                of_result[i] = *reinterpret_cast<const uint4*>(gradient + at);
                of_z[i] = __ldg(reinterpret_cast<const uint4*>(z + at));
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                auto* const values = reinterpret_cast<Element*>(&of_result[i]);
                const auto* const zs = reinterpret_cast<const Element*>(&of_z[i]);
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    const float value = through<Element, kActivation>(to_float(values[j]), to_float(zs[j]));
                    sum[j] += value;
                    values[j] = from_float<Element>(value);
                }
                *reinterpret_cast<uint4*>(result + (token + i) * sums.features + feature) = of_result[i];
            }
        };
        int64_t token = part * sums.span;
        for (; token + kLines <= end; token += kLines)
            activate_lines(token, std::integral_constant<int, kLines>{});
        for (; token < end; ++token) activate_lines(token, std::integral_constant<int, 1>{});
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
            static_cast<float*>(sums.partial)[part * sums.features + feature + j] = sum[j];
    }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) sum_lines_kernel(const __grid_constant__ Sums sums) {
    sum_items<Element, kAhead, false>(sums, blockIdx.x * kWarps + threadIdx.x / 32, gridDim.x * kWarps,
                                      threadIdx.x % 32);
}

// Row-major. The warps of a block share the tokens of an item, so that few tokens keep many warps busy and
// leave few parts to add.
template <class Element>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const __grid_constant__ Sums sums) {
    using Piece = sums::Piece<Element, kAhead, false>;
    using Sum = SumOf<Element>;
    __shared__ Sum shared[kWarps][Piece::kLine];
    const int warp = threadIdx.x / 32;
    const int64_t tokens = sums.span / kWarps;
    for (int item = blockIdx.x; item < sums.pieces * sums.parts; item += gridDim.x) {
        const int64_t part = item / sums.pieces, feature = int64_t{item % sums.pieces} * Piece::kLine;
        const int64_t first = part * sums.span + warp * tokens;
        Piece piece(sums, item % sums.pieces, threadIdx.x % 32);
        piece.add_tokens(first, min(first + tokens, sums.tokens));
        piece.store(shared[warp], Piece::kLine);
        __syncthreads();
        for (int64_t i = threadIdx.x; i < min(int64_t{Piece::kLine}, sums.features - feature);
             i += kThreads) {
            Sum sum = 0;
            for (int j = 0; j < kWarps; ++j) sum += shared[j][i];
            static_cast<Sum*>(sums.partial)[part * sums.features + feature + i] = sum;
        }
        __syncthreads();
    }
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

template <class Sum, class Result>
cudaError_t add_as(const BiasGradient& gradient, const Sums& sums, cudaStream_t stream) {
    return launch_kernel(add_kernel<Sum, Result>, (sums.features + 31) / 32, kThreads, stream, sums,
                         static_cast<Result*>(gradient.data), gradient.accumulate);
}

cudaError_t add(const BiasGradient& gradient, const Sums& sums, cudaStream_t stream) {
    switch (gradient.dtype) {
        case DType::float64:
            return add_as<double, double>(gradient, sums, stream);
        case DType::float32:
            return add_as<float, float>(gradient, sums, stream);
        case DType::float16:
            return add_as<float, __half>(gradient, sums, stream);
        default:
            return add_as<float, __nv_bfloat16>(gradient, sums, stream);
    }
}

// As many as the device holds at a time.
int64_t blocks_of(const Device& device) {
    return int64_t{device.multiprocessors} * (kWarpsOfMultiprocessor / kWarps);
}
int64_t warps_of(const Device& device) { return blocks_of(device) * kWarps; }

// For items of a block or of a warp each.
int64_t block_count(const Sums& sums, const Device& device, int items_of_block) {
    const int64_t blocks = (int64_t{sums.pieces} * sums.parts + items_of_block - 1) / items_of_block;
    return std::min(blocks, blocks_of(device));
}

template <class Element>
cudaError_t sum_as(const Sums& sums, const Device& device, cudaStream_t stream) {
    const auto kernel = sums.row_major ? sum_rows_kernel<Element> : sum_lines_kernel<Element>;
    return launch_kernel(kernel, block_count(sums, device, sums.row_major ? 1 : kWarps), kThreads, stream,
                         sums);
}

template <class Element, Activation kActivation>
cudaError_t activate_by(const ActivationGradient& of, const Sums& sums, const Device& device,
                        cudaStream_t stream) {
    return launch_kernel(activation_kernel<Element, kActivation>, block_count(sums, device, kWarps), kThreads,
                         stream, sums, static_cast<const Element*>(of.z),
                         static_cast<const Element*>(of.gradient), static_cast<Element*>(of.result));
}

template <class Element>
cudaError_t activate_as(const ActivationGradient& of, const Sums& sums, const Device& device,
                        cudaStream_t stream) {
    switch (of.activation) {
        case Activation::relu:
            return activate_by<Element, Activation::relu>(of, sums, device, stream);
        case Activation::gelu:
            return activate_by<Element, Activation::gelu>(of, sums, device, stream);
        default:
            return activate_by<Element, Activation::silu>(of, sums, device, stream);
    }
}

constexpr int64_t kAlignment = 16;  // tokens, so that lines of them begin aligned

// Among warps or blocks. `alignment`: tokens of a part are a multiple of it.
Sums share(int64_t tokens, int64_t features, DType dtype, bool row_major, int64_t workers,
           int64_t alignment) {
    constexpr int64_t kLeastTokens = 64;  // of a part, so that adding the parts stays short
    const int64_t line = 512 / element_size(dtype);
    const int64_t pieces = row_major ? (features + line - 1) / line : features;
    const int64_t most = std::max<int64_t>(1, tokens / kLeastTokens);
    const int64_t parts = std::clamp<int64_t>(pieces == 0 ? 1 : workers / pieces, 1, most);
    const int64_t span = (tokens + parts - 1) / parts;
    Sums sums{};
    sums.tokens = tokens;
    sums.features = features;
    sums.span = (span + alignment - 1) / alignment * alignment;
    sums.pieces = static_cast<int>(pieces);
    sums.parts = static_cast<int>(parts);
    sums.row_major = row_major;
    return sums;
}

Sums share(const ActivationGradient& of, const Device& device) {
    return share(of.tokens, of.features, of.dtype, true, warps_of(device), kAlignment);
}

Sums share(const Problem& problem, int64_t workers, int64_t alignment, void* partial) {
    Sums sums = share(problem.tokens, problem.pattern.out_features, problem.input_dtype,
                      problem.y.layout == Layout::row_major, workers, alignment);
    sums.y = problem.y.data;
    sums.ld = problem.y.ld;
    sums.partial = partial;
    return sums;
}

// For a kernel of its own. Warps that share a part read whole rounds of lines.
Sums share(const Problem& problem, const Device& device, void* partial) {
    if (problem.y.layout == Layout::row_major)
        return share(problem, blocks_of(device), kWarps * kAhead, partial);
    return share(problem, warps_of(device), kAlignment, partial);
}

size_t bytes_of(const Sums& sums, DType accumulator) {
    return static_cast<size_t>(sums.parts) * sums.features * element_size(accumulator);
}

}  // namespace

Sums share(const Problem& problem, int64_t warps, void* partial) {
    return share(problem, warps, kAlignment, partial);
}

size_t partial_bytes(const Problem& problem, int64_t warps) {
    return bytes_of(share(problem, warps, nullptr), problem.accumulator_dtype());
}

int32_t add_partial(const Problem& problem, const Sums& sums, void* stream) {
    if (sums.features == 0) return cudaSuccess;
    return add(problem.bias_gradient, sums, static_cast<cudaStream_t>(stream));
}

size_t workspace_size(const Problem& problem, const Device& device) {
    return bytes_of(share(problem, device, nullptr), problem.accumulator_dtype());
}

int32_t sum(const Problem& problem, const Device& device, void* workspace, void* stream) {
    const Sums sums = share(problem, device, workspace);
    if (sums.features == 0) return cudaSuccess;
    const auto on = static_cast<cudaStream_t>(stream);
    const auto sum_all = [&] {
        switch (problem.input_dtype) {
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

size_t workspace_size(const ActivationGradient& gradient, const Device& device) {
    return bytes_of(share(gradient, device), accumulator_of(gradient.dtype));
}

int32_t activate_backward(const ActivationGradient& gradient, const Device& device, void* workspace,
                          void* stream) {
    Sums sums = share(gradient, device);
    if (sums.features == 0) return cudaSuccess;
    sums.partial = workspace;
    const auto on = static_cast<cudaStream_t>(stream);
    const auto start = gradient.dtype == DType::float32   ? activate_as<float>
                       : gradient.dtype == DType::float16 ? activate_as<__half>
                                                          : activate_as<__nv_bfloat16>;
    if (const cudaError_t error = start(gradient, sums, device, on)) return error;
    return add({gradient.bias_gradient, gradient.dtype, false}, sums, on);
}

}  // namespace ts::sums
