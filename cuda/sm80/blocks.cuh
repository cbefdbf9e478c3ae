// Products of blocks with sides of any length, which need not divide the matrix (sm_80, no tensor cores, no
// plan).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]      TN: dW[N,K] = Y[M,N]^T * X[M,K]
// Operands: activations and results row-major or column-major, values [nnz, bn, bk], in float64, float32, or
// 16 bits with sums in float32. Parts of blocks outside of the matrix are never used, and TN writes zeros
// there. Several tokens: a group of lanes has neighbouring tokens, and sums up to kMaxRows rows of a block
// row in registers. Activations that are row-major are transposed into the workspace first, so that lanes
// read neighbours. One token: a group of threads has an element of a block each, or of several blocks, so
// that the values of a block row are read front to back; wide blocks have a row for some lanes instead. TN: a
// CTA computes the kept blocks of a block row, a thread an element of a block at a time. Every sum is taken
// in the order of the pattern or of the tokens, so results are the same in each run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "common/launch.cuh"
#include "common/problem.h"
#include "sm80/launch.cuh"

namespace ts::sm80 {

constexpr int kBlocksThreads = 256;
constexpr int kMaxRows = 8;  // that a thread sums at once

template <class T>
struct BlocksElement {
    using Sum = float;
};
template <>
struct BlocksElement<double> {
    using Sum = double;
};
template <class T>
using BlocksSum = typename BlocksElement<T>::Sum;

__device__ inline double widen(double value) { return value; }
__device__ inline float widen(float value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
template <class T>
__device__ T narrow(BlocksSum<T> value) {
    return static_cast<T>(value);
}
template <>
__device__ inline __half narrow<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// Element (t, f) is at t * token + f * feature.
template <class T>
struct BlocksMatrix {
    T* data;
    int64_t token, feature;

    BlocksMatrix(const Matrix& matrix)
        : data(static_cast<T*>(matrix.data)),
          token(matrix.layout == Layout::row_major ? matrix.ld : 1),
          feature(matrix.layout == Layout::row_major ? 1 : matrix.ld) {}
    __device__ T& at(int64_t t, int64_t f) const { return data[t * token + f * feature]; }
};

template <class T>
struct BlocksDds {
    const T* x;
    int64_t x_feature;  // from a feature to the next; tokens are neighbours
    BlocksMatrix<T> output;
    BlocksMatrix<T> residual;  // or the gate; data is null where there is neither
    const T* values;
    const T* bias;
    Adjacency rows;  // of results
    int64_t tokens;
    int64_t row_count, features;
    int row_block, k_block;  // features of results in a block, and those that are summed over
    int value_row, value_k;  // from one to the next of them in a block
    int tile_rows, tiles;    // rows that a thread sums, and parts of a block row that have so many
    int last, last_depth;    // the last block if it is ragged, otherwise -1, and what is inside
    Activation activation;
    bool gated;
    Activation gate_activation;
};

template <class Sum>
__device__ Sum activate_block(Sum value, Activation activation) {
    switch (activation) {
        case Activation::relu:
            return value > 0 || value != value ? value : 0;  // NaN stays
        case Activation::gelu:
            return Sum(0.5) * value * erfc(-value * Sum(0.70710678118654752440));
        case Activation::silu:
            return value / (1 + exp(-value));
        default:
            return value;
    }
}

template <class T>
__device__ void write_result(const BlocksDds<T>& p, int64_t token, int64_t feature, BlocksSum<T> sum) {
    if (p.bias != nullptr) sum += widen(p.bias[feature]);
    sum = activate_block(sum, p.activation);
    if (p.residual.data != nullptr) {
        const BlocksSum<T> other = widen(p.residual.at(token, feature));
        sum = p.gated ? sum * widen(narrow<T>(activate_block(other, p.gate_activation))) : sum + other;
    }
    p.output.at(token, feature) = narrow<T>(sum);
}

// Rows x Columns sums of a thread, whose tokens are `lanes` apart. Depth: of a block, or 0 for any. Rows of a
// block are as many as Rows where Depth is not 0.
template <class T, int Rows, int Depth, int Columns>
__global__ void __launch_bounds__(kBlocksThreads)
    blocks_dds(const __grid_constant__ BlocksDds<T> p, const int log_lanes) {
    using Sum = BlocksSum<T>;
    const int lanes = 1 << log_lanes, lane = threadIdx.x & (lanes - 1);
    const int64_t tile = (int64_t{blockIdx.x} * kBlocksThreads + threadIdx.x) >> log_lanes;
    const int64_t row = tile / p.tiles;
    if (row >= p.row_count) return;
    const int within = static_cast<int>(tile % p.tiles) * p.tile_rows;
    const int rows = Depth > 0 ? Rows : min(p.tile_rows, p.row_block - within);
    const int64_t entry_size = int64_t{p.row_block} * p.k_block;
    const T* const values = p.values + int64_t{within} * p.value_row;
    const int end = __ldg(p.rows.ptr + row + 1);
    for (int64_t first = (int64_t{blockIdx.y} << log_lanes) * Columns + lane; first < p.tokens;
         first += (int64_t{gridDim.y} << log_lanes) * Columns) {
        const T* const x = p.x + first;
        bool has[Columns];
#pragma unroll
        for (int c = 0; c < Columns; ++c) has[c] = first + c * lanes < p.tokens;
        Sum sums[Rows][Columns] = {};
        const auto add = [&](const T* a, const T* b) {
            Sum right[Columns];
#pragma unroll
            for (int c = 0; c < Columns; ++c) right[c] = has[c] ? widen(__ldg(b + c * lanes)) : Sum{0};
#pragma unroll
            for (int i = 0; i < Rows; ++i) {
                if (Depth == 0 && i >= rows) continue;
                const Sum w = widen(__ldg(a + i * p.value_row));
#pragma unroll
                for (int c = 0; c < Columns; ++c) sums[i][c] += w * right[c];
            }
        };
#pragma unroll 2
        for (int e = __ldg(p.rows.ptr + row); e < end; ++e) {
            const int idx = __ldg(p.rows.idx + e);
            const T* const a = values + __ldg(p.rows.slot + e) * entry_size;
            const T* const b = x + int64_t{idx} * p.k_block * p.x_feature;
            if (Depth > 0 && idx != p.last) {
#pragma unroll
                for (int d = 0; d < Depth; ++d) add(a + d * p.value_k, b + d * p.x_feature);
            } else {
                const int depth = idx == p.last ? p.last_depth : p.k_block;
                for (int d = 0; d < depth; ++d) add(a + d * p.value_k, b + d * p.x_feature);
            }
        }
        const int64_t feature = row * p.row_block + within;
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            if (i >= rows || feature + i >= p.features) continue;
#pragma unroll
            for (int c = 0; c < Columns; ++c)
                if (has[c]) write_result(p, first + c * lanes, feature + i, sums[i][c]);
        }
    }
}

// One token. A group of `size` threads has a block row of results: elements of `phases` blocks at a time.
template <class T>
__global__ void __launch_bounds__(kBlocksThreads)
    blocks_vector(const __grid_constant__ BlocksDds<T> p, const int phases) {
    using Sum = BlocksSum<T>;
    __shared__ Sum shared[kBlocksThreads];
    const int block = p.row_block * p.k_block, size = block * phases, groups = kBlocksThreads / size;
    const int group = threadIdx.x / size, place = threadIdx.x % size, element = place % block;
    const int64_t row = int64_t{blockIdx.x} * groups + group;
    const bool works = group < groups && row < p.row_count;
    const int k = p.value_k == 1 ? element % p.k_block : element / p.row_block;
    Sum sum = 0;
    if (works) {
        const int end = __ldg(p.rows.ptr + row + 1);
#pragma unroll 4
        for (int e = __ldg(p.rows.ptr + row) + place / block; e < end; e += phases) {
            const int idx = __ldg(p.rows.idx + e);
            if (idx == p.last && k >= p.last_depth) continue;
            const Sum w = widen(__ldg(p.values + __ldg(p.rows.slot + e) * int64_t{block} + element));
            sum += w * widen(__ldg(p.x + (int64_t{idx} * p.k_block + k) * p.x_feature));
        }
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (!works || place >= p.row_block) return;
    sum = 0;
    for (int phase = 0; phase < phases; ++phase)
        for (int i = 0; i < p.k_block; ++i)
            sum += shared[group * size + phase * block + place * p.value_row + i * p.value_k];
    const int64_t feature = row * p.row_block + place;
    if (feature < p.features) write_result(p, 0, feature, sum);
}

// One token by wide blocks: a warp has a row of a block row, and its lanes neighbours along k; or where rows
// lie side by side (kAcross) 32 rows, one for each lane.
template <class T, bool kAcross>
__global__ void __launch_bounds__(kBlocksThreads) blocks_wide_vector(const __grid_constant__ BlocksDds<T> p) {
    using Sum = BlocksSum<T>;
    const int lane = threadIdx.x % 32;
    const int64_t warp = (int64_t{blockIdx.x} * kBlocksThreads + threadIdx.x) / 32;
    const int parts = kAcross ? (p.row_block + 31) / 32 : p.row_block;
    const int64_t row = warp / parts;
    if (row >= p.row_count) return;
    const int within = static_cast<int>(warp % parts) * (kAcross ? 32 : 1) + (kAcross ? lane : 0);
    const int64_t entry_size = int64_t{p.row_block} * p.k_block;
    Sum sum = 0;
    if (within < p.row_block) {
        const int end = __ldg(p.rows.ptr + row + 1);
        for (int e = __ldg(p.rows.ptr + row); e < end; ++e) {
            const int idx = __ldg(p.rows.idx + e), depth = idx == p.last ? p.last_depth : p.k_block;
            const T* const a = p.values + __ldg(p.rows.slot + e) * entry_size + within * p.value_row;
            const T* const x = p.x + int64_t{idx} * p.k_block * p.x_feature;
#pragma unroll 4
            for (int k = kAcross ? 0 : lane; k < depth; k += kAcross ? 1 : 32)
                sum += widen(__ldg(a + k * p.value_k)) * widen(__ldg(x + k * p.x_feature));
        }
    }
    if (!kAcross)
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    const int64_t feature = row * p.row_block + within;
    if ((kAcross || lane == 0) && within < p.row_block && feature < p.features)
        write_result(p, 0, feature, sum);
}

// to[f * tokens + t] = from(t, f). One CTA of 32 x 8 threads for each tile of 32 x 32, or some of them.
template <class T>
__global__ void __launch_bounds__(256)
    transpose_activations(const BlocksMatrix<T> from, T* to, int64_t tokens, int64_t features) {
    __shared__ T tile[32][33];
    const int x = threadIdx.x % 32, y = threadIdx.x / 32;
    const int64_t across = (features + 31) / 32, count = across * ((tokens + 31) / 32);
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
        const int64_t token = number / across * 32, feature = number % across * 32;
        for (int i = y; i < 32; i += 8)
            if (token + i < tokens && feature + x < features) tile[i][x] = from.at(token + i, feature + x);
        __syncthreads();
        for (int i = y; i < 32; i += 8)
            if (feature + i < features && token + x < tokens)
                to[(feature + i) * tokens + token + x] = tile[x][i];
        __syncthreads();
    }
}

template <class T, class Result>
struct BlocksSdd {
    BlocksMatrix<const T> x, y;
    Result* values;
    Adjacency rows;
    int64_t tokens, row_count, out_features, in_features;
    int block_rows, block_cols;
    bool accumulate;
};

// The grid: block rows, which it walks.
template <class T, class Result>
__global__ void __launch_bounds__(kBlocksThreads) blocks_sdd(const __grid_constant__ BlocksSdd<T, Result> p) {
    using Sum = BlocksSum<T>;
    const int size = p.block_rows * p.block_cols;
    for (int64_t row = blockIdx.x; row < p.row_count; row += gridDim.x) {
        const int begin = __ldg(p.rows.ptr + row);
        const int64_t count = int64_t{__ldg(p.rows.ptr + row + 1) - begin} * size;
        for (int64_t i = threadIdx.x + int64_t{blockIdx.y} * kBlocksThreads; i < count;
             i += int64_t{gridDim.y} * kBlocksThreads) {
            const int entry = begin + static_cast<int>(i / size), element = static_cast<int>(i % size);
            const int64_t n = row * p.block_rows + element / p.block_cols;
            const int64_t k = int64_t{__ldg(p.rows.idx + entry)} * p.block_cols + element % p.block_cols;
            Result* const to = p.values + int64_t{__ldg(p.rows.slot + entry)} * size + element;
            if (n >= p.out_features || k >= p.in_features) {
                if (!p.accumulate) *to = narrow<Result>(0);
                continue;
            }
            const T* y = &p.y.at(0, n);
            const T* x = &p.x.at(0, k);
            Sum sum = 0;
#pragma unroll 4
            for (int64_t t = 0; t < p.tokens; ++t)
                sum += widen(__ldg(y + t * p.y.token)) * widen(__ldg(x + t * p.x.token));
            *to = narrow<Result>(p.accumulate ? sum + widen(*to) : sum);
        }
    }
}

// Host side: the row of the registry.
template <class T, DType kType>
struct Blocks {
    static constexpr bool kIsWide = kType == DType::float64 || kType == DType::float32;

