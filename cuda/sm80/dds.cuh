// dds, the product of dense activations and the block-sparse weight, in both directions:
//   nt: y[t, f] = sum over k of x[t, k] W[f, k]      nn: x[t, f] = sum over k of y[t, k] W[k, f]
// with "features" f of the result and k summed over, whichever of out and in features they are.
//
// A CTA computes tiles of kTileTokens x kTileFeatures, one after another. A tile's features belong to
// several block rows (see common/plan.h); it walks the steps of k in which one of them has a block.
// All threads together fill a ring of stages with cp.async, some steps ahead and on into the next
// tile: all tokens' k of the step, and of W the blocks that exist. Each warp multiplies its part of
// the tile with mma.sync, skipping what does not exist. (Warps that only load would leave the others
// 168 registers instead of 255, too few to hide the latency of 64 x 64 sums' fragments.)
#pragma once

#include "common/epilogue.cuh"
#include "common/plan.h"
#include "common/problem.h"
#include "sm80/async.cuh"
#include "sm80/launch.cuh"
#include "sm80/math.cuh"
#include "sm80/tile.cuh"

namespace ts::sm80 {

struct DdsArguments {
    const void* input;
    uint32_t input_ld;  // in chunks of 16 bytes
    void* output;
    int64_t output_ld;
    const void* values;
    const void* bias;
    const PlanHeader* plan;
    Layout output_layout;
    Activation activation;
    int tokens;
    int row_tiles;
    int row_shift;  // log2 of the features of a block
    int k_shift;    // log2 of the k of a block
    int stages;
    int lookahead;  // steps whose copies are under way while one is multiplied
};

template <Op kOp, class Math_, int kTileTokens_, int kTileFeatures_, int kWarpTokens_, int kWarpFeatures_>
struct DdsTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    static constexpr bool kTransposed = kOp == Op::dds_nn;
    static constexpr int kTileTokens = kTileTokens_;
    static constexpr int kTileFeatures = kTileFeatures_;
    static constexpr int kWarpTokens = kWarpTokens_;
    static constexpr int kWarpFeatures = kWarpFeatures_;
    static constexpr int kFeatureWarps = kTileFeatures / kWarpFeatures;
    static constexpr int kTokenWarps = kTileTokens / kWarpTokens;
    static constexpr int kWarps = kTokenWarps * kFeatureWarps;
    static constexpr int kThreads = 32 * kWarps;
    // Registers allow a CTA of 8 warps on a multiprocessor, or two of 4.
    static constexpr int kResident = 8 / kWarps;
    static constexpr int kMTiles = kWarpTokens / 16;
    static constexpr int kNTiles = kWarpFeatures / 16;
    static constexpr int kStep = kLineBytes / sizeof(Element);
    static constexpr int kStepShift = sizeof(Element) == 2 ? 6 : 5;
    static constexpr int kChunk = kChunkBytes / sizeof(Element);
    static_assert(1 << kStepShift == kStep);
    static_assert(kTileFeatures == 128, "plans' masks hold 8 tiles of 16 features");

    using WeightTile = Tile<Element, kTileFeatures, !kTransposed>;
    template <bool kRowMajorInput>
    using InputTile = Tile<Element, kTileTokens, kRowMajorInput>;

    static constexpr int kInputBytes = InputTile<true>::kBytes > InputTile<false>::kBytes
                                           ? InputTile<true>::kBytes
                                           : InputTile<false>::kBytes;
    static constexpr int kStageBytes = kInputBytes + WeightTile::kBytes;

    // Sums of 8 tokens at a time pass through shared memory, so that each lane can store 8 neighbours.
    // The padding keeps the 4 lanes of a token and 4 tokens off each other's banks.
    static constexpr int kStagingLine = kWarpFeatures + 8;
    static constexpr int kStagingFloats = 8 * kStagingLine;
    static constexpr int kStagingBytes = kWarps * kStagingFloats * static_cast<int>(sizeof(float));

    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 8;
    static constexpr int shared_bytes(int stages) {
        return stages * kStageBytes + kStagingBytes + Ring::bytes(stages);
    }
};

