// Traits of the kernels of gemm.cuh, and the end of their tiles.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include <type_traits>

#include "ampere/async.cuh"
#include "ampere/math.cuh"
#include "ampere/tile.cuh"
#include "ampere/weights.cuh"
#include "common/epilogue.cuh"
#include "common/plan_view.cuh"

namespace ts::sm80 {

// Constants that follow from the tile of a dds kernel.

// Scales inside of the sums: of a step, whose features and k are one block, times the unit of its sums. Read
// from memory before its products.
template <int kTokenTiles, class Math>
struct StepScales {
    float of[kTokenTiles][2];  // of a thread's tokens

    __device__ StepScales(const DdsArguments& arguments, const PlanView& plan, int step, int first_token,
                          int lane) {
        const int slot = __ldg(plan.slots + step), k = __ldg(plan.k + step);
        const float* const of_tokens = arguments.x_scales + k / kScaleGroup * arguments.x_scales_ld;
        const float of_block = __ldg(arguments.scales + slot) * Math::kSumUnit;
#pragma unroll
        for (int i = 0; i < 2 * kTokenTiles; ++i) {
            const int token = min(first_token + 8 * i + lane / 4, arguments.tokens - 1);
            of[i / 2][i % 2] = __ldg(of_tokens + token) * of_block;
        }
    }
};
struct UnscaledSteps {
    __device__ UnscaledSteps(const DdsArguments&, const PlanView&, int, int, int) {}
};

template <class Math_, class Weight_, int kTileTokens_, int kWarpTokens_, int kWarpFeatures_>
struct DdsTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr bool kQuantized = is_quantized(Math::kInput);                // x is, and has scales:
    static constexpr bool kScaled = Math::kAccumulation == Accumulation::scaled;  // inside of the sums
    using Weight = Weight_;  // its format, see weights.cuh
    static constexpr int kTileTokens = kTileTokens_;
    static constexpr int kTileFeatures = Weight::kFeatures;
    static constexpr int kWarpTokens = kWarpTokens_;
    static constexpr int kWarpFeatures = kWarpFeatures_;
    static constexpr int kFeatureWarps = kTileFeatures / kWarpFeatures;
    static constexpr int kTokenWarps = kTileTokens / kWarpTokens;
    static constexpr int kWarps = kTokenWarps * kFeatureWarps;
    // Either all threads load and compute, or those of some warps more only load.
    static constexpr bool kOnlyLoad = Weight::kLoaderWarps > 0;
    static constexpr int kComputers = 32 * kWarps;
    static constexpr int kLoaders = kOnlyLoad ? 32 * Weight::kLoaderWarps : kComputers;
    static constexpr int kFirstComputer = kOnlyLoad ? kLoaders : 0;
    static constexpr int kThreads = kFirstComputer + kComputers;
    // CTAs on a multiprocessor: its registers hold 8 warps of 64 x 64 sums, or 16 of half as many.
    // Sums of steps apart are as many again.
    static constexpr int kSumWords = kWarpTokens * kWarpFeatures * static_cast<int>(sizeof(Accumulator) / 4) *
                                     (Math::kAccumulation == Accumulation::kept ? 1 : 2);
    static constexpr bool kSmallWarps = kSumWords <= 64 * 32 && (sizeof(Input) <= 2 || kWarps == 16);
    static constexpr int kResident = (kSmallWarps ? 16 : 8) / kWarps;
    static constexpr int kTokenTiles = kWarpTokens / 16;
    static constexpr int kFeatureTiles = kWarpFeatures / 16;
    static constexpr int kStep = kLineBytes / sizeof(Input);
    static constexpr int kStepShift = log2_of(kStep);
    static constexpr int kChunk = kChunkBytes / sizeof(Input);
    static_assert(kTileFeatures == 128, "plans' masks hold 8 tiles of 16 features");

    template <bool kRowMajorInput>
    using InputTile = Tile<Input, kTileTokens, kRowMajorInput>;
    template <bool kRowMajorInput>
    using InputReader = typename Weight::template InputReader<InputTile<kRowMajorInput>, kTokenTiles>;
    using WeightReader = typename Weight::template Reader<kFeatureTiles>;
    using Sums = typename Weight::template Sums<kTokenTiles, kFeatureTiles>;
    using StepScales = std::conditional_t<kScaled, sm80::StepScales<kTokenTiles, Math>, UnscaledSteps>;