    static const char* refuses(const Problem& problem, const Device&) {
        if (problem.pattern.is_regular()) return "it is for blocks that tensor cores have no tiles for";
        const bool widens = problem.result_dtype != problem.input_dtype;
        return widens && problem.op != Op::sdd_tn ? "it writes float32 instead of 16 bits only for sdd_tn"
                                                  : nullptr;
    }

    // Row-major activations of several tokens are transposed.
    static bool transposes(const Problem& problem) {
        return problem.op != Op::sdd_tn && problem.tokens > 1 && problem.input().layout == Layout::row_major;
    }

    static size_t workspace_size(const Problem& problem, const Device&, const Decision&) {
        return transposes(problem) ? problem.tokens * problem.k_size() * sizeof(T) : 0;
    }

    static int32_t launch(const Problem& problem, const Device&, const Decision&, void* workspace,
                          void* stream) {
        if (problem.op != Op::sdd_tn) return launch_dds(problem, workspace, stream);
        if constexpr (!kIsWide)
            if (problem.result_dtype == DType::float32) return launch_sdd<float>(problem, stream);
        return launch_sdd<T>(problem, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<Blocks>(name, nullptr);
        row.ops = 0b111;
        row.input_dtypes = bits_of(kType);
        row.result_dtypes = kIsWide ? bits_of(kType) : bits_of(kType, DType::float32);
        row.precision = Precision::highest;
        row.any_block = true;
        return row;
    }

  private:
    static cudaError_t launch_dds(const Problem& problem, void* workspace, void* stream) {
        const int row_block = problem.row_block(), k_block = problem.k_block();
        const int64_t features = problem.features(), k_size = problem.k_size();
        const int64_t row_count = (features + row_block - 1) / row_block;
        if (problem.tokens == 0 || row_count == 0) return cudaSuccess;
        const bool forward = problem.forward();
        const Matrix& input = problem.input();
        const int tiles = (row_block + kMaxRows - 1) / kMaxRows;
        const int64_t x_feature = input.layout == Layout::row_major ? 1 : input.ld;
        BlocksDds<T> p{static_cast<const T*>(input.data),
                       x_feature,
                       problem.output(),
                       problem.residual,
                       static_cast<const T*>(problem.values.data),
                       static_cast<const T*>(problem.bias),
                       problem.block_rows(),
                       problem.tokens,
                       row_count,
                       features,
                       row_block,
                       k_block,
                       forward ? k_block : 1,
                       forward ? 1 : row_block,
                       (row_block + tiles - 1) / tiles,
                       tiles,
                       k_size % k_block != 0 ? static_cast<int>(k_size / k_block) : -1,
                       static_cast<int>(k_size % k_block),
                       problem.activation,
                       problem.gated,
                       problem.gate_activation};
        if (problem.tokens == 1) return launch_vector(p, stream);
        if (transposes(problem)) {
            const int64_t tiles = (k_size + 31) / 32 * ((problem.tokens + 31) / 32);
            if (const cudaError_t error =
                    launch_kernel(transpose_activations<T>, std::min<int64_t>(tiles, INT_MAX), 256, stream,
                                  input, static_cast<T*>(workspace), problem.tokens, k_size))
                return error;
            p.x = static_cast<const T*>(workspace);
            p.x_feature = problem.tokens;
        }
        // Sizes of systems of equations: kernels of their own for others would be long.
        if constexpr (kIsWide)
            if (row_block == k_block) {
                if (row_block == 3) return launch_tokens<3, 3>(p, stream);
                if (row_block == 4) return launch_tokens<4, 4>(p, stream);
                if (row_block == 6) return launch_tokens<6, 6>(p, stream);
            }
        return p.tile_rows <= 4 ? launch_tokens<4, 0>(p, stream) : launch_tokens<8, 0>(p, stream);
    }

    template <int Rows, int Depth>
    static cudaError_t launch_tokens(const BlocksDds<T>& p, void* stream) {
        int log_lanes = 0;
        while (log_lanes < 5 && (1 << log_lanes) < p.tokens) ++log_lanes;
        return p.tokens > 32 ? start<blocks_dds<T, Rows, Depth, 2>>(p, log_lanes, 2, stream)
                             : start<blocks_dds<T, Rows, Depth, 1>>(p, log_lanes, 1, stream);
    }

    template <auto kKernel>
    static cudaError_t start(BlocksDds<T> p, int log_lanes, int columns, void* stream) {
        const int64_t threads = (p.row_count * p.tiles) << log_lanes;
        const int64_t tokens = int64_t{columns} << log_lanes, down = (p.tokens + tokens - 1) / tokens;
        void* parameters[] = {&p, &log_lanes};
        return start_grid(reinterpret_cast<const void*>(kKernel), threads, down, parameters, stream);
    }

    static cudaError_t launch_vector(BlocksDds<T> p, void* stream) {
        const int block = p.row_block * p.k_block;
        const bool across = p.value_k != 1;
        if (block > kBlocksThreads) {
            void* parameters[] = {&p};
            const int64_t parts = across ? (p.row_block + 31) / 32 : p.row_block;
            const auto kernel = across ? reinterpret_cast<const void*>(blocks_wide_vector<T, true>)
                                       : reinterpret_cast<const void*>(blocks_wide_vector<T, false>);
            return start_grid(kernel, p.row_count * parts * 32, 1, parameters, stream);
        }
        int phases = std::max(1, 32 / block);
        const int groups = kBlocksThreads / (block * phases);
        void* parameters[] = {&p, &phases};
        const int64_t ctas = (p.row_count + groups - 1) / groups;
        return start_grid(reinterpret_cast<const void*>(blocks_vector<T>), ctas * kBlocksThreads, 1,
                          parameters, stream);
    }

    static cudaError_t start_grid(const void* kernel, int64_t threads, int64_t down, void** parameters,
                                  void* stream) {
        constexpr int64_t kMostDown = 65535;
        const int64_t ctas = (threads + kBlocksThreads - 1) / kBlocksThreads;
        if (ctas > INT_MAX) return cudaErrorInvalidConfiguration;
        const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(std::min(down, kMostDown)));
        return cudaLaunchKernel(kernel, grid, dim3(kBlocksThreads), parameters, 0,
                                static_cast<cudaStream_t>(stream));
    }