// Tiles in the order CTAs take them: tokens in groups whose input stays in L2 while the rows of W pass.
class DdsSchedule {
  public:
    struct Work {
        int row_tile;
        int first_token;
    };

    __device__ DdsSchedule(int tile_tokens, int tokens, int row_tiles)
        : tile_tokens_(tile_tokens),
          token_tiles_((tokens + tile_tokens - 1) / tile_tokens),
          row_tiles_(row_tiles),
          width_(kGroupTokens / tile_tokens) {}

    __device__ int size() const { return token_tiles_ * row_tiles_; }
    __device__ Work at(int index) const {
        const int group = index / (width_ * row_tiles_), within = index % (width_ * row_tiles_);
        const int width = min(width_, token_tiles_ - group * width_);
        return {within / width, (group * width_ + within % width) * tile_tokens_};
    }

  private:
    static constexpr int kGroupTokens = 1024;

    int tile_tokens_, token_tiles_, row_tiles_, width_;
};

// A plan's arrays on the device.
struct DdsPlan {
    int groups, pieces;
    const int2* tiles;
    const int *rows, *masks, *k, *slots;

    __device__ explicit DdsPlan(const PlanHeader* header) : groups(header->groups), pieces(header->pieces) {
        const int* words = reinterpret_cast<const int*>(header);
        tiles = reinterpret_cast<const int2*>(words + header->tiles_at);
        rows = words + header->rows_at;
        masks = words + header->masks_at;
        k = words + header->k_at;
        slots = words + header->slots_at;
    }
};

// Walks the steps of all tiles of this CTA.
class DdsCursor {
  public:
    __device__ DdsCursor(const DdsSchedule& schedule, const DdsPlan& plan)
        : schedule_(schedule), plan_(plan), index_(blockIdx.x) {
        find_step();
    }
    __device__ bool done() const { return step_ >= last_; }
    __device__ int step() const { return step_; }
    __device__ int first_token() const { return first_token_; }
    __device__ void next() {
        if (++step_ < last_) return;
        index_ += gridDim.x;
        find_step();
    }

  private:
    // The first step from the tile `index_` on; tiles without blocks have none.
    __device__ void find_step() {
        step_ = last_ = 0;
        for (; index_ < schedule_.size(); index_ += gridDim.x) {
            const auto work = schedule_.at(index_);
            const int2 steps = __ldg(plan_.tiles + work.row_tile);
            step_ = steps.x;
            last_ = steps.x + steps.y;
            first_token_ = work.first_token;
            if (steps.y > 0) return;
        }
    }

    const DdsSchedule& schedule_;
    const DdsPlan& plan_;
    int index_, step_, last_, first_token_;
};

// One thread's share in filling the ring: its chunk of 16 bytes in a line is fixed, the lines are
// kLinesAtOnce apart. What does not depend on the step is computed once. Offsets are in chunks, so
// that 32 bits reach 64 GiB.
template <class Traits, bool kRowMajorInput>
class DdsLoader {
    using Element = typename Traits::Element;
    using InputTile = typename Traits::template InputTile<kRowMajorInput>;
    using WeightTile = typename Traits::WeightTile;
    static constexpr int kChunk = Traits::kChunk;
    static constexpr int kLinesAtOnce = Traits::kThreads / kChunksPerLine;
    static constexpr int kWeightParts = WeightTile::kLines / kLinesAtOnce;
    static constexpr int kPanels = WeightTile::kPanels;
    static constexpr int kStepParts = Traits::kStep / kLinesAtOnce;

