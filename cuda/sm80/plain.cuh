// dds and sdd in float64, for gradcheck and as a reference on GPUs (sm_80, no tensor cores, no plan).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]      TN: dW[N,K] = Y[M,N]^T * X[M,K]
// Operands: activations and results row-major or column-major, values [nnz, bn, bk], all float64.
// dds: a CTA computes a block row of results (of NN, a block column of W) for some tokens and walks the kept
// blocks of the row. A thread has one feature and kPlainTokens tokens; a warp's features are neighbours.
// sdd: a CTA computes the kept blocks of a block row one after another. A thread has one element of a block
// at a time and sums over all tokens.
// Grouped products: a block row belongs to a group and has this group's tokens.
// Every sum is one thread's, in the order of the pattern or of the tokens, so results are the same in each
// run.
// Chosen for every product in float64: no other kernel computes it.
#pragma once

#include <algorithm>

#include "common/launch.cuh"
#include "common/problem.h"
#include "common/token_groups.h"
#include "sm80/launch.cuh"

namespace ts::sm80 {

constexpr int kPlainThreads = 128;
constexpr int kPlainTokens = 4;      // of a thread
constexpr int kMaxPlainRows = 1024;  // of a grid, which walks all

// Distances between the elements of a matrix.
struct PlainMatrix {
    double* data;
    int64_t token;
    int64_t feature;

    PlainMatrix(const Matrix& matrix)
        : data(static_cast<double*>(matrix.data)),
          token(matrix.layout == Layout::row_major ? matrix.ld : 1),
          feature(matrix.layout == Layout::row_major ? 1 : matrix.ld) {}
    __device__ double& at(int64_t t, int64_t f) const { return data[t * token + f * feature]; }
};

struct PlainSpan {
    int64_t first, last;
};

// The tokens of a block row, and the row's number among those of its group.
struct PlainGroups {
    const int32_t* offsets;  // null: all have all tokens
    int count;
    int rows;  // of each

    explicit PlainGroups(const Problem& problem, int64_t row_count)
        : offsets(problem.offsets),
          count(problem.pattern.groups),
          rows(static_cast<int>(row_count / problem.pattern.groups)) {}
    __device__ int64_t row(int64_t row) const { return row % rows; }
    __device__ PlainSpan tokens(int64_t row, int64_t all) const {
        if (offsets == nullptr) return {0, all};
        const TokenGroups groups{offsets, count, static_cast<int>(all)};
        const TokenSpan span = groups.span(static_cast<int>(row / rows));
        return {span.first, span.last};
    }
};

struct PlainDds {
    PlainMatrix input;
    PlainMatrix output;
    PlainMatrix residual;  // or the gate; data is null where there is neither
    const double* values;
    const double* bias;
    Adjacency rows;  // of results
    int64_t tokens;
    int64_t row_count;      // of all groups
    int row_block;          // features of results in a block
    int k_block;            // those that are summed over
    int value_row;          // from one feature of results in a block to the next
    int value_column;       // from one that is summed over to the next
    Activation activation;  // of results
    bool gated;
    Activation gate_activation;
    PlainGroups groups;
};

struct PlainSdd {
    PlainMatrix x;
    PlainMatrix y;
    double* values;
    Adjacency rows;
    int64_t tokens;
    int64_t row_count;
    int block_rows;
    int block_cols;
    bool accumulate;
    PlainGroups groups;
};

__device__ inline double activate_plainly(double value, Activation activation) {
    switch (activation) {
        case Activation::relu:
            return value > 0 || value != value ? value : 0;  // NaN stays
        case Activation::gelu:
            return 0.5 * value * erfc(-value * 0.70710678118654752440);
        case Activation::silu:
            return value / (1 + exp(-value));
        default:
            return value;
    }
}

// The grid: chunks of tokens by block rows.
__global__ void __launch_bounds__(kPlainThreads) plain_dds(const __grid_constant__ PlainDds arguments) {
    const int lanes = kPlainThreads / arguments.row_block;  // that share a feature's tokens
    const int feature = threadIdx.x % arguments.row_block;
    const int64_t place = (int64_t{blockIdx.x} * lanes + threadIdx.x / arguments.row_block) * kPlainTokens;
    const int64_t value_count = int64_t{arguments.row_block} * arguments.k_block;
    for (int64_t row = blockIdx.y; row < arguments.row_count; row += gridDim.y) {
        const PlainSpan span = arguments.groups.tokens(row, arguments.tokens);
        const int64_t first = span.first + place, last = min(first + kPlainTokens, span.last);
        if (first >= last) continue;
        double sums[kPlainTokens] = {};
        for (int entry = arguments.rows.ptr[row]; entry < arguments.rows.ptr[row + 1]; ++entry) {
            const int64_t k = int64_t{arguments.rows.idx[entry]} * arguments.k_block;
            const double* const block = arguments.values + arguments.rows.slot[entry] * value_count;
            for (int i = 0; i < arguments.k_block; ++i) {
                const double weight = block[feature * arguments.value_row + i * arguments.value_column];
#pragma unroll
                for (int t = 0; t < kPlainTokens; ++t)
                    if (first + t < last)
                        sums[t] = fma(arguments.input.at(first + t, k + i), weight, sums[t]);
            }
        }
        const int64_t result = arguments.groups.row(row) * arguments.row_block + feature;
        const double bias =
            arguments.bias == nullptr ? 0 : arguments.bias[row * arguments.row_block + feature];
#pragma unroll
        for (int t = 0; t < kPlainTokens; ++t) {
            if (first + t >= last) continue;
            double sum = activate_plainly(sums[t] + bias, arguments.activation);
            if (arguments.gated)
                sum *= activate_plainly(arguments.residual.at(first + t, result), arguments.gate_activation);
            else if (arguments.residual.data != nullptr)
                sum += arguments.residual.at(first + t, result);
            arguments.output.at(first + t, result) = sum;
        }
    }
}

// The grid: entries of a row by block rows.
__global__ void __launch_bounds__(kPlainThreads) plain_sdd(const __grid_constant__ PlainSdd arguments) {
    const int size = arguments.block_rows * arguments.block_cols;
    for (int64_t row = blockIdx.y; row < arguments.row_count; row += gridDim.y) {
        const PlainSpan span = arguments.groups.tokens(row, arguments.tokens);
        const int first = arguments.rows.ptr[row], last = arguments.rows.ptr[row + 1];
        for (int64_t entry = first + int64_t{blockIdx.x}; entry < last; entry += gridDim.x) {
            double* const block = arguments.values + int64_t{arguments.rows.slot[entry]} * size;
            const int64_t n = arguments.groups.row(row) * arguments.block_rows;
            const int64_t k = int64_t{arguments.rows.idx[entry]} * arguments.block_cols;
            for (int i = threadIdx.x; i < size; i += kPlainThreads) {
                const int64_t of_y = n + i / arguments.block_cols, of_x = k + i % arguments.block_cols;
                double sum = 0;
                for (int64_t t = span.first; t < span.last; ++t)
                    sum = fma(arguments.y.at(t, of_y), arguments.x.at(t, of_x), sum);
                block[i] = arguments.accumulate ? block[i] + sum : sum;
            }
        }
    }
}

// Host side: the row of the registry.
struct Plain {
    static const char* refuses(const Problem&, const Device&) { return nullptr; }
    static size_t workspace_size(const Problem&, const Device&, const Decision&) { return 0; }

