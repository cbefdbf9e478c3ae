// dds in float64 for small batches, which is bound by reading W (sm_80, mma.sync).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Operands: activations row-major, values [nnz, bn, bk], results row-major or column-major, all float64.
// A CTA computes 16 features of one block row (NN: block column) for 8 or 16 tokens at a time. It walks no
// plan. Warps: 8, which take turns at units of 16 k of the row's blocks and add up their sums in shared
// memory in the end. K loop: W and x go from memory to registers, two units ahead, in pairs of neighbours: of
// k, which are multiplied one after the other, or of features, which belong to two products. Grouped
// products: a CTA has the tokens of its block row's group. Chosen where its estimate is least, for at most
// 1024 tokens.
#pragma once

#include <algorithm>

#include "ampere/launch.cuh"
#include "ampere/math.cuh"
#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "common/problem.h"
#include "common/token_groups.h"

namespace ts::sm80 {

struct Float64DecodeArguments {
    const double* input;
    int64_t input_ld;
    double* output;
    int64_t output_ld;
    const double* values;
    const double* bias;
    const double* residual;  // or gate, in the output's layout
    int64_t residual_ld;
    Adjacency rows;  // of results
    Layout output_layout;
    Activation activation;
    Activation gate_activation;
    bool gated;
    int tokens;
    int row_shift;           // log2 of the features of a block
    int k_shift;             // log2 of the k of a block
    const int32_t* offsets;  // of grouped products, or null
    int groups;
    int group_rows;  // block rows
};

template <bool kForward, int kTokenTiles>
class Float64Decode {
    static constexpr int kWarps = 8, kFeatures = 16, kTokens = 8 * kTokenTiles, kUnit = 16;
    static constexpr int kLine = kFeatures + 1;

  public:
    static constexpr int kThreads = 32 * kWarps;
    using Shared = double[kWarps][kTokens][kLine];

    __device__ Float64Decode(const Float64DecodeArguments& arguments)
        : p_(arguments),
          row_(blockIdx.x >> p_.row_shift - 4),
          feature_(static_cast<int>(blockIdx.x & (1 << p_.row_shift - 4) - 1) * kFeatures),
          first_(__ldg(p_.rows.ptr + row_)),
          units_((__ldg(p_.rows.ptr + row_ + 1) - first_) << p_.k_shift - 4) {}

    __device__ void run(Shared& shared) const {
        TokenSpan span{0, p_.tokens};
        if (p_.offsets != nullptr)
            span = TokenGroups{p_.offsets, p_.groups, p_.tokens}.span(row_ / p_.group_rows);
        for (int token = span.first + static_cast<int>(blockIdx.y) * kTokens; token < span.last;
             token += static_cast<int>(gridDim.y) * kTokens) {
            multiply(shared[threadIdx.x / 32], token, span.last);
            __syncthreads();
            for (int i = threadIdx.x; i < kFeatures * kTokens; i += kThreads)
                if (token + i / kFeatures < span.last) store(shared, token, i / kFeatures, i % kFeatures);
            __syncthreads();
        }
    }

  private:
    // Of a lane: W of feature lane / 4 and 8 more, or of two neighbours, and x of token lane / 4 of each 8;
    // of both k from lane % 4 * 2 on, and the same 8 further.
    struct Unit {
        double2 w[2][2];
        double2 x[kTokenTiles][2];
    };
    struct Place {
        int column, slot;
    };

    __device__ static int lane() { return threadIdx.x % 32; }

    __device__ Place place_of(int unit) const {
        if (unit >= units_) return {};
        const int entry = first_ + (unit >> p_.k_shift - 4);
        return {__ldg(p_.rows.idx + entry), __ldg(p_.rows.slot + entry)};
    }

    __device__ void load(Unit& to, int unit, Place place, const double* const (&x)[kTokenTiles]) const {
        if (unit >= units_) return;
        const int k = (unit & (1 << p_.k_shift - 4) - 1) * kUnit + lane() % 4 * 2;
        const double* const block = p_.values + (int64_t{place.slot} << p_.row_shift + p_.k_shift);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int64_t at = kForward
                                       ? (int64_t{feature_ + 8 * i + lane() / 4} << p_.k_shift) + k + 8 * j
                                       : (int64_t{k + 8 * j + i} << p_.row_shift) + feature_ + lane() / 4 * 2;
                to.w[i][j] = __ldg(reinterpret_cast<const double2*>(block + at));
            }
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                to.x[n][j] = __ldg(reinterpret_cast<const double2*>(
                    x[n] + (int64_t{place.column} << p_.k_shift) + k + 8 * j));
    }

    using Sums = double[2][kTokenTiles][2];

