// Traits of the kernels of gemm.cuh, and the end of their tiles: from sums to results in memory.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include <algorithm>
#include <type_traits>

#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "hopper/atoms.cuh"
#include "hopper/weights.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// Constants that follow from the tile of a dds kernel.

// Every step takes as long, whatever is in it.
struct StepCosts {
    static constexpr int kTile = 3;
    static constexpr int kRound = 25;
    static constexpr int kMostOfStep = 1;

    const int2* tiles;

    __device__ explicit StepCosts(const DdsPlan& plan) : tiles(reinterpret_cast<const int2*>(plan.tiles)) {}
    __device__ int of(int, int steps) const { return steps; }
};

struct NoBarriers {};

// Scales inside of the sums, of what is in each stage.
template <int kInputStages, int kTokens, int kWarpgroups, int kWeightStages>
struct StagedScales {
    alignas(128) float tokens[kInputStages][kTokens];
    float blocks[kWarpgroups][kWeightStages];
};
struct NoScales {};

// A CTA computes a tile of 256, 128 or 64 tokens x 128 features. `kGrouped_`: of grouped products.
template <class Math_, class Weight_, int kTokenRanks, int kRowRanks, int kTileTokens, bool kGrouped_ = false>
struct DdsTraits : DdsRanks<kTokenRanks, kRowRanks, kTileTokens> {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    using Weight = Weight_;  // its format, see weights.cuh

    __device__ static const auto& schedule_of(const DdsArguments& arguments) {
        if constexpr (kGrouped_)
            return arguments.groups;
        else
            return arguments.schedule;
    }

    // The block rows of a CTA's tile.
    __device__ static const int* rows_of(const DdsPlan& plan, int tile, int rank) {
        return plan.rows + DdsTraits::plan_index(tile, rank) * plan.group_rows;
    }

    static constexpr bool kGrouped = kGrouped_;
    static constexpr bool kScaled = Math::kAccumulation == Accumulation::scaled;
    static constexpr bool kCarries = Math::kAccumulation == Accumulation::carried;
    static constexpr bool kPairsRows = Weight::kPairsRows;
    // Tiles of which a group has no more than half the tokens load and multiply half as many.
    static constexpr bool kHalves = kGrouped && kTileTokens > 64;
    static constexpr int kBoxTokens = kHalves ? kTileTokens / 2 : kTileTokens;  // loaded at a time
    // True if clusters may keep at one pace, see Pace.
    static constexpr bool kPaces = kGrouped && kTileTokens == 256 && sizeof(Input) == 2;
    static constexpr int kWarpgroups = 2;  // warpgroups that multiply, each 64 features
    static constexpr int kWarpgroupFeatures = Weight::kFeatures;
    static constexpr int kTileFeatures = kWarpgroups * kWarpgroupFeatures;
    static constexpr int kStep = Weight::kStep;
    static constexpr bool kSplitsInput = Math::kParts > 1;  // in a warpgroup more, see gemm.cuh
    static constexpr int kThreads = 128 * (1 + kWarpgroups + kSplitsInput);
    static constexpr int kComputerRegisters = kSplitsInput ? 216 : 232;

    static constexpr int kInputElementBytes = sizeof(Input);
    static constexpr int kTokenBytes = kTileTokens * kInputElementBytes;  // of all tokens at one k
    static constexpr int kInputBytes = kTokenBytes * kStep;
    static constexpr int kScaleBytes = kScaled ? sizeof(float) : 0;  // of a token in a step
    static constexpr int kChunkTokens = 128 / sizeof(Result);        // stored at a time
    static constexpr int kChunkBytes = kChunkTokens * kWarpgroupFeatures * sizeof(Result);
    static constexpr int kAllChunks = kTileTokens / kChunkTokens;
    static constexpr int kResultBuffers = 3;  // of a warpgroup, at most
    static constexpr int kChunks = std::min(kAllChunks, kResultBuffers);
    static constexpr int kResultBytes = kWarpgroups * kChunks * kChunkBytes;

    // The weight has what activations and results leave, up to the stages that its format asks for. Scaled
    // steps are short: what the CTAs of a cluster do not share has more of them.
    static constexpr int kInputRingBytes = (kTileTokens == 64          ? 80
                                            : kScaled && kRowRanks > 1 ? 100
                                                                       : 128)
                                           << 10;
    static constexpr int kInputStages =
        kInputRingBytes / (Math::kParts * kInputBytes + kTileTokens * kScaleBytes);
    static constexpr int kWeightStages =
        std::min((kStagedBytes - kResultBytes - kInputRingBytes) / (kWarpgroups * Weight::kStageBytes),
                 Weight::most_stages(kTileTokens));

