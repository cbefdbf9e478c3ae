#include "gate/gate.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "common/derivatives.cuh"
#include "common/epilogue.cuh"
#include "sums/share.h"

namespace ts::gate {
namespace {

using sums::Sums;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocks = 4;  // of a multiprocessor: as many warps as sums::block_count counts on

template <class Element>
constexpr int kWidth = 16 / sizeof(Element);

// What a lane reads and writes of a line at once.
template <class Element>
union Elements {
    uint4 vector;
    Element values[kWidth<Element>];
    __device__ Elements() {}
};

template <class Element>
__device__ inline Elements<Element> load(const Matrix& matrix, int64_t token, int64_t feature) {
    Elements<Element> loaded;
    const auto* const from = static_cast<const Element*>(matrix.data) + token * matrix.ld + feature;
    loaded.vector = __ldg(reinterpret_cast<const uint4*>(from));
    return loaded;
}

template <class Element>
__device__ inline void store(const Matrix& matrix, int64_t token, int64_t feature,
                             const Elements<Element>& elements) {
    auto* const to = static_cast<Element*>(matrix.data) + token * matrix.ld + feature;
    *reinterpret_cast<uint4*>(to) = elements.vector;
}

// Items of some features and tokens, of which each warp takes every so many: body(part, feature, first token,
// end), where a lane has the kWidth features from `feature` on.
template <class Element, class Body>
__device__ inline void walk(const Sums& sums, const Body& body) {
    const int warps = gridDim.x * kWarps, lane = threadIdx.x % 32;
    for (int item = blockIdx.x * kWarps + threadIdx.x / 32; item < sums.pieces * sums.parts; item += warps) {
        const int64_t feature = (int64_t{item % sums.pieces} * 32 + lane) * kWidth<Element>;
        const int64_t part = item / sums.pieces, first = part * sums.span;
        if (feature < sums.features) body(part, feature, first, min(first + sums.span, sums.tokens));
    }
}

// Calls lines(token, constant count) for all tokens: as many at a time as memory is to be kept busy with.
template <int kLines, class Lines>
__device__ inline void in_lines(int64_t token, int64_t end, const Lines& lines) {
    for (; token + kLines <= end; token += kLines) lines(token, std::integral_constant<int, kLines>{});
    for (; token < end; ++token) lines(token, std::integral_constant<int, 1>{});
}

template <class Element, Activation kActivation>
__global__ void __launch_bounds__(kThreads, kBlocks)
    multiply_kernel(const __grid_constant__ Gate of, const __grid_constant__ Sums sums) {
    walk<Element>(sums, [&](int64_t, int64_t feature, int64_t first, int64_t end) {
        in_lines<4>(first, end, [&](int64_t token, auto count) {
            constexpr int kCount = decltype(count)::value;
            Elements<Element> gate[kCount], factor[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                gate[i] = load<Element>(of.gate, token + i, feature);
                factor[i] = load<Element>(of.factor, token + i, feature);
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
#pragma unroll
                for (int j = 0; j < kWidth<Element>; ++j) {
                    const float open = activate<Element>(to_float(gate[i].values[j]), kActivation);
                    const float value = to_float(factor[i].values[j]) * rounded_to<Element>(open);
                    factor[i].values[j] = from_float<Element>(value);
                }
                store(of.result, token + i, feature, factor[i]);
            }
        });
    });
}

// What is summed are the gradients before they are rounded. Sums of the gate are followed by those of the
// factor.
template <class Element, Activation kActivation, bool kSums>
__global__ void __launch_bounds__(kThreads, kBlocks)
    differentiate_kernel(const __grid_constant__ Gate of, const __grid_constant__ Sums sums) {
    walk<Element>(sums, [&](int64_t part, int64_t feature, int64_t first, int64_t end) {
        float gate_sums[kWidth<Element>] = {}, factor_sums[kWidth<Element>] = {};
        in_lines<2>(first, end, [&](int64_t token, auto count) {
            constexpr int kCount = decltype(count)::value;
            Elements<Element> gate[kCount], factor[kCount], gradient[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                gate[i] = load<Element>(of.gate, token + i, feature);
                factor[i] = load<Element>(of.factor, token + i, feature);
                gradient[i] = load<Element>(of.result, token + i, feature);
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
#pragma unroll
                for (int j = 0; j < kWidth<Element>; ++j) {
                    const float z = to_float(gate[i].values[j]), y = to_float(gradient[i].values[j]);
                    const float of_factor = y * activate<Element>(z, kActivation);
                    const float of_gate = through<Element, kActivation>(y * to_float(factor[i].values[j]), z);
                    if constexpr (kSums) gate_sums[j] += of_gate, factor_sums[j] += of_factor;
                    gate[i].values[j] = from_float<Element>(of_gate);
                    factor[i].values[j] = from_float<Element>(of_factor);
                }
                store(of.of_gate, token + i, feature, gate[i]);
                store(of.of_factor, token + i, feature, factor[i]);
            }
        });
        if constexpr (kSums) {
            auto* const to = static_cast<float*>(sums.partial) + part * sums.features + feature;
#pragma unroll
            for (int j = 0; j < kWidth<Element>; ++j) {
                to[j] = gate_sums[j];
                to[sums.parts * sums.features + j] = factor_sums[j];
            }
        }
    });
}

bool has_sums(const Gate& gate) { return gate.gate_sums != nullptr || gate.factor_sums != nullptr; }

Sums share(const Gate& gate, const Device& device) {
    constexpr int64_t kFewTokens = 4;  // of a part that leaves no sums to add
    const int64_t warps = sums::warps_of(device);
    return has_sums(gate) ? sums::share(gate.tokens, gate.features, gate.dtype, true, warps)
                          : sums::share(gate.tokens, gate.features, gate.dtype, true, warps, kFewTokens);
}

// Calls start(Element{}, constant activation).
template <class Start>
int32_t dispatch(const Gate& gate, const Start& start) {
    const auto with = [&](auto element) {
        switch (gate.activation) {
            case Activation::none:
                return start(element, std::integral_constant<Activation, Activation::none>{});
            case Activation::relu:
                return start(element, std::integral_constant<Activation, Activation::relu>{});
            case Activation::gelu:
                return start(element, std::integral_constant<Activation, Activation::gelu>{});
            default:
                return start(element, std::integral_constant<Activation, Activation::silu>{});
        }
    };
    switch (gate.dtype) {
        case DType::float32:
            return with(float{});
        case DType::float16:
            return with(__half{});
        default:
            return with(__nv_bfloat16{});
    }
}

}  // namespace

int32_t multiply(const Gate& gate, const Device& device, void* stream) {
    if (gate.tokens == 0 || gate.features == 0) return cudaSuccess;
    const Sums shares = share(gate, device);
    return dispatch(gate, [&](auto element, auto activation) -> int32_t {
        multiply_kernel<decltype(element), decltype(activation)::value>
            <<<sums::block_count(shares, device), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(gate,
                                                                                                    shares);
        return cudaGetLastError();
    });
}

size_t workspace_size(const Gate& gate, const Device& device) {
    const Sums shares = sums::share(gate.tokens, gate.features, gate.dtype, true, sums::warps_of(device));
    return 2 * sizeof(float) * shares.parts * shares.features;
}

int32_t differentiate(const Gate& gate, const Device& device, void* workspace, void* stream) {
    Sums shares = share(gate, device);
    if (gate.features == 0 || (gate.tokens == 0 && !has_sums(gate))) return cudaSuccess;
    shares.partial = workspace;
    const int32_t error = dispatch(gate, [&](auto element, auto activation) -> int32_t {
        using Element = decltype(element);
        constexpr Activation kActivation = decltype(activation)::value;
        const auto kernel = has_sums(gate) ? differentiate_kernel<Element, kActivation, true>
                                           : differentiate_kernel<Element, kActivation, false>;
        kernel<<<sums::block_count(shares, device), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(gate,
                                                                                                      shares);
        return cudaGetLastError();
    });
    if (error != cudaSuccess) return error;
    for (void* const to : {gate.gate_sums, gate.factor_sums}) {
        if (to != nullptr)
            if (const int32_t code = sums::add_partial({to, gate.dtype, false}, shares, stream)) return code;
        shares.partial = static_cast<float*>(shares.partial) + shares.parts * shares.features;
    }
    return cudaSuccess;
}

}  // namespace ts::gate
