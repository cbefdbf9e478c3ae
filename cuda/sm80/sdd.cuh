// sdd, the gradient of the block-sparse weight: W[n, k] = sum over tokens t of y[t, n] x[t, k], for the
// kept blocks only, written (or added) to their slots in values.
//
// A CTA computes macro-tiles of kBlockRows x kTileColumns, one after another: neighbouring blocks of
// one block row (see common/plan.h), for which y is loaded once and the columns of x are gathered.
// Tokens are walked in steps of 128 bytes. Where there are too few tiles for the GPU, tokens are split
// over several CTAs; their partial sums go to the workspace, and a second kernel adds them in a fixed order.
#pragma once

#include "common/epilogue.cuh"
#include "common/plan.h"
#include "common/problem.h"
#include "sm80/async.cuh"
#include "sm80/launch.cuh"
#include "sm80/math.cuh"
#include "sm80/tile.cuh"

namespace ts::sm80 {

struct SddArguments {
    const void* y;
    int64_t y_ld;
    const void* x;
    int64_t x_ld;
    void* values;
    float* partial;  // [splits, nnz, bn, bk] if there are several splits
    const PlanHeader* plan;
    int64_t value_count;  // nnz * bn * bk
    int tokens;
    int splits;
    int split_tokens;  // a multiple of a step
    int block_cols;
    int stages;
    bool accumulate;
};

template <class Math_, int kBlockRows_, int kTileColumns_, int kWarpRows, int kWarpColumns_>
struct SddTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    static constexpr int kBlockRows = kBlockRows_;
    static constexpr int kTileColumns = kTileColumns_;
    static constexpr int kWarpColumns = kWarpColumns_;
    static constexpr int kProducerThreads = 128;
    static constexpr int kColumnWarps = kTileColumns / kWarpColumns;
    static constexpr int kConsumerWarps = kBlockRows / kWarpRows * kColumnWarps;
    static constexpr int kThreads = 32 * kConsumerWarps + kProducerThreads;
    static constexpr int kMTiles = kWarpRows / 16;
    static constexpr int kNTiles = kWarpColumns / 16;
    static constexpr int kStep = kLineBytes / sizeof(Element);
    static constexpr int kChunk = kChunkBytes / sizeof(Element);

    // In a row-major operand the tokens, which are summed over, are not contiguous.
    template <bool kRowMajor>
    using YTile = Tile<Element, kBlockRows, !kRowMajor>;
    template <bool kRowMajor>
    using XTile = Tile<Element, kTileColumns, !kRowMajor>;

    template <bool kRowMajorY, bool kRowMajorX>
    static constexpr int kStageBytes = YTile<kRowMajorY>::kBytes + XTile<kRowMajorX>::kBytes;

    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 6;
    template <bool kRowMajorY, bool kRowMajorX>
    static constexpr int shared_bytes(int stages) {
        return stages * kStageBytes<kRowMajorY, kRowMajorX> + Ring::bytes(stages);
    }
};

struct SddPlan {
    int tile_count, pieces;
    const int2* tiles;
    const int *k, *slots;

    __device__ explicit SddPlan(const PlanHeader* header)
        : tile_count(header->tiles), pieces(header->pieces) {
        const int* words = reinterpret_cast<const int*>(header);
        tiles = reinterpret_cast<const int2*>(words + header->tiles_at);
        k = words + header->k_at;
        slots = words + header->slots_at;
    }
};

// A tile and the tokens to sum over. All tiles of one split come before the next.
struct SddWork {
    int tile;
    int split;
    int first_token;
    int last_token;

    __device__ SddWork(const SddArguments& arguments, const SddPlan& plan, int index)
        : tile(index % plan.tile_count), split(index / plan.tile_count) {
        first_token = min(split * arguments.split_tokens, arguments.tokens);
        last_token = min(first_token + arguments.split_tokens, arguments.tokens);
    }
};