    static constexpr int kSums = kTileTokens * kWarpgroupFeatures / 128;  // of a thread
    static constexpr bool kSplits = kTileTokens <= 128 && !kGrouped;      // made for few tiles
    static constexpr bool kDealsInTurn = false;                           // work of one weight, see Turns
    using Costs = StepCosts;
    using Schedule = tma::Schedule<std::conditional_t<kGrouped, GroupSpans, Bands<kSplits>>, Costs>;
    using Work = typename Schedule::Work;

    // True if half of a tile has all tokens that there are from `token` on.
    __device__ static bool is_half(const Work& work, int token) {
        if constexpr (kHalves)
            return work.end - token <= kBoxTokens;
        else
            return false;
    }

    struct Shared {
        // Row-major [pieces][kTileTokens][k of a piece], else [pieces][kTileTokens / 64][k of a piece][64];
        // once for each part.
        alignas(1024) char input[kInputStages][Math::kParts * kInputBytes];
        // See weights.cuh.
        alignas(1024) char weight[kWarpgroups][kWeightStages][Weight::kStageBytes];
        alignas(1024) char output[kWarpgroups][kChunks][kChunkBytes];
        [[no_unique_address]] std::conditional_t<
            kScaled, StagedScales<kInputStages, kTileTokens, kWarpgroups, kWeightStages>, NoScales> scales;
        Ring<kInputStages> input_ring;
        Ring<kWeightStages> weight_ring[kWarpgroups];
        Barrier residual[kWarpgroups][kChunks];
        Schedule schedule;
        std::conditional_t<kSplitsInput, Barrier[kInputStages], NoBarriers> split;  // of the input's stages
    };
    static constexpr int kSharedBytes = sizeof(Shared);
    static_assert(kSharedBytes <= kSharedCapacity);
};

// Host side: of k that lie in one block, those of a step.
struct InputShape {
    int step;         // of k
    int bytes;        // of an element
    int token_bytes;  // Traits::kTokenBytes

    int width(const DdsArguments& arguments) const { return std::min(arguments.k_block, step); }
};
template <class Traits>
constexpr InputShape input_shape = {Traits::kStep, Traits::kInputElementBytes, Traits::kTokenBytes};

// How the pieces of a step follow one another in shared memory.
inline Operand describe_input(const DdsArguments& arguments, const InputShape& shape, Layout layout) {
    const int product = 32 / shape.bytes, width = shape.width(arguments);  // of k
    const bool row_major = layout == Layout::row_major;
    Operand tokens =
        row_major ? line_operand(shape.bytes * width, width * shape.token_bytes) : operand(128, 128 * width);
    for (int i = 0; i < 4; ++i) {
        const int piece = product * i / width, within = product * i % width;
        const int offset = piece * width * shape.token_bytes + within * (row_major ? shape.bytes : 128);
        tokens.step[i] = static_cast<uint32_t>(offset / 16);
    }
    return tokens;
}

// Layout of a warpgroup's sums in the buffers through which results are stored, and a residual or gate
// is read. A buffer has 64 features and Traits::kChunkTokens tokens, which are 128 bytes, in boxes of TMA:
// row-major [warpgroup_rows][tokens][row_width], for float32 in boxes of 32 features, or 16, else [64
// features][tokens];
// their lines are swizzled over their width.
//
//     put(sums, buffer): the results, rounded
//     combine(sums, buffer, join): makes join(sum, what is in a buffer) of the sums
//     activate(buffer, activation): what is in a buffer, where it lies; a warp does so for its own features

constexpr int kLine = 128;  // bytes

__device__ inline uint32_t swizzled(uint32_t offset, uint32_t line) {
    return offset ^ (offset / kLine & line / 16 - 1) * 16;
}

// A thread has sums of a feature and of the one 8 on, or of the neighbour of that where rows are exchanged
// (see ByteWeight): 1 then, else 0.
template <bool kPairsRows>
__device__ int neighbour(const DdsArguments& arguments) {
    return kPairsRows ? arguments.exchange / 4 : 0;
}
// The distance of the second feature from the first one.
template <bool kPairsRows>
__device__ int to_second(const DdsArguments& arguments, int feature) {
    return 8 + (feature ^ neighbour<kPairsRows>(arguments)) - feature;
}