    static constexpr bool kColumnMajorInput = !kQuantized;  // ldmatrix transposes elements of 16 bits
    static constexpr int kInputBytes = kColumnMajorInput && InputTile<false>::kBytes > InputTile<true>::kBytes
                                           ? InputTile<false>::kBytes
                                           : InputTile<true>::kBytes;
    static constexpr int kStageBytes = kInputBytes + Weight::kBytes;

    // Sums of 8 tokens at a time pass through shared memory, so that each lane can store 8 neighbours: of
    // each warp [8 tokens][kStagingLine], of which kWarpFeatures are used. The padding keeps what lanes write
    // at once off each other's banks: 8 features of 4 tokens, or 8 of every other token.
    static constexpr int kStagingLine = kWarpFeatures + (Weight::kSumsByToken ? 8 : 4);
    static constexpr bool kStages = sizeof(Accumulator) == sizeof(float);
    static constexpr int kStagingFloats = kStages ? 8 * kStagingLine : 0;
    static constexpr int kStagingBytes = kWarps * kStagingFloats * static_cast<int>(sizeof(float));

    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 8;
    static constexpr int shared_bytes(int stages) {
        return stages * kStageBytes + kStagingBytes + Ring::bytes(stages);
    }
};

// How the sums of a dds kernel become results.

struct EightSums {
    float of[8];
};

template <class Element>
__device__ __noinline__ EightSums called_activation(EightSums sums, Activation activation) {
    activate_all<Element>(sums.of, activation);
    return sums;
}

// A kernel activates sums and gates in a dozen places. In float32, whose gelu is long, each calls one
// function; in 16 bits that takes 2 to 5 % longer and saves less room.
template <class Element>
__device__ inline void activate_eight(EightSums& sums, Activation activation) {
    if constexpr (sizeof(Element) == 2)
        activate_all<Element>(sums.of, activation);
    else if (activation != Activation::none)
        sums = called_activation<Element>(sums, activation);
}

__device__ __noinline__ inline double activated(double value, Activation activation) {
    return activate(value, activation);
}

// Eight results that lie side by side in memory, stored in vectors of 16 bytes.
template <class Element>
class Neighbours {
  public:
    static constexpr int kCount = 8;
    static constexpr int kVectors = kCount * sizeof(Element) / sizeof(uint4);

    __device__ Neighbours(const float* sums, int stride) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums_.of[i] = sums[i * stride];
    }

    __device__ void finish(const float (&bias)[kCount], Activation activation) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums_.of[i] += bias[i];
        activate_eight<Element>(sums_, activation);
    }

    // As many elements of another matrix, aligned to 16 bytes. They may be read well before they are added.
    struct Others {
        uint4 vectors[kVectors];
    };
    __device__ static Others read(const Element* from) {
        Others others;
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            others.vectors[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
        return others;
    }
    __device__ void add(const Others& others) {
        const auto* elements = reinterpret_cast<const Element*>(others.vectors);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums_.of[i] += to_float(elements[i]);
    }
    // The first ones of them, which may lie anywhere; the others are zeros.
    __device__ static Others read_first(const Element* from, int count) {
        Others others{};
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (i < count) reinterpret_cast<Element*>(others.vectors)[i] = from[i];
        return others;
    }
    // Multiplies by a gate.
    __device__ void gate(const Others& others, Activation activation) {
        const auto* elements = reinterpret_cast<const Element*>(others.vectors);
        EightSums factors;
#pragma unroll
        for (int i = 0; i < kCount; ++i) factors.of[i] = to_float(elements[i]);
        activate_eight<Element>(factors, activation);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums_.of[i] *= rounded_to<Element>(factors.of[i]);
    }

    // `target` is aligned to 16 bytes.
    __device__ void store(Element* target) const {
        alignas(16) Element results[kCount];
        round(results);
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(results)[i];
    }
    __device__ void store_first(Element* target, int count) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (i < count) target[i] = from_float<Element>(sums_.of[i]);
    }

  private:
    __device__ void round(Element (&results)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) results[i] = from_float<Element>(sums_.of[i]);
    }

    EightSums sums_;
};