// Fills the ring. A thread's chunk of 16 bytes in a line is fixed; it copies every 16th line.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddProducer {
    using Element = typename Traits::Element;
    using YTile = typename Traits::template YTile<kRowMajorY>;
    using XTile = typename Traits::template XTile<kRowMajorX>;
    static constexpr int kLinesAtOnce = Traits::kProducerThreads / kChunksPerLine;
    static constexpr int kChunk = Traits::kChunk;

  public:
    __device__ SddProducer(const SddArguments& arguments, int thread)
        : arguments_(arguments), line_(thread / kChunksPerLine), chunk_(thread % kChunksPerLine) {}

    // Reads where a tile's blocks lie.
    __device__ void begin(const SddPlan& plan, const SddWork& work) {
        row_ = __ldg(&plan.tiles[work.tile].x) * Traits::kBlockRows;
        last_token_ = work.last_token;
        const int* k = plan.k + work.tile * plan.pieces;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const int column =
                kRowMajorX ? i * XTile::kPanelExtent + chunk_ * kChunk : i * kLinesAtOnce + line_;
            const int first = __ldg(k + column / arguments_.block_cols);
            columns_[i] = first < 0 ? -1 : first + (column & (arguments_.block_cols - 1));
        }
    }

    __device__ void copy_y(uint32_t tile, int token) const {
        const auto* y = static_cast<const Element*>(arguments_.y);
        if constexpr (kRowMajorY) {
#pragma unroll
            for (int panel = 0; panel < YTile::kPanels; ++panel) {
                const int feature = panel * YTile::kPanelExtent + chunk_ * kChunk;
                if (feature < Traits::kBlockRows)
                    copy_feature_chunk<YTile>(tile, panel, y, arguments_.y_ld, row_ + feature, token);
            }
        } else {
#pragma unroll
            for (int i = 0; i < YTile::kLines / kLinesAtOnce; ++i) {
                const int line = line_ + i * kLinesAtOnce;
                copy_token_chunk<YTile>(tile, line, y + (row_ + line) * arguments_.y_ld, token);
            }
        }
    }

    __device__ void copy_x(uint32_t tile, int token) const {
        const auto* x = static_cast<const Element*>(arguments_.x);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            if (columns_[i] < 0) continue;
            if constexpr (kRowMajorX)
                copy_feature_chunk<XTile>(tile, i, x, arguments_.x_ld, columns_[i], token);
            else
                copy_token_chunk<XTile>(tile, line_ + i * kLinesAtOnce, x + columns_[i] * arguments_.x_ld,
                                        token);
        }
    }

  private:
    static constexpr int kParts = kRowMajorX ? XTile::kPanels : XTile::kLines / kLinesAtOnce;

    // Lines are tokens: the chunk of 16 bytes of features from `feature` on, of every token of the step.
    template <class Tile>
    __device__ void copy_feature_chunk(uint32_t tile, int panel, const Element* from, int64_t ld, int feature,
                                       int token) const {
        const Element* source = from + (token + line_) * ld + feature;
#pragma unroll
        for (int i = 0; i < Tile::kLines / kLinesAtOnce; ++i) {
            const int line = line_ + i * kLinesAtOnce;
            const bool inside = token + line < last_token_;
            copy_async(tile + panel * Tile::kPanelBytes + Tile::offset(line, chunk_), inside ? source : from,
                       inside ? kChunkBytes : 0);
            source += kLinesAtOnce * ld;
        }
    }

    // Lines are features: this thread's chunk of the step's tokens.
    template <class Tile>
    __device__ void copy_token_chunk(uint32_t tile, int line, const Element* feature, int token) const {
        const int first = token + chunk_ * kChunk;
        const int valid = min(max(last_token_ - first, 0), kChunk);
        copy_async(tile + Tile::offset(line, chunk_), valid > 0 ? feature + first : feature,
                   valid * static_cast<int>(sizeof(Element)));
    }

    const SddArguments& arguments_;
    int line_, chunk_;
    int row_ = 0, last_token_ = 0;
    int columns_[kParts];  // of x, for each panel or each 16 lines; -1 where there is no block
};