// Results of 16 bits, in matrices of 8 x 8.
template <class Result, bool kPairsRows = false>
class HalfStaging {
    static constexpr int kTokens = 64;

  public:
    __device__ HalfStaging(const DdsArguments& arguments, int thread)
        : arguments_(arguments), row_width_(arguments.row_width), place_(place(arguments, thread)) {}
    // For 64 x 64 sums whose rows are tokens: lines of a buffer, or its columns. Below these are features.
    __device__ HalfStaging(const DdsArguments& arguments, int thread, bool row_major)
        : arguments_(arguments), row_width_(kTokens) {
        const int warp = thread / 32, lane = thread % 32, matrix = lane / 8;
        const int row = 16 * warp + matrix % 2 * 8, column = matrix / 2 * 8;
        place_ = row_major ? swizzled((row + lane % 8) * kLine + column * 2, kLine)
                           : swizzled((column + lane % 8) * kLine + row * 2, kLine);
    }

    template <bool kRowMajor>
    __device__ void put(const float* sums, char* buffer) const {
#pragma unroll
        for (int i = 0; i < kTokens / 16; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words[j] = rounded<Result>(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1]);
            exchange<kRowMajor>(words);
            using Copy = std::conditional_t<kRowMajor, cute::SM90_U16x8_STSM_T, cute::SM90_U32x4_STSM_N>;
            Copy::copy(words[0], words[1], words[2], words[3], line_of<kRowMajor>(buffer, i));
        }
    }

    template <bool kRowMajor, class Join>
    __device__ void combine(float* sums, char* buffer, Join join) const {
#pragma unroll
        for (int i = 0; i < kTokens / 16; ++i) {
            uint32_t words[4];
            using Copy = std::conditional_t<kRowMajor, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
            Copy::copy(line_of<kRowMajor>(buffer, i), words[0], words[1], words[2], words[3]);
            exchange<kRowMajor>(words);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto& pair = reinterpret_cast<const Pair<Result>&>(words[j]);
                const float first = to_float(pair.first), second = to_float(pair.second);
                float* const to = sums + 8 * i + 2 * j;
                to[0] = join(to[0], first);
                to[1] = join(to[1], second);
            }
        }
    }

    template <bool kRowMajor>
    __device__ void activate(char* buffer, Activation activation) const {
#pragma unroll 1
        for (int i = 0; i < kTokens / 16; i += 2)
            activate_elements(reinterpret_cast<Result*>(&line_of<kRowMajor>(buffer, i)),
                              reinterpret_cast<Result*>(&line_of<kRowMajor>(buffer, i + 1)), activation);
    }

  private:
    // Row-major, features are columns of matrices: a thread gets the words of its own second feature, or
    // gives them back. Else they are lines, and each lane has that of its own.
    template <bool kRowMajor>
    __device__ void exchange(uint32_t (&words)[4]) const {
        if constexpr (kPairsRows && kRowMajor)
            for (int i = 1; i < 4; i += 2) words[i] = __shfl_xor_sync(~0u, words[i], arguments_.exchange);
    }

    // Address of this lane's line of the first four matrices.
    __device__ static uint32_t place(const DdsArguments& arguments, int thread) {
        const int warp = thread / 32, lane = thread % 32, matrix = lane / 8;
        const int feature = 16 * warp + matrix % 2 * 8, token = matrix / 2 * 8;
        const int within = lane % 8 ^ neighbour<kPairsRows>(arguments) * (matrix % 2);
        if (arguments.output_layout == Layout::column_major)
            return swizzled((feature + within) * kLine + token * 2, kLine);
        const int width = arguments.row_width;
        return swizzled((feature / width * kTokens + token + lane % 8) * 2 * width + feature % width * 2,
                        2 * width);
    }

    // Address of the lane's line of the i-th four matrices. 16 tokens on, neither swizzle changes.
    template <bool kRowMajor>
    __device__ cute::uint128_t& line_of(char* buffer, int i) const {
        const uint32_t offset = kRowMajor ? place_ + 32 * i * row_width_ : place_ ^ 32 * i;
        return *reinterpret_cast<cute::uint128_t*>(buffer + offset);
    }

    const DdsArguments& arguments_;
    int row_width_;
    uint32_t place_;
};

// Features of float32 that lie side by side in a box, of blocks with so many features.
__host__ __device__ constexpr int float_width(int row_width) { return row_width < 32 ? row_width : 32; }

// Results of 32 bits, word by word: as the sums of a thread are, without conflicts of banks in row-major
// boxes of 32 features.
template <bool kPairsRows>
class FloatStaging {
    static constexpr int kTokens = 32;