// Multiplies a warp's sums by the scales of factors in 8 bits, adds the bias, applies the activation, adds
// the residual or multiplies by the gate, and stores them through its staging memory.
template <class Traits>
class DdsEpilogue {
    using Accumulator = typename Traits::Accumulator;
    using Result = typename Traits::Result;
    using Sums = typename Traits::Sums;
    static constexpr bool kByToken = Traits::Weight::kSumsByToken;
    static constexpr bool kScales = Traits::kQuantized && !Traits::kScaled;  // sums have none yet
    static constexpr int kTokens = 8;      // of a batch, which is staged at a time
    static constexpr int kNeighbours = 8;  // features or tokens that a lane stores
    static constexpr int kBatches = Traits::kWarpTokens / kTokens;
    using Results = Neighbours<Result>;
    using Others = typename Results::Others;

  public:
    // Reads the lane anew: what follows from it would otherwise take registers while tiles are multiplied.
    __device__ DdsEpilogue(const DdsArguments& arguments, const int* rows, char* staging)
        : arguments_(arguments), rows_(rows), staging_(staging) {
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_));
    }

    // `token` and `feature`: of the warp's first sum in the output and in the tile.
    __device__ void store(const Sums& sums, int token, int feature) const {
        if (arguments_.output_layout == Layout::column_major)
            store_column_major(sums, token, feature);
        else if (arguments_.activation == Activation::none && residual() == nullptr)
            store_plain(sums, token, feature);
        else
            store_activated(sums, token, feature);
    }

  private:
    static constexpr int kLanesOfToken = Traits::kWarpFeatures / kNeighbours;
    static constexpr int kTokensAtOnce = 32 / kLanesOfToken;
    static constexpr int kLines = (kTokens + kTokensAtOnce - 1) / kTokensAtOnce;
    static constexpr int kColumns = (Traits::kWarpFeatures + 31) / 32;

    // Scales of the features of which a lane has sums.
    struct FeatureScales {
        float2 of[2 * Traits::kFeatureTiles];
    };
    using Scales = std::conditional_t<kScales, FeatureScales, NoScales>;

    __device__ Scales scales_of(int first_feature) const {
        Scales scales;
        if constexpr (kScales) {
#pragma unroll
            for (int n = 0; n < 2 * Traits::kFeatureTiles; ++n) {
                const int64_t at = output_feature(first_feature + 8 * n + lane_ % 4 * 2);
                scales.of[n] =
                    at < 0 ? float2{} : make_float2(arguments_.scales[at], arguments_.scales[at + 1]);
            }
        }
        return scales;
    }

    // Scale of the token of which a lane has sums, of 8 from one on.
    __device__ float token_scale(int first_token) const {
        if constexpr (!kScales) return 1;
        return __ldg(arguments_.x_scales + min(first_token + lane_ / 4, arguments_.tokens - 1));
    }

    // Two sums, of features 8 n + lane % 4 * 2 on if they have scales. Each product is rounded.
    __device__ static float2 scaled(const Accumulator* sums, float of_token, const Scales& scales, int n) {
        if constexpr (kScales) {
            const auto scale = [&](Accumulator sum, float of_feature) {
                return __fmul_rn(__fmul_rn(static_cast<float>(sum) * Traits::Math::kSumUnit, of_token),
                                 of_feature);
            };
            return make_float2(scale(sums[0], scales.of[n].x), scale(sums[1], scales.of[n].y));
        } else {
            return make_float2(sums[0], sums[1]);
        }
    }

    // Row-major with nothing but a bias: rounded before it is staged, and all unrolled.
    __device__ void store_plain(const Sums& sums, int token, int first_feature) const {
        constexpr int kLine = Traits::kWarpFeatures * static_cast<int>(sizeof(Result)) + kChunkBytes;
        const int column = lane_ % kLanesOfToken * kNeighbours, line = lane_ / kLanesOfToken;
        const int64_t feature = output_feature(first_feature + column);
        Result* target = output() + (token + line) * arguments_.output_ld + feature;
        char* const staged = staging_ + lane_ / 4 * kLine + lane_ % 4 * 2 * static_cast<int>(sizeof(Result));
        float2 bias[2 * Traits::kFeatureTiles];
#pragma unroll
        for (int n = 0; n < 2 * Traits::kFeatureTiles; ++n) bias[n] = bias_of(first_feature + 8 * n);
        const Scales scales = scales_of(first_feature);
#pragma unroll
        for (int batch = 0; batch < 2 * Traits::kTokenTiles; ++batch) {
            const float of_token = token_scale(token + batch * kTokens);
#pragma unroll
            for (int n = 0; n < 2 * Traits::kFeatureTiles; ++n) {
                const float2 sum = scaled(sums_of(sums, batch, n), of_token, scales, n);
                Pair<Result> pair = {from_float<Result>(sum.x + bias[n].x),
                                     from_float<Result>(sum.y + bias[n].y)};
                if constexpr (!kByToken) pair = transposed(pair);
                *reinterpret_cast<Pair<Result>*>(staged + 8 * n * sizeof(Result)) = pair;
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kTokens; i += kTokensAtOnce) {
                if (feature >= 0 && line + i < kTokens &&
                    token + batch * kTokens + line + i < arguments_.tokens)
                    copy_neighbours(target + i * arguments_.output_ld,
                                    staging_ + (line + i) * kLine + column * sizeof(Result));
            }
            __syncwarp();
            target += kTokens * arguments_.output_ld;
        }
    }

    // In a tile of 8 tokens and 8 features a lane has the sums of two features of token lane / 4, or of two
    // tokens of feature lane / 4.
    __device__ static const Accumulator* sums_of(const Sums& sums, int batch, int n) {
        return kByToken ? sums[batch / 2][n / 2][n % 2] + batch % 2 * 2
                        : sums[n / 2][batch / 2][batch % 2] + n % 2 * 2;
    }

    // Bias of these two sums, of 8 features from one in the tile on.
    __device__ float2 bias_of(int first_feature) const {
        const int64_t at = output_feature(first_feature + (kByToken ? lane_ % 4 * 2 : lane_ / 4));
        const float bias = bias_at(at);
        return make_float2(bias, kByToken ? bias_at(at < 0 ? at : at + 1) : bias);
    }

    // Two features of token lane / 4 from two tokens of feature lane / 4.
    __device__ static Pair<Result> transposed(Pair<Result> pair) {
        static_assert(sizeof(pair) == sizeof(uint32_t));
        uint32_t word;
        cute::SM75_U32x1_MOVM_T::copy(reinterpret_cast<const uint32_t&>(pair), word);
        return reinterpret_cast<const Pair<Result>&>(word);
    }

    __device__ static void copy_neighbours(Result* target, const char* source) {
        constexpr int kVectors = kNeighbours * sizeof(Result) / sizeof(uint4);
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
    }

    // Row-major: a lane takes 8 features of one token at a time, the same features for every token. The
    // residual is asked for as a whole first and then read 8 tokens ahead.
    __device__ void store_activated(const Sums& sums, int token, int first_feature) const {
        const int column = lane_ % kLanesOfToken * kNeighbours;
        const int64_t feature = output_feature(first_feature + column);
        prefetch_residual(token, feature);
        float bias[kNeighbours];
#pragma unroll
        for (int j = 0; j < kNeighbours; ++j) bias[j] = bias_at(feature < 0 ? feature : feature + j);
        const Scales scales = scales_of(first_feature);
        Others others[kLines];
        read_lines(others, token, 0, feature);
#pragma unroll 1
        for (int batch = 0; batch < kBatches; ++batch) {
            stage(sums, batch, token_scale(token + batch * kTokens), scales);
#pragma unroll
            for (int i = 0; i < kLines; ++i) {
                const int line = line_of(i);
                const int64_t at = token + batch * kTokens + line;
                if (line >= kTokens || at >= arguments_.tokens || feature < 0) continue;
                Results results(floats() + line * Traits::kStagingLine + column, 1);
                results.finish(bias, arguments_.activation);
                if (arguments_.residual != nullptr) combine(results, others[i]);
                results.store(output() + at * arguments_.output_ld + feature);
            }
            read_lines(others, token, batch + 1, feature);
            __syncwarp();
        }
    }

    __device__ void combine(Results& results, const Others& others) const {
        if (arguments_.gated)
            results.gate(others, arguments_.gate_activation);
        else
            results.add(others);
    }

    __device__ int line_of(int i) const { return lane_ / kLanesOfToken + i * kTokensAtOnce; }

    __device__ void prefetch_residual(int token, int64_t feature) const {
        if (arguments_.residual == nullptr || feature < 0) return;
        const int end = min(token + Traits::kWarpTokens, arguments_.tokens);
        for (int64_t at = token + line_of(0); at < end; at += kTokensAtOnce)
            asm volatile(
                "prefetch.global.L2 [%0];" ::"l"(residual() + at * arguments_.residual_ld + feature));
    }

    __device__ void read_lines(Others (&others)[kLines], int token, int batch, int64_t feature) const {
        if (arguments_.residual == nullptr || batch == kBatches || feature < 0) return;
#pragma unroll
        for (int i = 0; i < kLines; ++i) {
            const int64_t at = token + batch * kTokens + line_of(i);
            if (line_of(i) < kTokens && at < arguments_.tokens)
                others[i] = Results::read(residual() + at * arguments_.residual_ld + feature);
        }
    }

    // A lane takes 8 tokens of one feature at a time. The residual is read 8 tokens ahead.
    __device__ void store_column_major(const Sums& sums, int token, int first_feature) const {
        int64_t features[kColumns];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const int column = lane_ + 32 * i;
            features[i] = column < Traits::kWarpFeatures ? output_feature(first_feature + column) : -1;
        }
        const Scales scales = scales_of(first_feature);
        Others others[kColumns];
        read_columns(others, token, 0, features);