    __device__ void add(Sums& sums, const Unit& unit, int number) const {
        if (number >= units_) return;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int second = 0; second < 2; ++second)
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const double2& pair = unit.w[kForward ? m : second][j];
                    const double w = (kForward ? second : m) ? pair.y : pair.x;
#pragma unroll
                    for (int n = 0; n < kTokenTiles; ++n) {
                        const double x = second ? unit.x[n][j].y : unit.x[n][j].x;
                        auto& sum = sums[m][n];
                        cute::SM80_8x8x4_F64F64F64F64_TN::fma(sum[0], sum[1], w, x, sum[0], sum[1]);
                    }
                }
    }

    // The warp's sums of its units.
    __device__ void multiply(double (&to)[kTokens][kLine], int token, int last_token) const {
        const double* x[kTokenTiles];
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)  // those beyond the last are not stored
            x[n] = p_.input + min(token + 8 * n + lane() / 4, last_token - 1) * p_.input_ld;
        Sums sums = {};
        Unit units[2];
        Place places[2];
        int unit = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) places[i] = place_of(unit + i * kWarps);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load(units[i], unit + i * kWarps, places[i], x);
            places[i] = place_of(unit + (2 + i) * kWarps);
        }
        for (; unit < units_; unit += 2 * kWarps) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                add(sums, units[i], unit + i * kWarps);
                load(units[i], unit + (2 + i) * kWarps, places[i], x);
                places[i] = place_of(unit + (4 + i) * kWarps);
            }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    to[8 * n + lane() % 4 * 2 + i][kForward ? 8 * m + lane() / 4 : lane() / 4 * 2 + m] =
                        sums[m][n][i];
    }

    // Adds the sums of all warps, always in the same order.
    __device__ void store(const Shared& shared, int first_token, int token_of_cta, int within) const {
        const int64_t token = first_token + token_of_cta;
        const int64_t feature = (int64_t{row_ % p_.group_rows} << p_.row_shift) + feature_ + within;
        double sum = p_.bias == nullptr ? 0 : p_.bias[(int64_t{row_} << p_.row_shift) + feature_ + within];
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp][token_of_cta][within];
        sum = activate(sum, p_.activation);
        const auto at = [&](int64_t ld) {
            return p_.output_layout == Layout::row_major ? token * ld + feature : feature * ld + token;
        };
        if (p_.residual != nullptr) {
            const double other = p_.residual[at(p_.residual_ld)];
            sum = p_.gated ? sum * activate(other, p_.gate_activation) : sum + other;
        }
        p_.output[at(p_.output_ld)] = sum;
    }

    const Float64DecodeArguments& p_;
    int row_, feature_;  // the first one in the block
    int first_, units_;
};

template <bool kForward, int kTokenTiles>
__global__ void __launch_bounds__(Float64Decode<kForward, kTokenTiles>::kThreads, 2)
    decode_f64_kernel(const __grid_constant__ Float64DecodeArguments arguments) {
    using Work = Float64Decode<kForward, kTokenTiles>;
    __shared__ typename Work::Shared shared;
    Work(arguments).run(shared);
}

// Host side: the row of the registry.
struct Float64DecodeRow {
    static constexpr int kMaxTokens = 1024;

    static const char* refuses(const Problem& problem, const Device&) {
        return problem.input().layout == Layout::row_major ? nullptr : "it reads row-major activations";
    }
    static size_t workspace_size(const Problem&, const Device&, const Decision&) { return 0; }

    static int32_t launch(const Problem& problem, const Device&, const Decision&, void*, void* stream) {
        const int64_t features = problem.features() * problem.pattern.groups;
        if (problem.tokens == 0 || features == 0) return cudaSuccess;
        const Matrix &input = problem.input(), &output = problem.output();
        const Float64DecodeArguments arguments{static_cast<const double*>(input.data),
                                               input.ld,
                                               static_cast<double*>(output.data),
                                               output.ld,
                                               static_cast<const double*>(problem.values.data),
                                               static_cast<const double*>(problem.bias),
                                               static_cast<const double*>(problem.residual.data),
                                               problem.residual.ld,
                                               problem.block_rows(),
                                               output.layout,
                                               problem.activation,
                                               problem.gate_activation,
                                               problem.gated,
                                               static_cast<int>(problem.tokens),
                                               log2_of_block(problem.row_block()),
                                               log2_of_block(problem.k_block()),
                                               problem.offsets,
                                               problem.pattern.groups,
                                               static_cast<int>(problem.features() / problem.row_block())};
        const int64_t tokens = problem.grouped() ? tokens_of_group(problem) : problem.tokens;
        const int tile = tokens > 8 ? 16 : 8;
        const auto chunks = problem.grouped() ? 1 : (problem.tokens + tile - 1) / tile;
        const dim3 blocks(static_cast<unsigned>(features / 16), static_cast<unsigned>(chunks));
        const auto start = problem.forward() ? (tile == 8 ? begin<true, 1> : begin<true, 2>)
                                             : (tile == 8 ? begin<false, 1> : begin<false, 2>);
        return start(arguments, blocks, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<Float64DecodeRow>(name, "sm80_decode");
        row.ops = bits_of(Op::dds_nt, Op::dds_nn);
        row.input_dtypes = bits_of(DType::float64);
        row.grouped = bits_of(0, 1);
        row.precision = Precision::highest;
        row.max_tokens = kMaxTokens;
        return row;
    }

  private:
    template <bool kForward, int kTokenTiles>
    static cudaError_t begin(const Float64DecodeArguments& arguments, dim3 blocks, void* stream) {
        return ts::sm80::launch<decode_f64_kernel<kForward, kTokenTiles>>(
            arguments, blocks, Float64Decode<kForward, kTokenTiles>::kThreads, 0, 0, stream);
    }
};

}  // namespace ts::sm80

#define TS_ROW_decode_f64(name)                                      \
    namespace ts::sm80 {                                             \
    const Kernel& name() {                                           \
        static constexpr Kernel kRow = Float64DecodeRow::row(#name); \
        return kRow;                                                 \
    }                                                                \
    }