  public:
    __device__ FloatStaging(const DdsArguments& arguments, int thread)
        : thread_(thread),
          line_(4 * float_width(arguments.row_width)),
          place_(place(arguments, thread)),
          neighbour_(neighbour<kPairsRows>(arguments) *
                     (arguments.output_layout == Layout::column_major ? kLine + 16 : 4)) {}

    template <bool kRowMajor>
    __device__ void put(const float* sums, char* buffer) const {
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) word_of<kRowMajor>(buffer, i) = sums[i];
    }

    template <bool kRowMajor, class Join>
    __device__ void combine(float* sums, char* buffer, Join join) const {
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sums[i] = join(sums[i], word_of<kRowMajor>(buffer, i));
    }

    // The 16 features of a warp are lines, or of each token's line in a box all, or half of it.
    template <bool kRowMajor>
    __device__ void activate(char* buffer, Activation activation) const {
#pragma unroll 1
        for (int i = 0; i < 4; i += 2)
            activate_elements(part_of<kRowMajor>(buffer, i), part_of<kRowMajor>(buffer, i + 1), activation);
    }

  private:
    // The i-th four elements of the 16 that a lane activates.
    template <bool kRowMajor>
    __device__ float* part_of(char* buffer, int i) const {
        const int warp = thread_ / 32, lane = thread_ % 32;
        const uint32_t offset = kRowMajor ? row_major(16 * warp + 4 * i, lane, line_)
                                          : (16 * warp + 4 * i + lane / 8) * kLine + lane % 8 * 16;
        return reinterpret_cast<float*>(buffer + offset);
    }

    // Address of the thread's first sum.
    __device__ static uint32_t place(const DdsArguments& arguments, int thread) {
        const int warp = thread / 32, lane = thread % 32;
        const int feature = 16 * warp + lane / 4, token = lane % 4 * 2;
        if (arguments.output_layout == Layout::column_major)
            return swizzled(feature * kLine + token * 4, kLine);
        return row_major(feature, token, 4 * float_width(arguments.row_width));
    }
    __device__ static uint32_t row_major(uint32_t feature, uint32_t token, uint32_t line) {
        const uint32_t width = line / 4;
        return swizzled((feature / width * kTokens + token) * line + feature % width * 4, line);
    }

    // A thread has two neighbours of eight tokens, of a feature and of the one 8 on.
    template <bool kRowMajor>
    __device__ float& word_of(char* buffer, int i) const {
        const int eight = i / 4, feature = i / 2 % 2, token = i % 2;
        const uint32_t next_token = line_ == kLine ? kLine + 16 : line_;  // where swizzles differ
        const uint32_t place = place_ ^ feature * neighbour_;
        const uint32_t offset = kRowMajor ? (place ^ feature * 32 ^ token * next_token) + eight * 8 * line_
                                          : (place ^ eight * 32) + feature * 8 * kLine + token * 4;
        return *reinterpret_cast<float*>(buffer + offset);
    }

    int thread_;
    uint32_t line_;  // bytes of a token in a box
    uint32_t place_;
    uint32_t neighbour_;  // by how much the places of second features differ
};

// How the sums of a dds kernel become results.

// Calls visit(join), where join(sum, other) adds a residual to a sum or multiplies it by a gate.
template <class Visit>
__device__ void with_join(const DdsArguments& arguments, Visit visit) {
    if (arguments.gated)
        visit([](float sum, float gate) { return sum * gate; });
    else
        visit([](float sum, float other) { return sum + other; });
}

// A sum of 8 bits times the scales that are outside of it.
__device__ inline float scaled(float sum, float of_token, float of_feature) {
    return __fmul_rn(__fmul_rn(sum, of_token), of_feature);
}

// The epilogue of one warpgroup: bias and activation in registers, then through shared memory by TMA. A
// residual or gate comes through the same buffers, into which the results of it are put. A gate is activated
// there: code for all sums in registers would be as long as that of all else. Each buffer belongs to a warp,
// whose first lane asks for what is read into it and stores from it.
template <class Traits>
class DdsEpilogue {
    using Result = typename Traits::Result;
    static constexpr bool kFloat = sizeof(Result) == 4;
    static constexpr bool kScales = is_quantized(Traits::Math::kInput) && !Traits::kScaled;
    using Staging =
        std::conditional_t<kFloat, FloatStaging<Traits::kPairsRows>, HalfStaging<Result, Traits::kPairsRows>>;
    static constexpr int kSums = Traits::kSums;

