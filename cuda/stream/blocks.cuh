// Products of blocks with sides of any length, which need not divide the matrix (sm_80, no plan).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]      TN: dW[N,K] = Y[M,N]^T * X[M,K]
// Operands: activations and results row-major or column-major, values [nnz, bn, bk], in float64, float32, or
// 16 bits with sums in float32. Parts of blocks outside of the matrix are never used, and TN writes zeros
// there. Several tokens: a group of lanes has neighbouring tokens, and sums up to kMaxRows rows of a block
// row in registers; float64 in blocks of 8 x 8 has tensor cores. Activations that are row-major are
// transposed into the workspace first, so that lanes read neighbours. One token: a group of threads has some
// neighbours in a block each, of several blocks at a time, so that the values of a block row are read front
// to back; wide blocks have a row for some lanes instead. TN: a CTA computes the kept blocks of a block row,
// a thread an element of a block at a time. Every sum is taken in the order of the pattern or of the tokens,
// so results are the same in each run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "ampere/launch.cuh"
#include "common/launch.cuh"
#include "common/problem.h"

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

// Called, not inlined: a thread writes up to 16 results, each of which would have gelu and silu twice.
template <class Sum>
__device__ __noinline__ Sum activate_block(Sum value, Activation activation) {
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
    if (p.activation != Activation::none) sum = activate_block(sum, p.activation);
    if (p.residual.data != nullptr) {
        const BlocksSum<T> other = widen(p.residual.at(token, feature));
        sum = p.gated ? sum * widen(narrow<T>(activate_block(other, p.gate_activation))) : sum + other;
    }
    p.output.at(token, feature) = narrow<T>(sum);
}

// Neighbours in memory, which lie at a multiple of 16 or 8 bytes if these divide theirs.
template <class T, int Width>
struct alignas(Width * sizeof(T) % 16 == 0  ? 16
               : Width * sizeof(T) % 8 == 0 ? 8
                                            : sizeof(T)) BlocksNeighbours {
    T of[Width];
};
template <class T, int Width>
__device__ BlocksNeighbours<T, Width> read_neighbours(const T* from) {
    constexpr int kBytes = Width * sizeof(T);
    using Vector = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes % 8 == 0, uint2, T>>;
    BlocksNeighbours<T, Width> result;
#pragma unroll
    for (int i = 0; i < kBytes / static_cast<int>(sizeof(Vector)); ++i)
        reinterpret_cast<Vector*>(&result)[i] = __ldg(reinterpret_cast<const Vector*>(from) + i);
    return result;
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

__device__ inline void multiply_add(double (&c)[2], double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(c[0]), "+d"(c[1])
        : "d"(a), "d"(b));
}

// Blocks of 8 x 8 in float64, by tensor cores, which multiply 8 x 4 by 4 x 8. A warp has a block row and
// `Tiles` times 8 tokens. Lane 4 g + t has row g of a block at k = 2 t and 2 t + 1, the first of which is in
// one product and the second in another. Tokens of two tiles take turns, so that a lane reads neighbours.
template <int Tiles, bool Across>
__global__ void __launch_bounds__(kBlocksThreads) blocks_dds_8(const __grid_constant__ BlocksDds<double> p) {
    constexpr int kTokens = 8 * Tiles, kNeighbours = Tiles > 1 ? 2 : 1, kParts = Tiles / kNeighbours;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t row = (int64_t{blockIdx.x} * kBlocksThreads + threadIdx.x) / 32;
    if (row >= p.row_count) return;
    const int begin = __ldg(p.rows.ptr + row), end = __ldg(p.rows.ptr + row + 1);
    for (int64_t first = int64_t{blockIdx.y} * kTokens; first < p.tokens;
         first += int64_t{gridDim.y} * kTokens) {
        double sums[Tiles][2] = {};
        const int left = static_cast<int>(min(p.tokens - first, int64_t{kTokens}));
        const auto add = [&](int e, int depth) {
            const double* const a =
                p.values + int64_t{__ldg(p.rows.slot + e)} * 64 + (Across ? 16 * t + g : 8 * g + 2 * t);
            const double* const x =
                p.x + (int64_t{__ldg(p.rows.idx + e)} * 8 + 2 * t) * p.x_feature + first + kNeighbours * g;
            BlocksNeighbours<double, 2> w;
            if constexpr (Across)
                w = {__ldg(a), __ldg(a + 8)};
            else
                w = read_neighbours<double, 2>(a);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const bool inside = 2 * t + k < depth;
                if (!inside) w.of[k] = 0;
                BlocksNeighbours<double, kNeighbours> right[kParts] = {};
#pragma unroll
                for (int i = 0; i < kParts; ++i)
                    if (inside && 8 * kNeighbours * i + kNeighbours * g < left)
                        right[i] =
                            read_neighbours<double, kNeighbours>(x + k * p.x_feature + 8 * kNeighbours * i);
#pragma unroll
                for (int i = 0; i < Tiles; ++i)
                    multiply_add(sums[i], w.of[k], right[i / kNeighbours].of[i % kNeighbours]);
            }
        };
        const bool ragged = p.last >= 0 && begin < end && __ldg(p.rows.idx + end - 1) == p.last;
#pragma unroll(Tiles > 2 ? 2 : 4)
        for (int e = begin; e < end - ragged; ++e) add(e, 8);
        if (ragged) add(end - 1, p.last_depth);
        const int64_t feature = row * 8 + g;
#pragma unroll
        for (int i = 0; i < 2 * Tiles; ++i) {
            const int tile = i / 2,
                      token = kNeighbours * (8 * (tile / kNeighbours) + 2 * t + i % 2) + tile % kNeighbours;
            if (token < left && feature < p.features)
                write_result(p, first + token, feature, sums[tile][i % 2]);
        }
    }
}