// Stores a warp's sums to the blocks' slots, or as partial sums.
template <class Traits>
__device__ inline void sdd_store(const SddArguments& arguments, const SddPlan& plan, const SddWork& work,
                                 const Accumulators<Traits::kMTiles, Traits::kNTiles>& sums, int first_row,
                                 int first_column, int lane) {
    using Element = typename Traits::Element;
    const int block_cols = arguments.block_cols;
#pragma unroll
    for (int n = 0; n < Traits::kNTiles; ++n) {
        const int column = first_column + 16 * n;
        const int slot = __ldg(plan.slots + work.tile * plan.pieces + column / block_cols);
        if (slot < 0) continue;
        const int64_t block = int64_t{slot} * Traits::kBlockRows * block_cols;
#pragma unroll
        for (int i = 0; i < 4 * Traits::kMTiles; ++i) {
            const int row = first_row + i / 2 * 8 + lane / 4;
            const int64_t at =
                block + row * block_cols + (column & (block_cols - 1)) + i % 2 * 8 + lane % 4 * 2;
            const float (&tile)[4] = sums[i / 4][n][i % 2];
            const float2 sum = {tile[i / 2 % 2 * 2], tile[i / 2 % 2 * 2 + 1]};
            if (arguments.splits > 1)
                *reinterpret_cast<float2*>(arguments.partial + work.split * arguments.value_count + at) = sum;
            else
                store_pair(static_cast<Element*>(arguments.values) + at, sum, arguments.accumulate);
        }
    }
}

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__device__ inline void sdd_produce(const SddArguments& arguments, const Ring& ring, uint32_t stages,
                                   int thread) {
    constexpr int kYBytes = Traits::template YTile<kRowMajorY>::kBytes;
    const SddPlan plan(arguments.plan);
    SddProducer<Traits, kRowMajorY, kRowMajorX> producer(arguments, thread);
    RingPosition position;
    for (int index = blockIdx.x; index < plan.tile_count * arguments.splits; index += gridDim.x) {
        const SddWork work(arguments, plan, index);
        producer.begin(plan, work);
        for (int token = work.first_token; token < work.last_token; token += Traits::kStep) {
            ring.empty(position.stage).wait(position.parity ^ 1);
            const uint32_t stage =
                stages + position.stage * Traits::template kStageBytes<kRowMajorY, kRowMajorX>;
            producer.copy_y(stage, token);
            producer.copy_x(stage + kYBytes, token);
            ring.full(position.stage).arrive_after_copies();
            position.advance(ring.stages());
        }
    }
}

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__device__ inline void sdd_consume(const SddArguments& arguments, const Ring& ring, uint32_t stages, int warp,
                                   int lane) {
    using Element = typename Traits::Element;
    using YTile = typename Traits::template YTile<kRowMajorY>;
    using XTile = typename Traits::template XTile<kRowMajorX>;
    constexpr int kMTiles = Traits::kMTiles, kNTiles = Traits::kNTiles;
    const SddPlan plan(arguments.plan);
    const int warp_row = warp / Traits::kColumnWarps * 16 * kMTiles;
    const int warp_column = warp % Traits::kColumnWarps * Traits::kWarpColumns;
    const Reader<YTile, Element, Side::a, kMTiles> read_y(warp_row, lane);
    const Reader<XTile, Element, Side::b, kNTiles> read_x(warp_column, lane);
    RingPosition position;
    for (int index = blockIdx.x; index < plan.tile_count * arguments.splits; index += gridDim.x) {
        const SddWork work(arguments, plan, index);
        const int columns = __ldg(&plan.tiles[work.tile].y) * arguments.block_cols;
        const uint32_t present = warp_column < columns ? kAllPresent<kNTiles> : 0;
        Accumulators<kMTiles, kNTiles> sums = {};
        for (int token = work.first_token; token < work.last_token; token += Traits::kStep) {
            ring.full(position.stage).wait(position.parity);
            const uint32_t stage =
                stages + position.stage * Traits::template kStageBytes<kRowMajorY, kRowMajorX>;
            if (present != 0)
                multiply_all<typename Traits::Math>(sums, read_y, stage, read_x, stage + YTile::kBytes);
            __syncwarp();
            if (lane == 0) ring.empty(position.stage).arrive();
            position.advance(ring.stages());
        }
        sdd_store<Traits>(arguments, plan, work, sums, warp_row, warp_column, lane);
    }
}

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_kernel(const __grid_constant__ SddArguments arguments) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    const Ring ring(stages + arguments.stages * Traits::template kStageBytes<kRowMajorY, kRowMajorX>,
                    arguments.stages);
    if (threadIdx.x == 0) ring.init(Traits::kProducerThreads, Traits::kConsumerWarps);
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp < Traits::kConsumerWarps) {
        sdd_consume<Traits, kRowMajorY, kRowMajorX>(arguments, ring, stages, warp, threadIdx.x % 32);
    } else {
        const int thread = threadIdx.x - 32 * Traits::kConsumerWarps;
        sdd_produce<Traits, kRowMajorY, kRowMajorX>(arguments, ring, stages, thread);
    }
}

// Adds the partial sums of all splits, in their order.
template <class Element>
__global__ void sdd_reduce(const __grid_constant__ SddArguments arguments) {
    const int64_t pairs = arguments.value_count / 2, stride = int64_t{gridDim.x} * blockDim.x;
    const auto* partial = reinterpret_cast<const float2*>(arguments.partial);
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pairs; i += stride) {
        float2 sum = partial[i];
        for (int split = 1; split < arguments.splits; ++split) {
            const float2 next = partial[split * pairs + i];
            sum.x += next.x;
            sum.y += next.y;
        }
        store_pair(static_cast<Element*>(arguments.values) + 2 * i, sum, arguments.accumulate);
    }
}

// Host side: one row of the registry.
template <class Math, int kBlockRows, int kTileColumns, int kWarpRows, int kWarpColumns>
struct Sdd {
    using Traits = SddTraits<Math, kBlockRows, kTileColumns, kWarpRows, kWarpColumns>;
    using Element = typename Math::Element;

    template <bool kRowMajorY, bool kRowMajorX>
    static int stages(const Device& device) {
        int stages = Traits::kMaxStages;
        while (stages > 0 &&
               Traits::template shared_bytes<kRowMajorY, kRowMajorX>(stages) > device.shared_memory)
            --stages;
        return stages;
    }