  public:
    using Buffers = char[Traits::kChunks][Traits::kChunkBytes];
    using Arrived = Barrier[Traits::kChunks];  // of the residual in a buffer

    __device__ DdsEpilogue(const DdsArguments& arguments, Buffers& buffers, const Arrived& arrived,
                           int warpgroup)
        : arguments_(arguments),
          buffers_(buffers),
          arrived_(arrived),
          warpgroup_(warpgroup),
          thread_(threadIdx.x % 128),
          row_count_(arguments.warpgroup_rows),
          staging_(arguments, threadIdx.x % 128),
          first_row_(row_of(0)) {}
    // The same of a thread that the compiler does not know, of a tile that is not the first.
    __device__ DdsEpilogue(const DdsArguments& arguments, Buffers& buffers, const Arrived& arrived,
                           int warpgroup, int thread, uint32_t residual_parity)
        : arguments_(arguments),
          buffers_(buffers),
          arrived_(arrived),
          warpgroup_(warpgroup),
          thread_(thread),
          row_count_(arguments.warpgroup_rows),
          staging_(arguments, thread),
          residual_parity_(residual_parity),
          first_row_(row_of(0)) {}

    // Operands of a tile's end are read early and used late: a warp stops where it uses what has not arrived.
    //
    // Called before the results of the tile before are stored. `rows`: the block rows of the CTA's tile.
    __device__ void prepare(const int* rows) {
#pragma unroll
        for (int i = 0; i < kMaxRows; ++i)
            if (i < row_count_) next_rows_[i] = __ldg(rows + first_row_ + i);
        next_warp_row_ = __ldg(rows + row_of(kWarpFeatures * warp()));
    }

    // The same if all of the warpgroup's features are of one block row.
    __device__ void prepare_row(int row) { next_rows_[0] = next_warp_row_ = row; }

    // Called when that has arrived; store() does so itself. Any bias will do for a row that the tile does not
    // have: choosing zero would wait for what is read.
    __device__ void read_bias() {
        const int first = max(output_feature(next_warp_row_, kWarpFeatures * warp()), 0);
        const int feature = first + thread_ % 32 / 4;
        const int second = to_second<Traits::kPairsRows>(arguments_, feature);
        if constexpr (kScales)
            next_scales_ = {arguments_.scales[feature], arguments_.scales[feature + second]};
        if (arguments_.bias == nullptr) return;
        const auto* const bias = static_cast<const Result*>(arguments_.bias) + feature;
        next_bias_[0] = bias[0];
        next_bias_[1] = bias[second];
    }

    // Called before begin() of a grouped product's tile.
    __device__ void set_group(const GroupWork& work) {
        end_ = work.end;
        rows_before_ = work.group * arguments_.group_rows;
    }

    // Called before the sums are computed; asks for the residual of the first chunks.
    __device__ void begin(int token) {
        token_ = token;
        set_rows();
        bias_ = {next_bias_[0], next_bias_[1]};
        if constexpr (kScales) {
            scales_ = next_scales_;
            read_token_scales();
        }
        if (arguments_.has_residual) load_residual(0, Traits::kChunks);
    }