#pragma unroll 1
        for (int batch = 0; batch < kBatches; ++batch) {
            stage(sums, batch, token_scale(token + batch * kTokens), scales);
            const int first = token + batch * kTokens, valid = arguments_.tokens - first;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                if (features[i] < 0 || valid <= 0) continue;
                const float one = bias_at(features[i]);
                const float bias[kNeighbours] = {one, one, one, one, one, one, one, one};
                Results results(floats() + lane_ + 32 * i, Traits::kStagingLine);
                results.finish(bias, arguments_.activation);
                Result* target = output() + features[i] * arguments_.output_ld + first;
                if (valid >= kTokens) {
                    if (arguments_.residual != nullptr) combine(results, others[i]);
                    results.store(target);
                } else {
                    if (arguments_.residual != nullptr)
                        combine(results,
                                Results::read_first(residual() + features[i] * arguments_.residual_ld + first,
                                                    valid));
                    results.store_first(target, valid);
                }
            }
            read_columns(others, token, batch + 1, features);
            __syncwarp();
        }
    }

    __device__ void read_columns(Others (&others)[kColumns], int token, int batch,
                                 const int64_t (&features)[kColumns]) const {
        const int first = token + batch * kTokens;
        if (arguments_.residual == nullptr || batch == kBatches || arguments_.tokens - first < kTokens)
            return;
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
            if (features[i] >= 0)
                others[i] = Results::read(residual() + features[i] * arguments_.residual_ld + first);
    }

    // Puts the sums of 8 tokens into shared memory. Registers can only be chosen by branches.
    __device__ void stage(const Sums& sums, int batch, float of_token, const Scales& scales) const {
        constexpr int kLine = Traits::kStagingLine;
        float* target =
            floats() + (kByToken ? lane_ / 4 * kLine + lane_ % 4 * 2 : lane_ % 4 * 2 * kLine + lane_ / 4);
#pragma unroll
        for (int i = 0; i < 2 * Traits::kTokenTiles; ++i) {
            if (batch != i) continue;
#pragma unroll
            for (int n = 0; n < 2 * Traits::kFeatureTiles; ++n) {
                const float2 sum = scaled(sums_of(sums, i, n), of_token, scales, n);
                if constexpr (kByToken)
                    *reinterpret_cast<float2*>(target + 8 * n) = sum;
                else
                    target[8 * n] = sum.x, target[8 * n + kLine] = sum.y;
            }
        }
        __syncwarp();
    }

    // The output feature of one in the tile, or -1 beyond the matrix.
    __device__ int64_t output_feature(int feature) const {
        const int64_t row = __ldg(rows_ + (feature >> arguments_.row_shift));
        const int within = feature & ((1 << arguments_.row_shift) - 1);
        return row < 0 ? -1 : (row << arguments_.row_shift) + within;
    }

    __device__ float bias_at(int64_t feature) const {
        const auto* bias = static_cast<const Result*>(arguments_.bias);
        return bias == nullptr || feature < 0 ? 0.0f : to_float(bias[feature]);
    }

    __device__ Result* output() const { return static_cast<Result*>(arguments_.output); }
    __device__ const Result* residual() const { return static_cast<const Result*>(arguments_.residual); }
    __device__ float* floats() const { return reinterpret_cast<float*>(staging_); }

    const DdsArguments& arguments_;
    const int* rows_;
    char* staging_;
    int lane_;
};