    static const char* refuses(const Problem& problem, const Device& device) {
        if (problem.pattern.block_rows != kBlockRows) return "it is for blocks of other rows";
        return stages<true, true>(device) < Traits::kMinStages ? "the device has too little shared memory"
                                                               : nullptr;
    }

    static int64_t value_count(const Problem& problem) {
        return problem.pattern.nnz * problem.pattern.block_rows * problem.pattern.block_cols;
    }

    // The number of splits with the least estimated time. Units: one step of one tile.
    static int splits(const Problem& problem, const Device& device) {
        const Pattern& pattern = problem.pattern;
        const int64_t steps = (problem.tokens + Traits::kStep - 1) / Traits::kStep;
        // Half a tile is lost in each block row on the average.
        const double tiles = static_cast<double>(pattern.nnz * pattern.block_cols) / kTileColumns +
                             0.5 * static_cast<double>(pattern.out_features / kBlockRows);
        constexpr double kTileOverhead = 6;        // filling the ring, storing the sums
        constexpr double kStepsPerPartial = 4e-6;  // writing, reading and adding one partial sum
        int best = 1;
        double least = 0;
        for (int count = 1; count <= kMaxSplits && count * kMinStepsOfSplit <= steps + kMinStepsOfSplit - 1;
             ++count) {
            const double waves = static_cast<double>(
                (static_cast<int64_t>(tiles * count) + device.multiprocessors) / device.multiprocessors);
            const double reduction =
                count > 1 ? kStepsPerPartial * count * static_cast<double>(value_count(problem)) : 0;
            const double time = waves * (static_cast<double>(steps) / count + kTileOverhead) + reduction;
            if (count == 1 || time < least) best = count, least = time;
        }
        return best;
    }

    static size_t workspace_size(const Problem& problem, const Device& device) {
        const int count = splits(problem, device);
        return count > 1 ? count * value_count(problem) * sizeof(float) : 0;
    }

    template <bool kRowMajorY, bool kRowMajorX>
    static cudaError_t start(SddArguments arguments, const Device& device, void* stream) {
        arguments.stages = stages<kRowMajorY, kRowMajorX>(device);
        const int bytes = Traits::template shared_bytes<kRowMajorY, kRowMajorX>(arguments.stages);
        return ts::sm80::launch<sdd_kernel<Traits, kRowMajorY, kRowMajorX>, SddArguments>(
            arguments, device.multiprocessors, Traits::kThreads, bytes, bytes, stream);
    }

    static cudaError_t reduce(const SddArguments& arguments, const Device& device, void* stream) {
        constexpr int kThreads = 256;
        return ts::sm80::launch<sdd_reduce<Element>, SddArguments>(arguments, 8 * device.multiprocessors,
                                                                   kThreads, 0, 0, stream);
    }

    static int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        const int count = splits(problem, device);
        const int64_t steps = (problem.tokens + Traits::kStep - 1) / Traits::kStep;
        const SddArguments arguments{problem.y.data,
                                     problem.y.ld,
                                     problem.x.data,
                                     problem.x.ld,
                                     problem.values,
                                     static_cast<float*>(workspace),
                                     static_cast<const PlanHeader*>(problem.plan),
                                     value_count(problem),
                                     static_cast<int>(problem.tokens),
                                     count,
                                     static_cast<int>((steps + count - 1) / count * Traits::kStep),
                                     problem.pattern.block_cols,
                                     0,
                                     problem.accumulate};
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        const auto run = row_major_y ? (row_major_x ? start<true, true> : start<true, false>)
                                     : (row_major_x ? start<false, true> : start<false, false>);
        if (const cudaError_t error = run(arguments, device, stream)) return error;
        return count > 1 ? reduce(arguments, device, stream) : cudaSuccess;
    }

    static constexpr Kernel row(const char* name) {
        return {name,
                DeviceType::cuda,
                80,
                1u << static_cast<int>(Op::sdd_tn),
                1u << static_cast<int>(Math::kDType),
                Math::kPrecision,
                {kTileColumns, 0},
                0,
                kTileColumns,
                refuses,
                workspace_size,
                launch};
    }

  private:
    static constexpr int kMaxSplits = 16;
    static constexpr int kMinStepsOfSplit = 8;
};

}  // namespace ts::sm80

#define TS_INSTANCE(name, kernel, math, block_rows, tile_columns, warp_rows, warp_columns) \
    namespace ts::sm80 {                                                                   \
    const Kernel& name() {                                                                 \
        static constexpr Kernel kRow =                                                     \
            Sdd<math, block_rows, tile_columns, warp_rows, warp_columns>::row(#name);      \
        return kRow;                                                                       \
    }                                                                                      \
    }
