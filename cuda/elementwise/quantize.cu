// x [tokens, features] -> quantized [tokens, features] in 8 bits, with scales [tokens] or
// [groups][scales_ld]. Of tokens: a CTA quantizes one token. It reads x once: each thread keeps its part in
// registers while the CTA finds the largest magnitude. Only tokens of more than 64 KiB are read a second
// time, beyond what registers hold.
#include "elementwise/quantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "common/epilogue.cuh"
#include "common/launch.cuh"

namespace ts::quantize {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kKept = 4;  // vectors of a thread in registers
constexpr uint32_t kInfinity = 0x7f800000;

template <class Element>
constexpr int kWidth = 16 / sizeof(Element);

// 16 bytes of x.
template <class Element>
union Elements {
    uint4 vector;
    Element values[kWidth<Element>];
    __device__ Elements() {}
};

// Magnitudes are compared as integers, in which a NaN is above infinity, so that none is lost.
template <class Element>
__device__ inline uint32_t largest_magnitude(const Elements<Element>& x) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kWidth<Element>; ++i) most = max(most, __float_as_uint(fabsf(to_float(x.values[i]))));
    return most;
}

// The largest of all threads of a CTA, in each of them.
__device__ inline uint32_t largest_of_all(uint32_t value) {
    __shared__ uint32_t of_warps[kMaxThreads / kWarp];
    value = __reduce_max_sync(~0u, value);
    if (blockDim.x == kWarp) return value;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane == 0) of_warps[warp] = value;
    __syncthreads();
    return __reduce_max_sync(~0u, lane < blockDim.x / kWarp ? of_warps[lane] : 0);
}

// The integer nearest to x, |x| <= 127, ties to even, in the low byte: 1.5 * 2^23 leaves no fraction.
__device__ inline uint32_t as_int8(float x) { return __float_as_uint(x + 12582912.0f); }

template <class Quantized>
__device__ inline uint32_t four_quantized(const float (&x)[4]) {
    if constexpr (std::is_same_v<Quantized, int8_t>) {
        const uint32_t low = __byte_perm(as_int8(x[0]), as_int8(x[1]), 0x0040);
        const uint32_t high = __byte_perm(as_int8(x[2]), as_int8(x[3]), 0x0040);
        return __byte_perm(low, high, 0x5410);
    } else {
        const uint32_t low = __nv_cvt_float2_to_fp8x2({x[0], x[1]}, __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2({x[2], x[3]}, __NV_SATFINITE, __NV_E4M3);
        return low | high << 16;
    }
}

template <class Quantized, class Element>
__device__ inline void store(const Elements<Element>& x, float inverse, uint32_t* to) {
    constexpr int kWords = kWidth<Element> / 4;
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        float scaled[4];  // rounded before anything is added, as elsewhere
#pragma unroll
        for (int j = 0; j < 4; ++j) scaled[j] = __fmul_rn(to_float(x.values[4 * i + j]), inverse);
        words[i] = inverse == 0.0f ? 0 : four_quantized<Quantized>(scaled);
    }
    if constexpr (kWords == 2)
        *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    else
        *to = words[0];
}

// The scale of what has this largest magnitude, and what it is multiplied by.
struct Scale {
    float stored, inverse;
    __device__ Scale(uint32_t most, float largest) {
        const bool finite = most < kInfinity;
        const float scale = fmaxf(__fdiv_rn(__uint_as_float(most), largest), kLeastScale);
        stored = finite ? scale : __uint_as_float(0x7fc00000);
        inverse = finite ? __frcp_rn(scale) : 0.0f;
    }
};

template <class Element, class Quantized>
__global__ void __launch_bounds__(kMaxThreads) quantize_kernel(const __grid_constant__ Quantization of) {
    const int64_t token = blockIdx.x;
    const auto* const x =
        reinterpret_cast<const uint4*>(static_cast<const Element*>(of.x.data) + token * of.x.ld);
    auto* const to = static_cast<char*>(of.quantized.data) + token * of.quantized.ld;
    const auto vectors = static_cast<int>(of.features / kWidth<Element>);
    const int threads = blockDim.x, beyond = threadIdx.x + kKept * threads;
    const auto read = [&](int i) {
        Elements<Element> elements;
        elements.vector = i < vectors ? __ldg(x + i) : uint4{};
        return elements;
    };
    const auto place = [&](int i) { return reinterpret_cast<uint32_t*>(to + int64_t{i} * kWidth<Element>); };

    Elements<Element> kept[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = read(threadIdx.x + i * threads);
    uint32_t most = 0;
#pragma unroll
    for (const auto& elements : kept) most = max(most, largest_magnitude(elements));
    for (int i = beyond; i < vectors; i += threads) most = max(most, largest_magnitude(read(i)));
    most = largest_of_all(most);

    const Scale scale(most, std::is_same_v<Quantized, int8_t> ? 127.0f : 448.0f);
    if (threadIdx.x == 0) of.scales[token] = scale.stored;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int at = threadIdx.x + i * threads;
        if (at < vectors) store<Quantized>(kept[i], scale.inverse, place(at));
    }
    for (int i = beyond; i < vectors; i += threads) store<Quantized>(read(i), scale.inverse, place(i));
}