    __device__ void store(typename Traits::Accumulator (&sums)[kSums]) {
        read_bias();  // of the next tile
        if constexpr (kScales) scale(sums);
        auto& scaled = reinterpret_cast<float (&)[kSums]>(sums);
        if (arguments_.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < kSums; ++i)
                scaled[i] += to_float(i / 2 % 2 == 0 ? bias_.first : bias_.second);
        }
        activate_all<Result>(scaled, arguments_.activation);
        if (arguments_.output_layout == Layout::row_major)
            store_as<true>(scaled);
        else
            store_as<false>(scaled);
    }

    // True if results are what the sums are, row-major.
    __device__ static bool is_plain(const DdsArguments& arguments) {
        return arguments.bias == nullptr && arguments.activation == Activation::none &&
               !arguments.has_residual && arguments.output_layout == Layout::row_major;
    }
    // begin() and store() for these: fewer instructions, each of which takes its latency.
    __device__ void store_plain(typename Traits::Accumulator (&sums)[kSums], int token) {
        static_assert(!kScales);
        token_ = token;
        set_rows();
        store_in_turn<true, 0, true>(reinterpret_cast<float (&)[kSums]>(sums));
    }

    // Before the CTA ends, its stores must have read shared memory.
    __device__ void finish_stores() const { cute::tma_store_wait<0>(); }

  private:
    static constexpr int kAllChunks = Traits::kAllChunks;
    static constexpr int kSumsOfChunk = Traits::kChunkTokens / 2;
    static constexpr int kTokens = kSums * 128 / Traits::kWarpgroupFeatures;
    static constexpr int kWarpFeatures = 16;
    static constexpr int kMaxRows = Traits::kWarpgroupFeatures / kWarpFeatures;
    static_assert(Traits::kChunks <= 4, "a warp for each");
    static constexpr bool kOneMore = Traits::kChunks > 1 && kAllChunks == Traits::kChunks + 1;  // chunk

    __device__ void set_rows() {
#pragma unroll
        for (int i = 0; i < kMaxRows; ++i)
            rows_[i] = Traits::kGrouped ? next_rows_[i] - rows_before_ : next_rows_[i];
    }

    // A lane keeps those of each 32nd token. They are read early, as all is, and shared memory has no room.
    __device__ void read_token_scales() {
#pragma unroll
        for (int i = 0; i < kTokens / 32; ++i) {
            const int token = token_ + 32 * i + thread_ % 32;
            token_scales_[i] = token < arguments_.tokens ? __ldg(arguments_.x_scales + token) : 0.0f;
        }
    }

    // Makes float32 of the sums where they are: the next products go to these registers, which stay taken. Of
    // eight tokens a thread has two neighbours, of a feature and of the one 8 on.
    __device__ void scale(typename Traits::Accumulator (&sums)[kSums]) const {
        auto& results = reinterpret_cast<float (&)[kSums]>(sums);
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
            const int token = 2 * i, lane = token % 32 + thread_ % 4 * 2;
            const float of_first = __shfl_sync(~0u, token_scales_[token / 32], lane);
            const float of_second = __shfl_sync(~0u, token_scales_[token / 32], lane + 1);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                results[i + j] = scaled(sums[i + j], j % 2 == 0 ? of_first : of_second,
                                        j / 2 == 0 ? scales_.x : scales_.y);
        }
    }

    __device__ int warp() const { return thread_ / 32; }
    __device__ bool is_first_lane() const { return thread_ % 32 == 0; }
    __device__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup_); }

    template <bool kRowMajor>
    __device__ void store_as(float (&sums)[kSums]) {
        if constexpr (kOneMore)
            if (arguments_.has_residual) return store_with_residual<kRowMajor>(sums);
        store_in_turn<kRowMajor, 0>(sums);
    }

    // Chunks take the buffers in turn. As many as there are buffers are rounded at a time, since waiting for
    // one another takes longer, and then the next ones: those from kFirst on.
    template <bool kRowMajor, int kFirst, bool kPlain = false>
    __device__ void store_in_turn(float (&sums)[kSums]) {
        constexpr int kCount = chunks_from(kFirst), kNext = chunks_from(kFirst + kCount);
        const bool residual = !kOneMore && !kPlain && arguments_.has_residual;
        if (residual)
            combine<kRowMajor, kFirst, kCount>(sums);
        else
            wait_for_buffers(kCount);
        put<kRowMajor, kFirst, kCount>(sums);
        before_stores();
        each_own_buffer(0, kCount, [&](int buffer) { store_chunk(kFirst + buffer, buffer); });
        if constexpr (kNext > 0) {
            if (residual) load_residual(kFirst + kCount, kNext);
            store_in_turn<kRowMajor, kFirst + kCount, kPlain>(sums);
        }
    }
    static constexpr int chunks_from(int first) {
        return kAllChunks - first < Traits::kChunks ? kAllChunks - first : Traits::kChunks;
    }

    // With a chunk more than buffers. The residual of the last is read into the first buffer as soon as that
    // of the first has been added; the results of both are stored last.
    template <bool kRowMajor>
    __device__ void store_with_residual(float (&sums)[kSums]) {
        constexpr int kLast = kAllChunks - 1;
        combine<kRowMajor, 0, 1>(sums);
        before_stores();  // and before what is read where a gate was activated
        load_residual(kLast, 1);
        combine<kRowMajor, 1, kLast - 1>(sums);
        put<kRowMajor, 1, kLast - 1>(sums);
        before_stores();
        each_own_buffer(1, kLast - 1, [&](int buffer) { store_chunk(buffer, buffer); });
        combine<kRowMajor, kLast, 1>(sums);
        wait_for_buffers(2);
        put<kRowMajor, kLast, 1>(sums);
        staging_.template put<kRowMajor>(sums, buffers_[1]);
        before_stores();
        each_own_buffer(0, 2, [&](int buffer) { store_chunk(buffer == 0 ? kLast : 0, buffer); });
    }

    // Waits until what was stored from the first buffers has been read.
    __device__ void wait_for_buffers(int count) const {
        if (is_first_lane() && warp() < count) cute::tma_store_wait<0>();
        sync();
    }

    // Makes the writes of warps visible to TMA.
    __device__ void before_stores() const {
        cutlass::arch::fence_view_async_shared();
        sync();
    }

    // Puts the results of kCount chunks into their buffers.
    template <bool kRowMajor, int kFirst, int kCount>
    __device__ void put(const float (&sums)[kSums]) const {
#pragma unroll
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk)
            staging_.template put<kRowMajor>(sums + chunk * kSumsOfChunk, buffer_of(chunk));
    }

    // Asks for the residual of as many chunks, the first of which has the first buffer.
    __device__ void load_residual(int first, int count) const {
        each_own_buffer(0, count, [&](int buffer) {
            cute::tma_store_wait<0>();
            load_chunk(first + buffer, buffer);
        });
    }

    // Calls visit(buffer) in one lane for the buffer, of some, that belongs to the warp.
    template <class Visit>
    __device__ void each_own_buffer(int first, int count, Visit visit) const {
        if (is_first_lane() && warp() >= first && warp() < first + count) visit(warp());
    }

    __device__ char* buffer_of(int chunk) const { return buffers_[chunk % Traits::kChunks]; }

    // The place in the tile of the block row of a feature of the warpgroup.
    __device__ int row_of(int feature) const {
        return warpgroup_ * Traits::kWarpgroupFeatures + feature >> arguments_.row_shift;
    }

    // The feature of the output that is a feature of the warpgroup, negative if the tile has none there.
    __device__ int output_feature(int row, int feature) const {
        const int within_tile = warpgroup_ * Traits::kWarpgroupFeatures + feature;
        return row < 0 ? row : (row << arguments_.row_shift) + (within_tile & arguments_.row_block - 1);
    }

    // Adds the residual of kCount chunks, as soon as it is there, to their sums, or multiplies them by their
    // gate. A gate is activated where it lies; a warp does so for itself.
    template <bool kRowMajor, int kFirst, int kCount>
    __device__ void combine(float (&sums)[kSums]) {
#pragma unroll 1
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk) {
            const int buffer = chunk % Traits::kChunks;
            wait(arrived_[buffer], residual_parity_ >> buffer & 1);
            residual_parity_ ^= 1 << buffer;
            if (arguments_.gate_activation != Activation::none)
                staging_.template activate<kRowMajor>(buffers_[buffer], arguments_.gate_activation);
        }
        __syncwarp();
        with_join(arguments_, [&](auto joined) { join<kRowMajor, kFirst, kCount>(sums, joined); });
    }

    template <bool kRowMajor, int kFirst, int kCount, class Join>
    __device__ void join(float (&sums)[kSums], Join joined) const {
#pragma unroll
        for (int chunk = kFirst; chunk < kFirst + kCount; ++chunk) {
            staging_.template combine<kRowMajor>(sums + chunk * kSumsOfChunk, buffer_of(chunk), joined);
            // Else all are read at first, and there are no registers for more than three.
            if constexpr (kCount > 3) __syncwarp();
        }
    }

    // Calls visit(x, y, shared memory) for the box of each block row of a chunk in a buffer.
    template <class Visit>
    __device__ void each_box(int chunk, int buffer, Visit visit) const {
        const int token = token_ + chunk * Traits::kChunkTokens;
        const bool row_major = arguments_.output_layout == Layout::row_major;
#pragma unroll
        for (int i = 0; i < kMaxRows; ++i) {
            if (rows_[i] < 0) continue;
            const int feature = output_feature(rows_[i], i << arguments_.row_shift);
            char* const box = buffers_[buffer] + (i << arguments_.row_shift) * kLine;
            visit(row_major ? feature : token, row_major ? token : feature, box);
        }
    }

    // One thread. Of a grouped product only tokens of the group are stored.
    __device__ void store_chunk(int chunk, int buffer) const {
        const int stored = end_ - token_ - chunk * Traits::kChunkTokens;
        if (Traits::kGrouped && stored <= 0) return;
        each_box(chunk, buffer, [&](int x, int y, const char* box) {
            if constexpr (Traits::kGrouped) {
                const int some = min(stored, Traits::kChunkTokens);
                store_range_box(&arguments_.output, box, x, y, some);
            } else if (kFloat && arguments_.output_layout == Layout::row_major)
                cute::SM90_TMA_STORE_3D::copy(&arguments_.output, box, 0, y, column_of(x));
            else
                cute::SM90_TMA_STORE_2D::copy(&arguments_.output, box, x, y);
        });
        cute::tma_store_arrive();
    }

    // The part of a row-major float32 line that a feature lies in.
    __device__ int column_of(int feature) const { return feature / float_width(arguments_.row_width); }

    __device__ void load_chunk(int chunk, int buffer) const {
        const Barrier& arrived = arrived_[buffer];
        int boxes = 0;
        each_box(chunk, buffer, [&](int x, int y, char* box) {
            if (kFloat && arguments_.output_layout == Layout::row_major)
                load_box(&arguments_.residual, arrived, Multicast{1}, box, 0, y, column_of(x));
            else
                load_box(&arguments_.residual, arrived, Multicast{1}, box, x, y);
            ++boxes;
        });
        arrived.arrive_and_expect_tx(boxes * arguments_.row_width * kLine);
    }

    const DdsArguments& arguments_;
    Buffers& buffers_;
    const Arrived& arrived_;
    int warpgroup_;
    int thread_;
    int row_count_;  // block rows of the warpgroup
    Staging staging_;
    uint32_t residual_parity_ = 0;
    int token_ = 0;
    int end_ = 0;          // of the tokens of a group
    int rows_before_ = 0;  // block rows before those of its weight
    int first_row_;        // of the warpgroup in a tile
    int rows_[kMaxRows];   // block rows of the warpgroup, in their weight; negative: none
    Pair<Result> bias_;    // of the features of a thread's sums
    int next_rows_[kMaxRows] = {-1, -1, -1, -1};
    Result next_bias_[2];
    float2 scales_, next_scales_;  // of 8 bits, likewise
    float token_scales_[kTokens / 32];
    int next_warp_row_ = -1;  // that has the features of the warp; a CTA may have no tile
};

