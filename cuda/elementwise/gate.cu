#include "elementwise/gate.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "elementwise/derivatives.cuh"

namespace ts::gate {
namespace {

constexpr int kThreads = 256;
constexpr int kLines = 2;  // tokens of a thread, so that it waits for all of their elements at once

template <class Element>
constexpr int kWidth = 16 / sizeof(Element);

// Elements of a token that a thread reads and writes at once.
template <class Element>
union Elements {
    uint4 vector;
    Element values[kWidth<Element>];
    __device__ Elements() {}
};

template <class Element>
__device__ inline void load(Elements<Element>& to, const Matrix& matrix, int64_t token, int64_t feature) {
    const auto* const from = static_cast<const Element*>(matrix.data) + token * matrix.ld + feature;
    to.vector = __ldg(reinterpret_cast<const uint4*>(from));
}

template <class Element>
__device__ inline void store(const Elements<Element>& from, const Matrix& matrix, int64_t token,
                             int64_t feature) {
    auto* const to = static_cast<Element*>(matrix.data) + token * matrix.ld + feature;
    *reinterpret_cast<uint4*>(to) = from.vector;
}

// The place of a thread among [tokens / kLines, features / kWidth], and how many tokens there are from there
// on: neighbours read side by side, and all of a launch sweep memory from one end to the other.
template <class Element>
struct Place {
    int64_t token, feature;
    int64_t left;

    __device__ explicit Place(const Gate& of) {
        const auto width = static_cast<unsigned>(of.features / kWidth<Element>);
        const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
        token = index / width * kLines;
        feature = index % width * kWidth<Element>;
        left = of.tokens - token;
    }
};

template <class Element, Activation kActivation>
__global__ void __launch_bounds__(kThreads) multiply_kernel(const __grid_constant__ Gate of) {
    const Place<Element> at(of);
    Elements<Element> gate[kLines], factor[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        if (i >= at.left) break;
        load(gate[i], of.gate, at.token + i, at.feature);
        load(factor[i], of.factor, at.token + i, at.feature);
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        if (i >= at.left) break;
#pragma unroll
        for (int j = 0; j < kWidth<Element>; ++j) {
            const float open = activate<Element>(to_float(gate[i].values[j]), kActivation);
            const float value = to_float(factor[i].values[j]) * rounded_to<Element>(open);
            factor[i].values[j] = from_float<Element>(value);
        }
        store(factor[i], of.result, at.token + i, at.feature);
    }
}

template <class Element, Activation kActivation>
__global__ void __launch_bounds__(kThreads) differentiate_kernel(const __grid_constant__ Gate of) {
    const Place<Element> at(of);
    Elements<Element> gate[kLines], factor[kLines], gradient[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        if (i >= at.left) break;
        load(gate[i], of.gate, at.token + i, at.feature);
        load(factor[i], of.factor, at.token + i, at.feature);
        load(gradient[i], of.result, at.token + i, at.feature);
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        if (i >= at.left) break;
#pragma unroll
        for (int j = 0; j < kWidth<Element>; ++j) {
            const float z = to_float(gate[i].values[j]), y = to_float(gradient[i].values[j]);
            const float of_gate = through<Element, kActivation>(y * to_float(factor[i].values[j]), z);
            factor[i].values[j] = from_float<Element>(y * activate<Element>(z, kActivation));
            gate[i].values[j] = from_float<Element>(of_gate);
        }
        store(gate[i], of.of_gate, at.token + i, at.feature);
        store(factor[i], of.of_factor, at.token + i, at.feature);
    }
}

using Kernel = void (*)(Gate);

template <class Element, Activation kActivation>
Kernel kernel_as(bool gradients) {
    return gradients ? differentiate_kernel<Element, kActivation> : multiply_kernel<Element, kActivation>;
}

template <class Element>
Kernel kernel_of(Activation activation, bool gradients) {
    switch (activation) {
        case Activation::none:
            return kernel_as<Element, Activation::none>(gradients);
        case Activation::relu:
            return kernel_as<Element, Activation::relu>(gradients);
        case Activation::gelu:
            return kernel_as<Element, Activation::gelu>(gradients);
        default:
            return kernel_as<Element, Activation::silu>(gradients);
    }
}

int32_t launch(const Gate& gate, bool gradients, void* stream) {
    if (gate.tokens == 0 || gate.features == 0) return cudaSuccess;
    const auto find = gate.dtype == DType::float32   ? kernel_of<float>
                      : gate.dtype == DType::float16 ? kernel_of<__half>
                                                     : kernel_of<__nv_bfloat16>;
    const int64_t threads =
        (gate.tokens + kLines - 1) / kLines * (gate.features * element_size(gate.dtype) / 16);
    return launch_kernel(find(gate.activation, gradients), (threads + kThreads - 1) / kThreads, kThreads,
                         stream, gate);
}

}  // namespace

int32_t multiply(const Gate& gate, void* stream) { return launch(gate, false, stream); }
int32_t differentiate(const Gate& gate, void* stream) { return launch(gate, true, stream); }

}  // namespace ts::gate