  public:
    __device__ DdsLoader(const DdsArguments& arguments, const DdsSchedule& schedule, const DdsPlan& plan,
                         const Ring& ring, uint32_t stages)
        : arguments_(arguments),
          plan_(plan),
          ring_(ring),
          stages_(stages),
          cursor_(schedule, plan),
          line_(threadIdx.x / kChunksPerLine),
          chunk_(threadIdx.x % kChunksPerLine),
          piece_shift_(min(arguments.k_shift, Traits::kStepShift)) {
        const int row_mask = (1 << arguments.row_shift) - 1;
#pragma unroll
        for (int i = 0; i < kWeightParts; ++i) {
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const int line = line_ + i * kLinesAtOnce;
                const int feature =
                    Traits::kTransposed ? panel * WeightTile::kPanelExtent + chunk_ * kChunk : line;
                const int k = Traits::kTransposed ? line : chunk_ * kChunk;
                slot_index_[i][panel] = (k >> piece_shift_) * plan.groups + (feature >> arguments.row_shift);
                feature_offset_[i][panel] =
                    (feature & row_mask) * (Traits::kTransposed ? 1 : 1 << arguments.k_shift) / kChunk;
            }
        }
        if (!cursor_.done()) fetch();
    }

    // Starts the copies of the next step, if there is one, as soon as its stage is free.
    __device__ void load() {
        if (cursor_.done()) return;
        ring_.empty(position_.stage).wait(position_.parity ^ 1);
        const uint32_t stage = stages_ + position_.stage * Traits::kStageBytes;
        if constexpr (kRowMajorInput)
            copy_row_major(stage);
        else
            copy_feature_major(stage);
        copy_weight(stage + Traits::kInputBytes);
        ring_.full(position_.stage).arrive_after_copies();
        position_.advance(ring_.stages());
        cursor_.next();
        if (!cursor_.done()) fetch();
    }

  private:
    // Reads where the operands of the step lie; done one step ahead, to hide its latency.
    __device__ void fetch() {
        const int* k = plan_.k + cursor_.step() * plan_.pieces;
        const int* slots = plan_.slots + cursor_.step() * plan_.pieces * plan_.groups;
        if constexpr (kRowMajorInput || !Traits::kTransposed)
            chunk_k_ = __ldg(k + (chunk_ * kChunk >> piece_shift_));
        if constexpr (!kRowMajorInput || Traits::kTransposed) {
#pragma unroll
            for (int i = 0; i < kStepParts; ++i)
                line_k_[i] = __ldg(k + (line_ + i * kLinesAtOnce >> piece_shift_));
        }
#pragma unroll
        for (int i = 0; i < kWeightParts; ++i)
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel)
                slots_[i][panel] = __ldg(slots + slot_index_[i][panel]);
    }

    // Where this thread's chunk or line lies in its piece.
    __device__ int chunk_in_piece() const { return chunk_ * kChunk & ((1 << piece_shift_) - 1); }
    __device__ int line_in_piece(int i) const { return line_ + i * kLinesAtOnce & ((1 << piece_shift_) - 1); }

    // Lines beyond the last token repeat it: their results are not stored.
    __device__ void copy_row_major(uint32_t tile) const {
        const int token = cursor_.first_token() + line_, last = arguments_.tokens - 1;
        const char* source = address(arguments_.input, min(token, last), arguments_.input_ld) +
                             (chunk_k_ + chunk_in_piece()) * static_cast<int>(sizeof(Element));
        const uint32_t target = tile + InputTile::offset(line_, chunk_);
        const int left = max(last - token, 0);
#pragma unroll
        for (int i = 0; i < InputTile::kLines / kLinesAtOnce; ++i) {
            const uint32_t chunks = min(i * kLinesAtOnce, left) * kChunkBytes;
            copy_async_if(chunk_k_ >= 0, target + i * kLinesAtOnce * kLineBytes,
                          source + uint64_t{chunks} * arguments_.input_ld);
        }
    }

    __device__ void copy_feature_major(uint32_t tile) const {
#pragma unroll
        for (int i = 0; i < kStepParts; ++i) {
            const char* source =
                address(arguments_.input, line_k_[i] + line_in_piece(i), arguments_.input_ld);
#pragma unroll
            for (int panel = 0; panel < InputTile::kPanels; ++panel) {
                const int within = panel * InputTile::kPanelExtent + chunk_ * kChunk;
                if (InputTile::kPanelExtent > Traits::kTileTokens && within >= Traits::kTileTokens) continue;
                const int token = cursor_.first_token() + within;
                const int bytes =
                    min(max((arguments_.tokens - token) * static_cast<int>(sizeof(Element)), 0), kChunkBytes);
                const uint32_t target = tile + panel * InputTile::kPanelBytes +
                                        InputTile::offset(line_ + i * kLinesAtOnce, chunk_);
                copy_async_if(line_k_[i] >= 0 && bytes > 0, target,
                              source + token * static_cast<int64_t>(sizeof(Element)), bytes);
            }
        }
    }

    __device__ void copy_weight(uint32_t tile) const {
        const int k_mask = (1 << arguments_.k_shift) - 1;
        const uint32_t block_chunks = (1 << arguments_.row_shift + arguments_.k_shift) / kChunk;
        const uint32_t target = tile + WeightTile::offset(line_, chunk_);
#pragma unroll
        for (int i = 0; i < kWeightParts; ++i) {
            const int k_offset =
                Traits::kTransposed
                    ? ((line_k_[i] + line_in_piece(i) & k_mask) << arguments_.row_shift) / kChunk
                    : (chunk_k_ + chunk_in_piece() & k_mask) / kChunk;
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const uint32_t chunk = slots_[i][panel] * block_chunks + feature_offset_[i][panel] + k_offset;
                copy_async_if(slots_[i][panel] >= 0,
                              target + panel * WeightTile::kPanelBytes + i * kLinesAtOnce * kLineBytes,
                              static_cast<const char*>(arguments_.values) + uint64_t{chunk} * kChunkBytes);
            }
        }
    }

    __device__ static const char* address(const void* matrix, int line, uint32_t ld) {
        return static_cast<const char*>(matrix) + static_cast<uint64_t>(line) * ld * kChunkBytes;
    }

    const DdsArguments& arguments_;
    const DdsPlan& plan_;
    const Ring& ring_;
    uint32_t stages_;
    RingPosition position_;
    DdsCursor cursor_;
    int line_, chunk_;
    int piece_shift_;  // log2 of the k that one piece contributes to a step
    int slot_index_[kWeightParts][kPanels];
    int feature_offset_[kWeightParts][kPanels];
    // Of the next step, -1 where there is none:
    int chunk_k_;             // k of the piece this thread's chunk lies in, where k runs along lines
    int line_k_[kStepParts];  // k of the pieces this thread's lines lie in, where they run along k
    int slots_[kWeightParts][kPanels];
    const char* row_;  // of this thread's first line of the input
    int lines_left_;   // tokens after it
};

