// dds, the product of dense activations and the block-sparse weight, in both directions:
//   nt: y[t, f] = sum over k of x[t, k] W[f, k]      nn: x[t, f] = sum over k of y[t, k] W[k, f]
// with "features" f of the result and k summed over, whichever of out and in features they are.
//
// A CTA computes tiles of kTileTokens x kTileFeatures, one after another. A tile's features belong to
// several block rows (see common/plan.h); it walks the steps of k in which one of them has a block.
// Four producer warps fill a ring of stages with cp.async: all tokens' k of the step, and of W the
// blocks that exist. Eight or fewer consumer warps multiply with mma.sync, each its part of the tile,
// skipping what does not exist. Each warp passes the ring's barriers at its own pace, so that rows
// with different numbers of blocks do not wait for each other at every step.
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
    int64_t input_ld;
    void* output;
    int64_t output_ld;
    const void* values;
    const void* bias;
    const PlanHeader* plan;
    Layout output_layout;
    Activation activation;
    int tokens;
    int row_tiles;
    int row_block;  // features of a block
    int k_block;    // k of a block
    int stages;
};

template <Op kOp, class Math_, int kTileTokens_, int kTileFeatures_, int kWarpTokens_, int kWarpFeatures_>
struct DdsTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    static constexpr int kTileTokens = kTileTokens_;
    static constexpr int kTileFeatures = kTileFeatures_;
    static constexpr int kWarpTokens = kWarpTokens_;
    static constexpr int kWarpFeatures = kWarpFeatures_;
    static constexpr bool kTransposed = kOp == Op::dds_nn;
    static constexpr int kProducerThreads = 128;
    static constexpr int kTokenWarps = kTileTokens / kWarpTokens;
    static constexpr int kFeatureWarps = kTileFeatures / kWarpFeatures;
    static constexpr int kConsumerWarps = kTokenWarps * kFeatureWarps;
    static constexpr int kThreads = 32 * kConsumerWarps + kProducerThreads;
    static constexpr int kMTiles = kWarpTokens / 16;
    static constexpr int kNTiles = kWarpFeatures / 16;
    static constexpr int kStep = kLineBytes / sizeof(Element);
    static constexpr int kChunk = kChunkBytes / sizeof(Element);

    using WeightTile = Tile<Element, kTileFeatures, !kTransposed>;
    template <bool kRowMajorInput>
    using InputTile = Tile<Element, kTileTokens, kRowMajorInput>;

    static constexpr int kInputBytes = InputTile<true>::kBytes > InputTile<false>::kBytes
                                           ? InputTile<true>::kBytes
                                           : InputTile<false>::kBytes;
    static constexpr int kStageBytes = kInputBytes + WeightTile::kBytes;
    static_assert(kTileFeatures == 128, "plans' masks hold 8 tiles of 16 features");

    // Sums of 8 tokens at a time pass through shared memory, so that each lane can store 8 neighbours.
    // The padding keeps the 4 lanes of a token and 4 tokens off each other's banks.
    static constexpr int kStagingLine = kWarpFeatures + 8;
    static constexpr int kStagingFloats = 8 * kStagingLine;
    static constexpr int kFixedBytes = kConsumerWarps * kStagingFloats * static_cast<int>(sizeof(float));
    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 8;
    static constexpr int shared_bytes(int stages) {
        return kFixedBytes + stages * kStageBytes + Ring::bytes(stages);
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

// Fills the ring. A thread's chunk of 16 bytes in a line is fixed; it copies every 16th line.
template <class Traits, bool kRowMajorInput>
class DdsProducer {
    using Element = typename Traits::Element;
    using InputTile = typename Traits::template InputTile<kRowMajorInput>;
    using WeightTile = typename Traits::WeightTile;
    static constexpr int kLinesAtOnce = Traits::kProducerThreads / kChunksPerLine;
    static constexpr int kStep = Traits::kStep;
    static constexpr int kChunk = Traits::kChunk;
    static_assert(kLinesAtOnce == 16, "blocks begin at multiples of 16: the lines copied at once share one");
    static constexpr int kParts = WeightTile::kLines / kLinesAtOnce * WeightTile::kPanels;
    static constexpr int kPiecesMost = kStep / kLinesAtOnce;

  public:
    __device__ DdsProducer(const DdsArguments& arguments, const DdsPlan& plan, int thread)
        : arguments_(arguments),
          plan_(plan),
          line_(thread / kChunksPerLine),
          chunk_(thread % kChunksPerLine),
          piece_width_(kStep / plan.pieces) {}

    // Reads where the operands of a step lie; done one step ahead, to hide its latency.
    __device__ void fetch(int step) {
        const int* k = plan_.k + step * plan_.pieces;
        const int* slots = plan_.slots + step * plan_.pieces * plan_.groups;
        if constexpr (kRowMajorInput || !Traits::kTransposed)
            own_k_ = __ldg(k + chunk_ * kChunk / piece_width_);
#pragma unroll
        for (int i = 0; i < kPiecesMost; ++i)
            if constexpr (!kRowMajorInput || Traits::kTransposed) k_[i] = __ldg(k + 16 * i / piece_width_);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const int piece =
                (Traits::kTransposed ? 16 * (i / WeightTile::kPanels) : chunk_ * kChunk) / piece_width_;
            const int feature = Traits::kTransposed ? panel_feature(i % WeightTile::kPanels) : 16 * i;
            slots_[i] = __ldg(slots + piece * plan_.groups + feature / arguments_.row_block);
        }
    }

    __device__ void copy_input(uint32_t tile, int first_token) const {
        if constexpr (kRowMajorInput) {
            if (own_k_ < 0) return;
            const int k = own_k_ + chunk_ * kChunk % piece_width_;
            const int64_t ld = arguments_.input_ld;
            const Element* source = input() + (first_token + line_) * ld + k;
            const int valid = arguments_.tokens - first_token;
#pragma unroll
            for (int i = 0; i < InputTile::kLines / kLinesAtOnce; ++i) {
                const int line = line_ + i * kLinesAtOnce;
                const bool inside = line < valid;
                copy_async(tile + InputTile::offset(line, chunk_), inside ? source : input(),
                           inside ? kChunkBytes : 0);
                source += kLinesAtOnce * ld;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kStep / kLinesAtOnce; ++i) {
                const int line = line_ + i * kLinesAtOnce, k = k_[i];
                if (k < 0) continue;
                const Element* source =
                    input() + (k + line % piece_width_) * arguments_.input_ld + first_token;
                copy_tokens(tile, line, source, first_token);
            }
        }
    }

    __device__ void copy_weight(uint32_t tile) const {
        const int row_mask = arguments_.row_block - 1, k_mask = arguments_.k_block - 1;
#pragma unroll
        for (int panel = 0; panel < WeightTile::kPanels; ++panel) {
#pragma unroll
            for (int i = 0; i < WeightTile::kLines / kLinesAtOnce; ++i) {
                const int line = line_ + i * kLinesAtOnce, part = i;
                const int slot = slots_[part * WeightTile::kPanels + panel];
                if (slot < 0) continue;
                int64_t within;
                if constexpr (Traits::kTransposed) {
                    const int k = (k_[part] & k_mask) + line % piece_width_;
                    within = k * arguments_.row_block + (panel_feature(panel) & row_mask);
                } else {
                    const int k = (own_k_ & k_mask) + chunk_ * kChunk % piece_width_;
                    within = (line & row_mask) * arguments_.k_block + k;
                }
                const int64_t block = int64_t{slot} * arguments_.row_block * arguments_.k_block;
                copy_async(tile + panel * WeightTile::kPanelBytes + WeightTile::offset(line, chunk_),
                           static_cast<const Element*>(arguments_.values) + block + within);
            }
        }
    }

  private:
    __device__ const Element* input() const { return static_cast<const Element*>(arguments_.input); }
    __device__ int panel_feature(int panel) const {
        return panel * WeightTile::kPanelExtent + chunk_ * kChunk;
    }

    __device__ void copy_tokens(uint32_t tile, int line, const Element* source, int first_token) const {
#pragma unroll
        for (int panel = 0; panel < InputTile::kPanels; ++panel) {
            const int token = panel * InputTile::kPanelExtent + chunk_ * kChunk;
            if (token >= Traits::kTileTokens) continue;
            const int valid = min(max(arguments_.tokens - first_token - token, 0), kChunk);
            copy_async(tile + panel * InputTile::kPanelBytes + InputTile::offset(line, chunk_),
                       valid > 0 ? source + token : input(), valid * static_cast<int>(sizeof(Element)));
        }
    }

    const DdsArguments& arguments_;
    const DdsPlan& plan_;
    int line_, chunk_, piece_width_;
    int own_k_;           // of the piece this thread's chunk lies in, where k runs along a line
    int k_[kPiecesMost];  // of each 16 lines, where lines run along k
    int slots_[kParts];
};