    template <class Result>
    static cudaError_t launch_sdd(const Problem& problem, void* stream) {
        const Pattern& pattern = problem.pattern;
        if (pattern.nnz == 0) return cudaSuccess;
        BlocksSdd<T, Result> p{problem.x,
                               problem.y,
                               static_cast<Result*>(problem.values.data),
                               pattern.rows,
                               problem.tokens,
                               pattern.row_count(),
                               pattern.out_features,
                               pattern.in_features,
                               pattern.block_rows,
                               pattern.block_cols,
                               problem.accumulate};
        constexpr int64_t kMostRows = 1 << 20, kMostParts = 64;
        const int64_t elements = pattern.value_count() / std::max<int64_t>(1, pattern.row_count());
        const int64_t parts = std::clamp<int64_t>(elements / (4 * kBlocksThreads), 1, kMostParts);
        void* parameters[] = {&p};
        const dim3 grid(static_cast<unsigned>(std::min(pattern.row_count(), kMostRows)),
                        static_cast<unsigned>(parts));
        return cudaLaunchKernel(reinterpret_cast<const void*>(blocks_sdd<T, Result>), grid,
                                dim3(kBlocksThreads), parameters, 0, static_cast<cudaStream_t>(stream));
    }
};

using BlocksF64 = Blocks<double, DType::float64>;
using BlocksF32 = Blocks<float, DType::float32>;
using BlocksF16 = Blocks<__half, DType::float16>;
using BlocksBf16 = Blocks<__nv_bfloat16, DType::bfloat16>;

}  // namespace ts::sm80

#define TS_INSTANCE(name, kernel, type)                  \
    namespace ts::sm80 {                                 \
    const Kernel& name() {                               \
        static constexpr Kernel kRow = type::row(#name); \
        return kRow;                                     \
    }                                                    \
    }