// The same in float64, whose two neighbours fill a store of 16 bytes without staging. Activations, residual
// and gate come later, to results that are read again: they would take the registers of the sums, or as much
// code for each.
template <class Traits>
class DirectEpilogue {
    using Sums = typename Traits::Sums;

  public:
    __device__ DirectEpilogue(const DdsArguments& arguments, const int* rows, char*)
        : arguments_(arguments), rows_(rows) {
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_));
    }

    __device__ void store(const Sums& sums, int token, int first_feature) const {
        const auto* bias = static_cast<const double*>(arguments_.bias);
#pragma unroll
        for (int n = 0; n < 2 * Traits::kFeatureTiles; ++n) {
            const int64_t feature = output_feature(first_feature + 8 * n);
            if (feature < 0) continue;
            const double first = bias == nullptr ? 0 : bias[feature],
                         second = bias == nullptr ? 0 : bias[feature + 1];
#pragma unroll
            for (int m = 0; m < 2 * Traits::kTokenTiles; ++m) {
                const double* const sum = sums[m / 2][n / 2][n % 2] + m % 2 * 2;
                write(token + 8 * m + lane_ / 4, feature, {sum[0] + first, sum[1] + second});
            }
        }
        if (arguments_.activation == Activation::none && arguments_.residual == nullptr) return;
#pragma unroll 1
        for (int i = 0; i < 4 * Traits::kFeatureTiles * Traits::kTokenTiles; ++i) {
            const int64_t feature = output_feature(first_feature + i / (2 * Traits::kTokenTiles) * 8);
            const int64_t at = token + i % (2 * Traits::kTokenTiles) * 8 + lane_ / 4;
            if (feature < 0 || at >= arguments_.tokens) continue;
            finish(at, feature);
            finish(at, feature + 1);
        }
    }

  private:
    __device__ bool is_row_major() const { return arguments_.output_layout == Layout::row_major; }
    __device__ int64_t place(int64_t token, int64_t feature, int64_t ld) const {
        return is_row_major() ? token * ld + feature : feature * ld + token;
    }
    __device__ double* output() const { return static_cast<double*>(arguments_.output); }

    __device__ void write(int64_t token, int64_t feature, Pair<double> pair) const {
        if (token >= arguments_.tokens) return;
        double* const target = output() + place(token, feature, arguments_.output_ld);
        if (is_row_major())
            *reinterpret_cast<Pair<double>*>(target) = pair;
        else
            target[0] = pair.first, target[arguments_.output_ld] = pair.second;
    }

    __device__ void finish(int64_t token, int64_t feature) const {
        double& result = output()[place(token, feature, arguments_.output_ld)];
        double value = activated(result, arguments_.activation);
        if (arguments_.residual != nullptr) {
            const double other = static_cast<const double*>(
                arguments_.residual)[place(token, feature, arguments_.residual_ld)];
            value = arguments_.gated ? value * activated(other, arguments_.gate_activation) : value + other;
        }
        result = value;
    }

    // The output feature of the lane's first sum of 8 features, or -1 beyond the matrix.
    __device__ int64_t output_feature(int first) const {
        const int feature = first + lane_ % 4 * 2;
        const int64_t row = __ldg(rows_ + (feature >> arguments_.row_shift));
        return row < 0 ? -1 : (row << arguments_.row_shift) + (feature & ((1 << arguments_.row_shift) - 1));
    }

    const DdsArguments& arguments_;
    const int* rows_;
    int lane_;
};

}  // namespace ts::sm80
