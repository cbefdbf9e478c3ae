// dds_nt for a small batch of neurons most of which are off (any GPU; no tensor cores, no plan).
//   inputs:  Y[M,N] = act(X[M,K] * W[N,K]^T + bias) + residual, values with each block transposed [nnz, bk,
//   bn] outputs: Y[M,N] = (X[M,K] * W[N,K]^T + bias) * gate[M,N], values [nnz, bn, bk]
// Operands: activations row-major bf16 or fp16; values of the same dtype; float32 sums. A number with
// |x| <= threshold counts as zero; NaN and infinities never do. What is zero for all tokens is not read: of
// `inputs` the weights of this k, lines of 32 to 128 bytes of a transposed block; of `outputs` the weights of
// this feature.
//
// inputs: a CTA has 16 to 64 features of a block row and a part of its k. Each of its 8 warps takes 64 k at
// a time, lists those that are on in shared memory, and streams their lines, several at a time. Sums of
// warps are added in the CTA, those of CTAs by a second kernel, which finishes the results.
// outputs: a CTA has up to 32 features of a block row, and lists those that are on. A warp has four of them
// and a quarter of k, in steps of 256.
//
// All sums are added in a fixed order. The CUDA cores multiply: by their peak, 8 tokens of 16 bits take an
// H100 a third of the time of reading the weight.
#include "elementwise/skip.h"

#include <algorithm>
#include <cfloat>

#include "common/epilogue.cuh"
#include "common/launch.cuh"

namespace ts::skip {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kUnit = 64;   // k that a warp lists at a time
constexpr int kVector = 8;  // weights that a lane loads at a time

struct Arguments {
    const void* x;
    int64_t x_ld;
    const void* values;
    Adjacency rows;
    float threshold;
    int tokens;
    int features;
    int row_shift, k_shift;  // log2 of the rows (features) and columns (k) of a block
    int parts;               // of the k of a block row
    float* sums;             // [parts, tokens, features]
    void* y;
    int64_t y_ld;
    const void* bias;
    const void* other;  // residual or gate, or null
    int64_t other_ld;
    Activation activation;  // of results, or of the gate
    bool gated;
};

// ---- eight neighbouring weights ----

__device__ inline void read_once(const void* from, uint4& raw) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "l"(from));
}

__device__ inline float2 floats_of(uint32_t pair, __nv_bfloat16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
__device__ inline float2 floats_of(uint32_t pair, __half) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <class Element>
struct Weights {
    using Raw = uint4;

    // Bytes of so many weights.
    __device__ static int64_t bytes(int64_t count) { return count * static_cast<int64_t>(sizeof(Element)); }

    __device__ static void decode(const Raw& raw, float (&weights)[kVector]) {
        const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = floats_of(words[i], Element());
            weights[2 * i] = pair.x;
            weights[2 * i + 1] = pair.y;
        }
    }
};

__device__ inline bool is_off(float x, float threshold) { return fabsf(x) <= threshold; }

template <class Element>
__device__ inline float finished(const Arguments& arguments, float sum, int token, int feature) {
    if (arguments.bias != nullptr) sum += to_float(static_cast<const Element*>(arguments.bias)[feature]);
    const bool adds = arguments.other != nullptr && !arguments.gated;
    if (!arguments.gated) sum = activate<Element>(sum, arguments.activation);
    if (arguments.other == nullptr) return sum;
    const float other =
        to_float(static_cast<const Element*>(arguments.other)[token * arguments.other_ld + feature]);
    return adds ? sum + other : sum * rounded_to<Element>(activate<Element>(other, arguments.activation));
}

// ---- inputs ----