// Adds the bias, applies the activation and stores a warp's sums through its staging memory.
template <class Traits>
class DdsEpilogue {
    using Element = typename Traits::Element;
    using Sums = Accumulators<Traits::kMTiles, Traits::kNTiles>;
    static constexpr int kTokens = 8;      // staged at a time
    static constexpr int kNeighbours = 8;  // features or tokens that a lane stores

  public:
    __device__ DdsEpilogue(const DdsArguments& arguments, const int* rows, char* staging, int lane)
        : arguments_(arguments), rows_(rows), staging_(staging), lane_(lane) {}

    // `token` and `feature`: of the warp's first sum in the output and in the tile.
    __device__ void store(const Sums& sums, int token, int feature) const {
        if (arguments_.output_layout == Layout::feature_major)
            store_feature_major(sums, token, feature);
        else if (arguments_.activation == Activation::none)
            store_plain(sums, token, feature);
        else
            store_activated(sums, token, feature);
    }

  private:
    static constexpr int kLanesOfToken = Traits::kWarpFeatures / kNeighbours;
    static constexpr int kTokensAtOnce = 32 / kLanesOfToken;

    // Row-major without activation: rounded before it is staged, and all unrolled.
    __device__ void store_plain(const Sums& sums, int token, int first_feature) const {
        constexpr int kLine = Traits::kWarpFeatures * static_cast<int>(sizeof(Element)) + kChunkBytes;
        const int column = lane_ % kLanesOfToken * kNeighbours, line = lane_ / kLanesOfToken;
        const int64_t feature = output_feature(first_feature + column);
        Element* target = output() + (token + line) * arguments_.output_ld + feature;
        char* const staged = staging_ + lane_ / 4 * kLine + lane_ % 4 * 2 * static_cast<int>(sizeof(Element));
        float2 bias[2 * Traits::kNTiles];
#pragma unroll
        for (int n = 0; n < 2 * Traits::kNTiles; ++n) {
            const int64_t at = output_feature(first_feature + 8 * n + lane_ % 4 * 2);
            bias[n] = make_float2(bias_at(at), bias_at(at < 0 ? at : at + 1));
        }
#pragma unroll
        for (int part = 0; part < 2 * Traits::kMTiles; ++part) {
#pragma unroll
            for (int n = 0; n < 2 * Traits::kNTiles; ++n) {
                const float* sum = sums[part / 2][n / 2][n % 2] + part % 2 * 2;
                *reinterpret_cast<Pair<Element>*>(staged + 8 * n * sizeof(Element)) = {
                    from_float<Element>(sum[0] + bias[n].x), from_float<Element>(sum[1] + bias[n].y)};
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kTokens; i += kTokensAtOnce) {
                if (feature >= 0 && line + i < kTokens &&
                    token + part * kTokens + line + i < arguments_.tokens)
                    copy_neighbours(target + i * arguments_.output_ld,
                                    staging_ + (line + i) * kLine + column * sizeof(Element));
            }
            __syncwarp();
            target += kTokens * arguments_.output_ld;
        }
    }