    static int32_t launch(const Problem& problem, const Device&, const Decision&, void*, void* stream) {
        return problem.op == Op::sdd_tn ? launch_sdd(problem, stream) : launch_dds(problem, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<Plain>(name, nullptr);
        row.ops = 0b111;
        row.input_dtypes = bits_of(DType::float64);
        row.grouped = bits_of(0, 1);
        row.precision = Precision::highest;
        return row;
    }

  private:
    static cudaError_t launch_dds(const Problem& problem, void* stream) {
        const int row_block = problem.row_block(), k_block = problem.k_block();
        const int64_t row_count = problem.features() * problem.pattern.groups / row_block;
        if (problem.tokens == 0 || row_count == 0) return cudaSuccess;
        const bool forward = problem.forward();
        const PlainDds arguments{problem.input(),
                                 problem.output(),
                                 problem.residual,
                                 static_cast<const double*>(problem.values.data),
                                 static_cast<const double*>(problem.bias),
                                 problem.block_rows(),
                                 problem.tokens,
                                 row_count,
                                 row_block,
                                 k_block,
                                 forward ? k_block : 1,
                                 forward ? 1 : row_block,
                                 problem.activation,
                                 problem.gated,
                                 problem.gate_activation,
                                 PlainGroups(problem, row_count)};
        const int64_t chunk = kPlainThreads / row_block * kPlainTokens;
        const auto chunks = static_cast<unsigned>((problem.tokens + chunk - 1) / chunk);
        return start<plain_dds>(arguments, chunks, row_count, stream);
    }

    static cudaError_t launch_sdd(const Problem& problem, void* stream) {
        constexpr int64_t kMostEntries = 256;
        const Pattern& pattern = problem.pattern;
        if (pattern.nnz == 0) return cudaSuccess;
        const int64_t row_count = pattern.out_features / pattern.block_rows;
        const PlainSdd arguments{problem.x,
                                 problem.y,
                                 static_cast<double*>(problem.values.data),
                                 pattern.rows,
                                 problem.tokens,
                                 row_count,
                                 pattern.block_rows,
                                 pattern.block_cols,
                                 problem.accumulate,
                                 PlainGroups(problem, row_count)};
        const int64_t columns = pattern.in_features / pattern.block_cols;
        return start<plain_sdd>(arguments, static_cast<unsigned>(std::min(columns, kMostEntries)), row_count,
                                stream);
    }

    template <auto kKernel, class Arguments>
    static cudaError_t start(const Arguments& arguments, unsigned columns, int64_t rows, void* stream) {
        const dim3 blocks(columns, static_cast<unsigned>(std::min<int64_t>(rows, kMaxPlainRows)));
        void* parameters[] = {const_cast<Arguments*>(&arguments)};
        return cudaLaunchKernel(reinterpret_cast<const void*>(kKernel), blocks, dim3(kPlainThreads),
                                parameters, 0, static_cast<cudaStream_t>(stream));
    }
};

}  // namespace ts::sm80

#define TS_INSTANCE(name, kernel)                         \
    namespace ts::sm80 {                                  \
    const Kernel& name() {                                \
        static constexpr Kernel kRow = Plain::row(#name); \
        return kRow;                                      \
    }                                                     \
    }