// `kLanes`: of a warp, that read a line together.
template <class Element, int kLanes, int kTokens>
__global__ void __launch_bounds__(kThreads) skip_inputs(const __grid_constant__ Arguments arguments) {
    using W = Weights<Element>;
    constexpr int kFeatures = kVector * kLanes, kLines = 32 / kLanes, kUnroll = kLanes;
    struct Lists {
        int rows[kWarps][kUnit];  // of k in the values
        float x[kWarps][kTokens][kUnit];
    };
    __shared__ union {
        Lists lists;
        float sums[kWarps][kTokens][kFeatures];
    } shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile = static_cast<int>(blockIdx.x) / arguments.parts;
    const int part = static_cast<int>(blockIdx.x) - tile * arguments.parts;
    const int feature = tile * kFeatures, row_shift = arguments.row_shift, k_shift = arguments.k_shift;
    const int first = __ldg(arguments.rows.ptr + (feature >> row_shift));
    const int entries = __ldg(arguments.rows.ptr + (feature >> row_shift) + 1) - first;
    // Scales are those of one block.
    constexpr int unit_shift = 6;
    const int all = entries << k_shift, units = (all + (1 << unit_shift) - 1) >> unit_shift;
    const int in_block = feature & ((1 << row_shift) - 1);
    const char* const values =
        static_cast<const char*>(arguments.values) + W::bytes(in_block + lane % kLanes * kVector);
    const int64_t line_bytes = W::bytes(int64_t{1} << row_shift);
    auto& rows = shared.lists.rows[warp];
    auto& listed = shared.lists.x[warp];
    float sums[kTokens][kVector] = {};
    for (int unit = part * kWarps + warp; unit < units; unit += arguments.parts * kWarps) {
        int count = 0;
#pragma unroll
        for (int i = 0; i < kUnit / 32; ++i) {
            const int in_unit = 32 * i + lane, k = (unit << unit_shift) + in_unit;
            const bool exists = in_unit >> unit_shift == 0 && k < all;
            bool is_on = false;
            float x[kTokens] = {};
            int row = 0;
            if (exists) {
                const int entry = first + (k >> k_shift), within = k & ((1 << k_shift) - 1);
                const auto* const from = static_cast<const Element*>(arguments.x) +
                                         (int64_t{__ldg(arguments.rows.idx + entry)} << k_shift) + within;
                row = (__ldg(arguments.rows.slot + entry) << k_shift) + within;
#pragma unroll
                for (int t = 0; t < kTokens; ++t) {
                    if (t < arguments.tokens) x[t] = to_float(from[t * arguments.x_ld]);
                    if (is_off(x[t], arguments.threshold))
                        x[t] = 0.0f;
                    else
                        is_on = true;
                }
            }
            const uint32_t mask = __ballot_sync(~0u, is_on);
            if (is_on) {
                const int place = count + __popc(mask & ((1u << lane) - 1));
                rows[place] = row;
#pragma unroll
                for (int t = 0; t < kTokens; ++t) listed[t][place] = x[t];
            }
            count += __popc(mask);
        }
        __syncwarp();
        for (int i = 0; i < count; i += kLines * kUnroll) {
            typename W::Raw raw[kUnroll];
#pragma unroll
            for (int j = 0; j < kUnroll; ++j) {
                const int line = i + j * kLines + lane / kLanes;
                raw[j] = {};
                if (line < count) read_once(values + rows[line] * line_bytes, raw[j]);
            }
#pragma unroll
            for (int j = 0; j < kUnroll; ++j) {
                const int line = i + j * kLines + lane / kLanes;
                if (i + j * kLines >= count) break;
                float weights[kVector];
                W::decode(raw[j], weights);
#pragma unroll
                for (int t = 0; t < kTokens; ++t) {
                    const float x = line < count ? listed[t][line] : 0.0f;
#pragma unroll
                    for (int f = 0; f < kVector; ++f) sums[t][f] = fmaf(x, weights[f], sums[t][f]);
                }
            }
        }
        __syncwarp();
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
#pragma unroll
        for (int f = 0; f < kVector; ++f)
#pragma unroll
            for (int other = kLanes; other < 32; other *= 2)
                sums[t][f] += __shfl_xor_sync(~0u, sums[t][f], other);
    __syncthreads();  // before sums take the place of the lists
    if (lane < kLanes)
#pragma unroll
        for (int t = 0; t < kTokens; ++t)
#pragma unroll
            for (int f = 0; f < kVector; ++f) shared.sums[warp][t][lane * kVector + f] = sums[t][f];
    __syncthreads();
    for (int i = threadIdx.x; i < kTokens * kFeatures; i += kThreads) {
        const int token = i / kFeatures, own = i % kFeatures;
        if (token >= arguments.tokens) break;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += shared.sums[w][token][own];
        arguments.sums[(int64_t{part} * arguments.tokens + token) * arguments.features + feature + own] = sum;
    }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) add_parts(const __grid_constant__ Arguments arguments) {
    const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    const int count = arguments.tokens * arguments.features;
    if (i >= count) return;
    float sum = 0.0f;
    for (int part = 0; part < arguments.parts; ++part) sum += arguments.sums[int64_t{part} * count + i];
    const int token = i / arguments.features, feature = i - token * arguments.features;
    static_cast<Element*>(arguments.y)[token * arguments.y_ld + feature] =
        from_float<Element>(finished<Element>(arguments, sum, token, feature));
}

// ---- outputs ----

constexpr int kRows = 4;           // of a warp
constexpr int kMostFeatures = 32;  // of a CTA
constexpr int kShares = 4;         // of k

template <class Element, int kTokens>
__global__ void __launch_bounds__(kThreads) skip_outputs(const __grid_constant__ Arguments arguments) {
    using W = Weights<Element>;
    __shared__ int listed[kMostFeatures];
    __shared__ float sums[kShares][kMostFeatures][kTokens];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_shift = arguments.row_shift, k_shift = arguments.k_shift;
    const int features = min(kMostFeatures, 1 << row_shift),
              feature = static_cast<int>(blockIdx.x) * features;
    const auto* const gates = static_cast<const Element*>(arguments.other);
    bool is_on = false;
    if (lane < features)
        for (int t = 0; t < arguments.tokens; ++t)
            is_on |= !is_off(to_float(gates[t * arguments.other_ld + feature + lane]), arguments.threshold);
    const uint32_t mask = __ballot_sync(~0u, is_on);  // the same in every warp
    const int count = __popc(mask), place = __popc(mask & ((1u << lane) - 1));
    if (warp == 0 && is_on) listed[place] = lane;
    const int block_row = feature >> row_shift, in_block = feature & ((1 << row_shift) - 1);
    const int first = __ldg(arguments.rows.ptr + block_row);
    const int all = (__ldg(arguments.rows.ptr + block_row + 1) - first) << k_shift;
    __syncthreads();
    constexpr int kStep = 32 * kVector;
    const int groups = (count + kRows - 1) / kRows;
    for (int item = warp; item < groups * kShares; item += kWarps) {
        const int group = item / kShares, share = item % kShares;
        int64_t row_at[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            row_at[r] = int64_t{in_block + listed[min(group * kRows + r, count - 1)]} << k_shift;
        float own[kRows][kTokens] = {};
#pragma unroll 2
        for (int k = share * kStep + lane * kVector; k < all; k += kShares * kStep) {
            const int entry = first + (k >> k_shift), within = k & ((1 << k_shift) - 1);
            const int64_t slot = __ldg(arguments.rows.slot + entry);
            const int64_t column = (int64_t{__ldg(arguments.rows.idx + entry)} << k_shift) + within;
            const char* const block = static_cast<const char*>(arguments.values) +
                                      W::bytes((slot << (row_shift + k_shift)) + within);
            typename W::Raw raw[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) read_once(block + W::bytes(row_at[r]), raw[r]);
            float weights[kRows][kVector];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                W::decode(raw[r], weights[r]);
            }
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
                if (t >= arguments.tokens) break;
                const uint4 xs = *reinterpret_cast<const uint4*>(static_cast<const Element*>(arguments.x) +
                                                                 t * arguments.x_ld + column);
                float x[kVector];
                W::decode(xs, x);
#pragma unroll
                for (int r = 0; r < kRows; ++r)
#pragma unroll
                    for (int i = 0; i < kVector; ++i) own[r][t] = fmaf(weights[r][i], x[i], own[r][t]);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
#pragma unroll
                for (int other = 16; other > 0; other /= 2)
                    own[r][t] += __shfl_xor_sync(~0u, own[r][t], other);
                if (lane == 0 && group * kRows + r < count) sums[share][group * kRows + r][t] = own[r][t];
            }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kMostFeatures * arguments.tokens; i += kThreads) {
        const int token = i / kMostFeatures;  // of a warp
        if (lane >= features) continue;
        float result = 0.0f;
        if (is_on) {
            for (int share = 0; share < kShares; ++share) result += sums[share][place][token];
            if (arguments.bias != nullptr)
                result += to_float(static_cast<const Element*>(arguments.bias)[feature + lane]);
            const float gate = to_float(gates[token * arguments.other_ld + feature + lane]);
            result *= is_off(gate, arguments.threshold) ? 0.0f : gate;
        }
        static_cast<Element*>(arguments.y)[token * arguments.y_ld + feature + lane] =
            from_float<Element>(result);
    }
}

// ---- launches ----

// Features of a CTA for `inputs`: lines of 128 bytes, or those of a block.
int features_of(const Problem& problem) {
    constexpr int most = 64;
    return std::min<int>(problem.pattern.block_rows, most);
}

// Enough CTAs for each multiprocessor to have several, each with something to do for all of its warps.
int parts_of(const Problem& problem, const Device& device) {
    constexpr int kCtas = 4;  // of a multiprocessor, a guess: no other number was timed
    const Pattern& pattern = problem.pattern;
    const int64_t tiles = pattern.out_features / features_of(problem);
    const int64_t units =
        pattern.nnz * pattern.block_cols / (pattern.out_features / pattern.block_rows) / kUnit;
    const int64_t most = std::max<int64_t>(1, units / kWarps);
    return static_cast<int>(std::clamp<int64_t>(kCtas * device.multiprocessors / tiles, 1, most));
}

Arguments arguments_of(const Problem& problem, const Device& device, void* workspace) {
    const Values& values = problem.values;
    const Pattern& pattern = problem.pattern;
    Arguments arguments{};
    arguments.x = problem.x.data;
    arguments.x_ld = problem.x.ld;
    arguments.values = values.data;
    arguments.rows = pattern.rows;
    arguments.threshold = std::min(problem.threshold, FLT_MAX);
    arguments.tokens = static_cast<int>(problem.tokens);
    arguments.features = static_cast<int>(pattern.out_features);
    arguments.row_shift = log2_of_block(pattern.block_rows);
    arguments.k_shift = log2_of_block(pattern.block_cols);
    arguments.parts = parts_of(problem, device);
    arguments.sums = static_cast<float*>(workspace);
    arguments.y = problem.y.data;
    arguments.y_ld = problem.y.ld;
    arguments.bias = problem.bias;
    arguments.other = problem.residual.data;
    arguments.other_ld = problem.residual.ld;
    arguments.activation = problem.gated ? problem.gate_activation : problem.activation;
    arguments.gated = problem.gated;
    return arguments;
}

template <int... kChoices, class Run>
int32_t with_choice(int value, Run run) {
    int32_t result = cudaErrorInvalidConfiguration;
    ((value <= kChoices && result == cudaErrorInvalidConfiguration
          ? void(result = run(std::integral_constant<int, kChoices>{}))
          : void()),
     ...);
    return result;
}

template <class Element>
int32_t launch_as(const Problem& problem, const Arguments& arguments, void* stream) {
    return with_choice<1, 2, 8>(arguments.tokens, [&](auto tokens) -> int32_t {
        constexpr int kTokens = decltype(tokens)::value;
        if (problem.skip == Skip::outputs)
            return launch_kernel(&skip_outputs<Element, kTokens>,
                                 arguments.features / std::min(kMostFeatures, 1 << arguments.row_shift),
                                 kThreads, stream, arguments);
        const int features = features_of(problem);
        const int64_t ctas = int64_t{arguments.features / features} * arguments.parts;
        const auto run = [&](auto lanes) -> int32_t {
            constexpr int kLanes = decltype(lanes)::value;
            return launch_kernel(&skip_inputs<Element, kLanes, kTokens>, ctas, kThreads, stream, arguments);
        };
        const int32_t error = with_choice<2, 4, 8>(features / kVector, run);
        if (error != cudaSuccess) return error;
        const int64_t results = int64_t{arguments.tokens} * arguments.features;
        return launch_kernel(&add_parts<Element>, (results + kThreads - 1) / kThreads, kThreads, stream,
                             arguments);
    });
}

}  // namespace

size_t workspace_size(const Problem& problem, const Device& device) {
    if (problem.skip == Skip::outputs) return 0;
    return sizeof(float) * parts_of(problem, device) * problem.tokens * problem.pattern.out_features;
}

int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
    const Arguments arguments = arguments_of(problem, device, workspace);
    return problem.input_dtype == DType::bfloat16 ? launch_as<__nv_bfloat16>(problem, arguments, stream)
                                                  : launch_as<__half>(problem, arguments, stream);
}

}  // namespace ts::skip