    __device__ static void copy_neighbours(Element* target, const char* source) {
        constexpr int kPieces = kNeighbours * sizeof(Element) / sizeof(uint4);
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
    }

    // Row-major: a lane takes 8 features of one token at a time, the same features for every token.
    __device__ void store_activated(const Sums& sums, int token, int first_feature) const {
        const int column = lane_ % kLanesOfToken * kNeighbours;
        const int64_t feature = output_feature(first_feature + column);
        float bias[kNeighbours];
#pragma unroll
        for (int j = 0; j < kNeighbours; ++j) bias[j] = bias_at(feature < 0 ? feature : feature + j);
#pragma unroll 1
        for (int part = 0; part < 2 * Traits::kMTiles; ++part) {
            stage(sums, part);
            for (int line = lane_ / kLanesOfToken; line < kTokens; line += kTokensAtOnce) {
                const int64_t at = token + part * kTokens + line;
                if (at >= arguments_.tokens || feature < 0) continue;
                Neighbours<Element> results(floats() + line * Traits::kStagingLine + column, 1);
                results.finish(bias, arguments_.activation);
                results.store(output() + at * arguments_.output_ld + feature);
            }
            __syncwarp();
        }
    }

    // A lane takes 8 tokens of one feature at a time.
    __device__ void store_feature_major(const Sums& sums, int token, int first_feature) const {
#pragma unroll 1
        for (int part = 0; part < 2 * Traits::kMTiles; ++part) {
            stage(sums, part);
            const int first = token + part * kTokens, valid = arguments_.tokens - first;
            for (int column = lane_; column < Traits::kWarpFeatures; column += 32) {
                const int64_t feature = output_feature(first_feature + column);
                if (feature < 0 || valid <= 0) continue;
                const float one = bias_at(feature);
                const float bias[kNeighbours] = {one, one, one, one, one, one, one, one};
                Neighbours<Element> results(floats() + column, Traits::kStagingLine);
                results.finish(bias, arguments_.activation);
                Element* target = output() + feature * arguments_.output_ld + first;
                if (valid >= kTokens)
                    results.store(target);
                else
                    results.store_first(target, valid);
            }
            __syncwarp();
        }
    }