// Quantizes in groups: a warp takes this many features of a token, a CTA those of some tokens, whose scales
// lie side by side. Lanes that share a group find its largest magnitude.
constexpr int kGroupWarps = 8;
template <class Element>
constexpr int kWarpFeatures = kKept * kWarp * kWidth<Element>;

template <class Element>
__global__ void __launch_bounds__(kGroupWarps* kWarp)
    quantize_groups_kernel(const __grid_constant__ Quantization of) {
    constexpr int kSharers = kScaleGroup / kWidth<Element>;
    const int lane = threadIdx.x % kWarp;
    const auto chunks = static_cast<int>((of.features - 1) / kWarpFeatures<Element> + 1);
    const int64_t token = int64_t{blockIdx.x} / chunks * kGroupWarps + threadIdx.x / kWarp;
    if (token >= of.tokens) return;
    const int64_t first = int64_t{blockIdx.x % chunks} * kWarpFeatures<Element> + lane * kWidth<Element>;
    const auto* const x = static_cast<const Element*>(of.x.data) + token * of.x.ld;
    auto* const to = static_cast<char*>(of.quantized.data) + token * of.quantized.ld;
    const auto feature = [&](int i) { return first + i * kWarp * kWidth<Element>; };

    Elements<Element> kept[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i)
        kept[i].vector =
            feature(i) < of.features ? __ldg(reinterpret_cast<const uint4*>(x + feature(i))) : uint4{};
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        uint32_t most = largest_magnitude(kept[i]);
#pragma unroll
        for (int distance = kSharers / 2; distance > 0; distance /= 2)
            most = max(most, __shfl_xor_sync(~0u, most, distance));
        const Scale scale(most, 448.0f);
        if (feature(i) >= of.features) continue;
        if (lane % kSharers == 0) of.scales[feature(i) / kScaleGroup * of.scales_ld + token] = scale.stored;
        store<__nv_fp8_e4m3>(kept[i], scale.inverse, reinterpret_cast<uint32_t*>(to + feature(i)));
    }
}

template <class Element>
int32_t run_groups(const Quantization& of, void* stream) {
    if (of.features == 0) return cudaSuccess;
    const int64_t chunks = (of.features - 1) / kWarpFeatures<Element> + 1;
    const int64_t rows = (of.tokens - 1) / kGroupWarps + 1;
    return launch_kernel(quantize_groups_kernel<Element>, chunks * rows, kGroupWarps * kWarp, stream, of);
}

using Kernel = void (*)(Quantization);

template <class Element>
Kernel kernel_of(DType quantized) {
    return quantized == DType::int8 ? quantize_kernel<Element, int8_t>
                                    : quantize_kernel<Element, __nv_fp8_e4m3>;
}

}  // namespace

int32_t run(const Quantization& of, void* stream) {
    if (of.tokens == 0) return cudaSuccess;
    if (of.in_groups())
        return (of.dtype == DType::float32   ? run_groups<float>
                : of.dtype == DType::float16 ? run_groups<__half>
                                             : run_groups<__nv_bfloat16>)(of, stream);
    const Kernel kernel = (of.dtype == DType::float32   ? kernel_of<float>
                           : of.dtype == DType::float16 ? kernel_of<__half>
                                                        : kernel_of<__nv_bfloat16>)(of.quantized_dtype);
    const int64_t vectors = of.features * element_size(of.dtype) / 16;
    const int64_t warps = (vectors + kKept * kWarp - 1) / (kKept * kWarp);
    const auto threads = static_cast<int>(std::clamp<int64_t>(warps * kWarp, kWarp, kMaxThreads));
    return launch_kernel(kernel, of.tokens, threads, stream, of);
}

}  // namespace ts::quantize