// Adds the bias, applies the activation and stores a warp's sums through its staging memory.
template <class Traits>
class DdsEpilogue {
    using Element = typename Traits::Element;
    using Sums = Accumulators<Traits::kMTiles, Traits::kNTiles>;
    static constexpr int kNeighbours = 8;

  public:
    __device__ DdsEpilogue(const DdsArguments& arguments, const int* rows, float* staging, int lane)
        : arguments_(arguments), rows_(rows), staging_(staging), lane_(lane) {}

    // `token` and `feature`: of the warp's first sum in the output and in the tile.
    __device__ void store(const Sums& sums, int token, int feature) const {
#pragma unroll 1
        for (int part = 0; part < 2 * Traits::kMTiles; ++part) {
            const int first = token + 8 * part;
            if (first >= arguments_.tokens) return;
            stage(sums, part);
            __syncwarp();
            if (arguments_.output_layout == Layout::row_major)
                store_row_major(first, feature);
            else
                store_feature_major(first, feature);
            __syncwarp();
        }
    }

  private:
    // The choice among registers must be made by branches.
    __device__ void stage(const Sums& sums, int part) const {
        float* target = staging_ + lane_ / 4 * Traits::kStagingLine + lane_ % 4 * 2;
#pragma unroll
        for (int m = 0; m < Traits::kMTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (part != 2 * m + i) continue;
#pragma unroll
                for (int n = 0; n < 2 * Traits::kNTiles; ++n) {
                    const float (&sum)[4] = sums[m][n / 2][n % 2];
                    *reinterpret_cast<float2*>(target + 8 * n) = make_float2(sum[2 * i], sum[2 * i + 1]);
                }
            }
        }
    }

    // The output feature of one in the tile, or -1 beyond the matrix.
    __device__ int64_t output_feature(int feature) const {
        const int row = __ldg(rows_ + feature / arguments_.row_block);
        return row < 0 ? -1 : int64_t{row} * arguments_.row_block + (feature & (arguments_.row_block - 1));
    }

    __device__ float finish(float sum, int64_t feature) const {
        const auto* bias = static_cast<const Element*>(arguments_.bias);
        if (bias != nullptr) sum += to_float(bias[feature]);
        return activate(sum, arguments_.activation);
    }

    // A lane takes 8 features of one token at a time.
    __device__ void store_row_major(int token, int first_feature) const {
        constexpr int kGroups = Traits::kWarpFeatures / kNeighbours;
#pragma unroll 1
        for (int i = lane_; i < 8 * kGroups; i += 32) {
            const int line = i / kGroups, column = i % kGroups * kNeighbours;
            const int64_t feature = output_feature(first_feature + column);
            if (feature < 0 || token + line >= arguments_.tokens) continue;
            Neighbours<Element> results;
#pragma unroll
            for (int j = 0; j < kNeighbours; ++j)
                results.set(j, finish(staging_[line * Traits::kStagingLine + column + j], feature + j));
            results.store(output() + (token + line) * arguments_.output_ld + feature);
        }
    }

    // A lane takes 8 tokens of one feature at a time.
    __device__ void store_feature_major(int token, int first_feature) const {
        const int valid = arguments_.tokens - token;
#pragma unroll 1
        for (int column = lane_; column < Traits::kWarpFeatures; column += 32) {
            const int64_t feature = output_feature(first_feature + column);
            if (feature < 0) continue;
            Neighbours<Element> results;
#pragma unroll
            for (int j = 0; j < kNeighbours; ++j)
                results.set(j, finish(staging_[j * Traits::kStagingLine + column], feature));
            Element* target = output() + feature * arguments_.output_ld + token;
            if (valid >= kNeighbours)
                results.store(target);
            else
                results.store_first(target, valid);
        }
    }

    __device__ Element* output() const { return static_cast<Element*>(arguments_.output); }

    const DdsArguments& arguments_;
    const int* rows_;
    float* staging_;
    int lane_;
};