    // Puts the sums of 8 tokens into shared memory. Registers can only be chosen by branches.
    __device__ void stage(const Sums& sums, int part) const {
        float* target = floats() + lane_ / 4 * Traits::kStagingLine + lane_ % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * Traits::kMTiles; ++i) {
            if (part != i) continue;
#pragma unroll
            for (int n = 0; n < 2 * Traits::kNTiles; ++n) {
                const float* sum = sums[i / 2][n / 2][n % 2] + i % 2 * 2;
                *reinterpret_cast<float2*>(target + 8 * n) = make_float2(sum[0], sum[1]);
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
        const auto* bias = static_cast<const Element*>(arguments_.bias);
        return bias == nullptr || feature < 0 ? 0.0f : to_float(bias[feature]);
    }

    __device__ Element* output() const { return static_cast<Element*>(arguments_.output); }
    __device__ float* floats() const { return reinterpret_cast<float*>(staging_); }

    const DdsArguments& arguments_;
    const int* rows_;
    char* staging_;
    int lane_;
};

template <class Traits, bool kRowMajorInput>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kResident)
    dds_kernel(const __grid_constant__ DdsArguments arguments) {
    constexpr int kMTiles = Traits::kMTiles, kNTiles = Traits::kNTiles;
    using Element = typename Traits::Element;
    using InputTile = typename Traits::template InputTile<kRowMajorInput>;
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    char* const staging = shared + arguments.stages * Traits::kStageBytes;
    const Ring ring(shared_address(staging + Traits::kStagingBytes), arguments.stages);
    if (threadIdx.x == 0) ring.init(Traits::kThreads, Traits::kWarps);
    __syncthreads();

    const DdsPlan plan(arguments.plan);
    const DdsSchedule schedule(Traits::kTileTokens, arguments.tokens, arguments.row_tiles);
    DdsLoader<Traits, kRowMajorInput> loader(arguments, schedule, plan, ring, stages);
    for (int ahead = 0; ahead < arguments.lookahead; ++ahead) loader.load();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The warps of one scheduler (every fourth) differ in their features, of which some may be absent.
    const int warp_token = warp % Traits::kTokenWarps * Traits::kWarpTokens;
    const int warp_feature = warp / Traits::kTokenWarps * Traits::kWarpFeatures;
    const Reader<InputTile, Element, Side::a, kMTiles> read_input(warp_token, lane);
    const Reader<typename Traits::WeightTile, Element, Side::b, kNTiles> read_weight(warp_feature, lane);
    RingPosition position;
    for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
        const auto work = schedule.at(index);
        const int2 steps = __ldg(plan.tiles + work.row_tile);
        Accumulators<kMTiles, kNTiles> sums = {};
        for (int step = steps.x; step < steps.x + steps.y; ++step) {
            const uint32_t mask = __ldg(plan.masks + step);
            loader.load();
            ring.full(position.stage).wait(position.parity);
            const uint32_t stage = stages + position.stage * Traits::kStageBytes;
            multiply_step<typename Traits::Math>(sums, read_input, stage, read_weight,
                                                 stage + Traits::kInputBytes,
                                                 mask >> warp_feature / 4 & kAllPresent<kNTiles>);
            __syncwarp();
            if (lane == 0) ring.empty(position.stage).arrive();
            position.advance(arguments.stages);
        }
        const DdsEpilogue<Traits> epilogue(arguments, plan.rows + work.row_tile * plan.groups,
                                           staging + warp * Traits::kStagingFloats * sizeof(float), lane);
        epilogue.store(sums, work.first_token + warp_token, warp_feature);
    }
}