// Host side: how the results of a kernel leave it.
struct ResultShape {
    int warpgroup_features;
    int chunk_tokens;
    int bytes;  // of a result
    bool grouped;
};
template <class Traits>
constexpr ResultShape result_shape = {Traits::kWarpgroupFeatures, Traits::kChunkTokens,
                                      sizeof(typename Traits::Result), Traits::kGrouped};

// The output, or the residual or gate, which is laid out like it.
inline cudaError_t map_results(CUtensorMap& map, const ResultShape& shape, const Matrix& matrix,
                               const Problem& problem) {
    const int rows = std::min(problem.row_block(), shape.warpgroup_features);
    const int width = float_width(rows);
    if (matrix.layout == Layout::row_major && shape.bytes == 4)
        return encode(map, problem.result_dtype, matrix.data,
                      {{width, 1, width},
                       {problem.tokens, matrix.ld, shape.chunk_tokens},
                       {problem.features() / width, width, rows / width}});
    if (matrix.layout == Layout::row_major)
        return encode(map, problem.result_dtype, matrix.data,
                      {{problem.features(), 1, rows}, {problem.tokens, matrix.ld, shape.chunk_tokens}});
    return encode(map, problem.result_dtype, matrix.data,
                  {{problem.tokens, 1, shape.chunk_tokens}, {problem.features(), matrix.ld, rows}});
}

// All arguments that the epilogue reads.
inline cudaError_t describe_results(DdsArguments& arguments, const ResultShape& shape,
                                    const Problem& problem) {
    arguments.bias = problem.bias;
    arguments.row_block = problem.row_block();
    arguments.row_shift = log2_of_block(arguments.row_block);
    arguments.row_width = std::min(arguments.row_block, shape.warpgroup_features);
    arguments.warpgroup_rows = shape.warpgroup_features / arguments.row_width;
    arguments.output_layout = problem.output().layout;
    arguments.activation = problem.activation;
    arguments.gate_activation = problem.gate_activation;
    arguments.gated = problem.gated;
    arguments.has_residual = problem.residual.data != nullptr;
    if (arguments.has_residual)
        if (const cudaError_t error = map_results(arguments.residual, shape, problem.residual, problem))
            return error;
    if (shape.grouped) {
        arguments.group_rows = static_cast<int>(problem.features() / problem.row_block());
        return encode_ranges(arguments.output, problem.result_dtype, problem.output(), problem.features(),
                             arguments.row_width, shape.chunk_tokens);
    }
    return map_results(arguments.output, shape, problem.output(), problem);
}

}  // namespace ts::sm90