template <class Traits, bool kRowMajorInput>
__device__ inline void dds_produce(const DdsArguments& arguments, const Ring& ring, uint32_t stages,
                                   int thread) {
    const DdsPlan plan(arguments.plan);
    const DdsSchedule schedule(Traits::kTileTokens, arguments.tokens, arguments.row_tiles);
    DdsProducer<Traits, kRowMajorInput> producer(arguments, plan, thread);
    RingPosition position;
    for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
        const auto work = schedule.at(index);
        const int2 steps = __ldg(plan.tiles + work.row_tile);
        if (steps.y > 0) producer.fetch(steps.x);
        for (int step = steps.x; step < steps.x + steps.y; ++step) {
            ring.empty(position.stage).wait(position.parity ^ 1);
            const uint32_t stage = stages + position.stage * Traits::kStageBytes;
            producer.copy_input(stage, work.first_token);
            producer.copy_weight(stage + Traits::kInputBytes);
            ring.full(position.stage).arrive_after_copies();
            if (step + 1 < steps.x + steps.y) producer.fetch(step + 1);
            position.advance(ring.stages());
        }
    }
}

template <class Traits, bool kRowMajorInput>
__device__ inline void dds_consume(const DdsArguments& arguments, const Ring& ring, uint32_t stages,
                                   float* staging, int warp, int lane) {
    constexpr int kMTiles = Traits::kMTiles, kNTiles = Traits::kNTiles;
    using Element = typename Traits::Element;
    const DdsPlan plan(arguments.plan);
    const DdsSchedule schedule(Traits::kTileTokens, arguments.tokens, arguments.row_tiles);
    const int warp_token = warp / Traits::kFeatureWarps * Traits::kWarpTokens;
    const int warp_feature = warp % Traits::kFeatureWarps * Traits::kWarpFeatures;
    const Reader<typename Traits::template InputTile<kRowMajorInput>, Element, Side::a> read_input(warp_token,
                                                                                                   lane);
    const Reader<typename Traits::WeightTile, Element, Side::b> read_weight(warp_feature, lane);
    RingPosition position;
    for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
        const auto work = schedule.at(index);
        const int2 steps = __ldg(plan.tiles + work.row_tile);
        const int* mask = plan.masks + steps.x;
        const int* const last = mask + steps.y;
        Accumulators<kMTiles, kNTiles> sums = {};
        uint32_t next = mask < last ? __ldg(mask) : 0;
        while (mask < last) {
            const uint32_t present = next >> warp_feature / 4 & kAllPresent<kNTiles>;
            if (++mask < last) next = __ldg(mask);
            ring.full(position.stage).wait(position.parity);
            const uint32_t stage = stages + position.stage * Traits::kStageBytes;
            multiply_step<typename Traits::Math>(sums, read_input, stage, read_weight,
                                                 stage + Traits::kInputBytes, present);
            __syncwarp();
            if (lane == 0) ring.empty(position.stage).arrive();
            position.advance(ring.stages());
        }
        const DdsEpilogue<Traits> epilogue(arguments, plan.rows + work.row_tile * plan.groups,
                                           staging + warp * Traits::kStagingFloats, lane);
        epilogue.store(sums, work.first_token + warp_token, warp_feature);
    }
}