// Host side: one row of the registry.
template <Op kOp, class Math, int kTileTokens, int kTileFeatures, int kWarpTokens, int kWarpFeatures>
struct Dds {
    using Traits = DdsTraits<kOp, Math, kTileTokens, kTileFeatures, kWarpTokens, kWarpFeatures>;

    struct Occupancy {
        int resident;  // CTAs on a multiprocessor
        int stages;
    };

    // As many CTAs as registers allow, if shared memory holds enough stages of each.
    static Occupancy occupancy(const Device& device) {
        constexpr int kReservedBytes = 1024;  // of each CTA, by the system
        for (int resident = Traits::kResident; resident > 0; --resident) {
            const int bytes = (device.shared_memory + kReservedBytes) / resident - kReservedBytes;
            int stages = Traits::kMaxStages;
            while (stages > 0 && Traits::shared_bytes(stages) > bytes) --stages;
            if (stages >= Traits::kMinStages) return {resident, stages};
        }
        return {0, 0};
    }

    static const char* refuses(const Problem&, const Device& device) {
        return occupancy(device).resident == 0 ? "the device has too little shared memory" : nullptr;
    }

    static size_t workspace_size(const Problem&, const Device&) { return 0; }

    static int32_t launch(const Problem& problem, const Device& device, void*, void* stream) {
        const Pattern& pattern = problem.pattern;
        const bool forward = kOp == Op::dds_nt;
        const Matrix& input = forward ? problem.x : problem.y;
        const Matrix& output = forward ? problem.y : problem.x;
        const int row_block = forward ? pattern.block_rows : pattern.block_cols;
        const int k_block = forward ? pattern.block_cols : pattern.block_rows;
        const int64_t block_rows = (forward ? pattern.out_features : pattern.in_features) / row_block;
        const int groups = kTileFeatures / row_block;
        const auto row_tiles = static_cast<int>((block_rows + groups - 1) / groups);
        const int64_t tiles = row_tiles * ((problem.tokens + kTileTokens - 1) / kTileTokens);
        if (tiles == 0) return cudaSuccess;
        const Occupancy fit = occupancy(device);
        const DdsArguments arguments{input.data,
                                     static_cast<uint32_t>(input.ld / Traits::kChunk),
                                     output.data,
                                     output.ld,
                                     problem.values,
                                     problem.bias,
                                     static_cast<const PlanHeader*>(problem.plan),
                                     output.layout,
                                     problem.activation,
                                     static_cast<int>(problem.tokens),
                                     row_tiles,
                                     log2_of_block(row_block),
                                     log2_of_block(k_block),
                                     fit.stages,
                                     lookahead(fit.stages)};
        const auto start = input.layout == Layout::row_major
                               ? ts::sm80::launch<dds_kernel<Traits, true>, DdsArguments>
                               : ts::sm80::launch<dds_kernel<Traits, false>, DdsArguments>;
        const int most = fit.resident * device.multiprocessors;
        const int bytes = Traits::shared_bytes(fit.stages);
        return start(arguments, static_cast<int>(tiles < most ? tiles : most), Traits::kThreads, bytes, bytes,
                     stream);
    }

    static constexpr Kernel row(const char* name) {
        return {name,
                DeviceType::cuda,
                80,
                1u << static_cast<int>(kOp),
                1u << static_cast<int>(Math::kDType),
                Math::kPrecision,
                {kTileFeatures, Traits::kStep},
                kTileTokens,
                kTileFeatures,
                refuses,
                workspace_size,
                launch};
    }
};

}  // namespace ts::sm80

#define TS_INSTANCE(name, kernel, op, math, tile_tokens, tile_features, warp_tokens, warp_features) \
    namespace ts::sm80 {                                                                            \
    const Kernel& name() {                                                                          \
        static constexpr Kernel kRow =                                                              \
            Dds<Op::op, math, tile_tokens, tile_features, warp_tokens, warp_features>::row(#name);  \
        return kRow;                                                                                \
    }                                                                                               \
    }