// One token. A group of threads has a block row of results: each `Width` neighbours in a block, of `phases`
// blocks at a time. Across: the neighbours are rows of results, otherwise k. Those of 8 or 16 bytes are read
// at once.
template <class T, int Width, bool Across>
__global__ void __launch_bounds__(kBlocksThreads)
    blocks_vector(const __grid_constant__ BlocksDds<T> p, const int phases) {
    using Sum = BlocksSum<T>;
    constexpr int kSums = Across ? Width : 1;
    __shared__ Sum shared[kBlocksThreads * kSums];
    const int block = p.row_block * p.k_block, places = block / Width, size = places * phases;
    // Groups of a warp, or of all threads if one is larger.
    const int threads = size > 32 ? kBlocksThreads : 32, groups = threads / size;
    const int thread = threadIdx.x % threads, group = thread / size, own = thread % size;
    const int element = own % places * Width;
    const int64_t row =
        (int64_t{blockIdx.x} * (kBlocksThreads / threads) + threadIdx.x / threads) * groups + group;
    const bool works = group < groups && row < p.row_count;
    const int k = Across ? element / p.row_block : element % p.k_block;
    Sum sums[kSums] = {};
    if (works) {
        const int begin = __ldg(p.rows.ptr + row) + own / places, end = __ldg(p.rows.ptr + row + 1);
        const auto values_of = [&](int e) {
            return read_neighbours<T, Width>(p.values + __ldg(p.rows.slot + e) * int64_t{block} + element);
        };
        const auto x_of = [&](int idx) { return p.x + (int64_t{idx} * p.k_block + k) * p.x_feature; };
        // A loop without branches, whose loads do not wait for one another.
        const auto add_all = [&](int from, int to) {
#pragma unroll 4
            for (int e = from; e < to; e += phases) {
                const T* const x = x_of(__ldg(p.rows.idx + e));
                const auto w = values_of(e);
                const auto right = read_neighbours<T, Across ? 1 : Width>(x);
#pragma unroll
                for (int i = 0; i < Width; ++i)
                    sums[Across ? i : 0] += widen(w.of[i]) * widen(right.of[Across ? 0 : i]);
            }
        };
        // The last column of blocks, of which some may be outside, is the last of a row.
        const bool ragged = p.last >= 0 && begin < end && __ldg(p.rows.idx + end - 1) == p.last;
        add_all(begin, ragged ? end - 1 : end);
        if (ragged && (end - 1 - begin) % phases == 0) {
            const T* const x = x_of(p.last);
            const auto w = values_of(end - 1);
#pragma unroll
            for (int i = 0; i < Width; ++i)
                if (k + (Across ? 0 : i) < p.last_depth)
                    sums[Across ? i : 0] += widen(w.of[i]) * widen(__ldg(x + (Across ? 0 : i * p.x_feature)));
        }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) shared[threadIdx.x * kSums + i] = sums[i];
    if (threads == 32)
        __syncwarp();
    else
        __syncthreads();
    if (!works || own >= p.row_block) return;
    // Sums of a row: of each k, or of each `Width` of them.
    const int count = Across ? p.k_block : p.k_block / Width;
    const Sum* const first = shared + (threadIdx.x - own) * kSums + (Across ? own : own * count);
    Sum sum = 0;
    for (int phase = 0; phase < phases; ++phase)
        for (int i = 0; i < count; ++i) sum += first[phase * places * kSums + i * (Across ? p.row_block : 1)];
    const int64_t feature = row * p.row_block + own;
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
        if constexpr (std::is_same_v<T, double>)
            if (row_block == 8 && k_block == 8) return launch_8(p, stream);
        // Sizes of systems of equations: kernels of their own for others would be long.
        if constexpr (kIsWide)
            if (row_block == k_block) {
                if (row_block == 3) return launch_tokens<3, 3>(p, stream);
                if (row_block == 4) return launch_tokens<4, 4>(p, stream);
                if (row_block == 6) return launch_tokens<6, 6>(p, stream);
            }
        return p.tile_rows <= 4 ? launch_tokens<4, 0>(p, stream) : launch_tokens<8, 0>(p, stream);
    }

    static cudaError_t launch_8(const BlocksDds<T>& p, void* stream) {
        const bool across = p.value_k != 1;
        const auto by_16 = [](const T* from) { return reinterpret_cast<uintptr_t>(from) % 16 == 0; };
        if (!across && !by_16(p.values)) return launch_tokens<8, 0>(p, stream);
        const bool neighbours = p.tokens % 2 == 0 && p.x_feature % 2 == 0 && by_16(p.x);
        const int tiles = !neighbours || p.tokens <= 8 ? 1 : p.tokens <= 32 ? 2 : 8;
        auto kernel = across ? blocks_dds_8<1, true> : blocks_dds_8<1, false>;
        if (tiles == 2) kernel = across ? blocks_dds_8<2, true> : blocks_dds_8<2, false>;
        if (tiles == 8) kernel = across ? blocks_dds_8<8, true> : blocks_dds_8<8, false>;
        const int64_t tokens = 8 * tiles;
        void* parameters[] = {const_cast<BlocksDds<T>*>(&p)};
        return start_grid(reinterpret_cast<const void*>(kernel), p.row_count * 32,
                          (p.tokens + tokens - 1) / tokens, parameters, stream);
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

    static cudaError_t launch_vector(const BlocksDds<T>& p, void* stream) {
        const int block = p.row_block * p.k_block;
        const bool across = p.value_k != 1;
        if (block > kBlocksThreads) {
            void* parameters[] = {const_cast<BlocksDds<T>*>(&p)};
            const int64_t parts = across ? (p.row_block + 31) / 32 : p.row_block;
            const auto kernel = across ? reinterpret_cast<const void*>(blocks_wide_vector<T, true>)
                                       : reinterpret_cast<const void*>(blocks_wide_vector<T, false>);
            return start_grid(kernel, p.row_count * parts * 32, 1, parameters, stream);
        }
        // Neighbours in a block, as many as fit. Those of k are multiplied by neighbours of x.
        const int inner = across ? p.row_block : p.k_block;
        const auto fits = [&](int width) {
            const auto x = reinterpret_cast<uintptr_t>(p.x), values = reinterpret_cast<uintptr_t>(p.values);
            const uintptr_t bytes = width * sizeof(T);
            return inner % width == 0 && values % bytes == 0 &&
                   (across || (p.x_feature == 1 && x % bytes == 0));
        };
        if constexpr (kIsWide)
            if (inner == 6 && fits(2)) return start_vector<6>(p, across, stream);
        if (fits(16 / sizeof(T))) return start_vector<16 / sizeof(T)>(p, across, stream);
        if constexpr (sizeof(T) < 8)
            if (fits(8 / sizeof(T))) return start_vector<8 / sizeof(T)>(p, across, stream);
        if constexpr (kIsWide)
            if (inner == 3 && (across || p.x_feature == 1)) return start_vector<3>(p, across, stream);
        return start_vector<1>(p, across, stream);
    }

    // At least eight threads for a block row: with more of them fewer block rows are under way, which takes
    // longer.
    template <int Width>
    static cudaError_t start_vector(const BlocksDds<T>& p, bool across, void* stream) {
        const auto kernel = across ? blocks_vector<T, Width, true> : blocks_vector<T, Width, false>;
        const int places = p.row_block * p.k_block / Width;
        int phases = std::max(1, 8 / places);
        while (places * phases < p.row_block) ++phases;  // each row is summed by one of them
        const int size = places * phases;
        const int groups = size > 32 ? kBlocksThreads / size : kBlocksThreads / 32 * (32 / size);
        void* parameters[] = {const_cast<BlocksDds<T>*>(&p), &phases};
        const int64_t ctas = (p.row_count + groups - 1) / groups;
        return start_grid(reinterpret_cast<const void*>(kernel), ctas * kBlocksThreads, 1, parameters,
                          stream);
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

#define TS_ROW_blocks(name, type)                        \
    namespace ts::sm80 {                                 \
    const Kernel& name() {                               \
        static constexpr Kernel kRow = type::row(#name); \
        return kRow;                                     \
    }                                                    \
    }