template <class Traits, bool kRowMajorInput>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    dds_kernel(const __grid_constant__ DdsArguments arguments) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    char* fixed = shared + arguments.stages * Traits::kStageBytes;
    const Ring ring(shared_address(fixed + Traits::kFixedBytes), arguments.stages);
    if (threadIdx.x == 0) ring.init(Traits::kProducerThreads, Traits::kConsumerWarps);
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp < Traits::kConsumerWarps) {
        dds_consume<Traits, kRowMajorInput>(arguments, ring, stages, reinterpret_cast<float*>(fixed), warp,
                                            threadIdx.x % 32);
    } else {
        dds_produce<Traits, kRowMajorInput>(arguments, ring, stages,
                                            threadIdx.x - 32 * Traits::kConsumerWarps);
    }
}

// Host side: one row of the registry.
template <Op kOp, class Math, int kTileTokens, int kTileFeatures, int kWarpTokens, int kWarpFeatures>
struct Dds {
    using Traits = DdsTraits<kOp, Math, kTileTokens, kTileFeatures, kWarpTokens, kWarpFeatures>;

    static int stages(const Device& device) {
        int stages = Traits::kMaxStages;
        while (stages > 0 && Traits::shared_bytes(stages) > device.shared_memory) --stages;
        return stages;
    }

    static const char* refuses(const Problem&, const Device& device) {
        return stages(device) < Traits::kMinStages ? "the device has too little shared memory" : nullptr;
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
        const int count = stages(device);
        const DdsArguments arguments{input.data,
                                     input.ld,
                                     output.data,
                                     output.ld,
                                     problem.values,
                                     problem.bias,
                                     static_cast<const PlanHeader*>(problem.plan),
                                     output.layout,
                                     problem.activation,
                                     static_cast<int>(problem.tokens),
                                     row_tiles,
                                     row_block,
                                     k_block,
                                     count};
        const auto start = input.layout == Layout::row_major
                               ? ts::sm80::launch<dds_kernel<Traits, true>, DdsArguments>
                               : ts::sm80::launch<dds_kernel<Traits, false>, DdsArguments>;
        const int blocks = static_cast<int>(tiles < device.multiprocessors ? tiles : device.multiprocessors);
        const int bytes = Traits::shared_bytes(count);
        return start(arguments, blocks, Traits::kThreads, bytes, bytes, stream);
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
