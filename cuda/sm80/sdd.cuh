// sdd, the gradient of the block-sparse weight: W[n, k] = sum over tokens t of y[t, n] x[t, k], for the
// kept blocks only, written (or added) to their slots in values.
//
// A CTA computes macro-tiles of kTileRows features of y by kTileColumns of x, one after another: some
// block rows and columns that have blocks in common (see common/plan.h), both gathered. Tokens are
// walked in steps of 128 bytes through a ring of stages that all threads fill with cp.async, on into
// the next tile. Each warp multiplies what it has of the tile with mma.sync, skipping what is not kept.
// Where there are too few tiles for the GPU, tokens are split over several CTAs; their partial sums go
// to the workspace, and a second kernel adds them in a fixed order.
#pragma once

#include "common/epilogue.cuh"
#include "common/plan.h"
#include "common/problem.h"
#include "sm80/async.cuh"
#include "sm80/launch.cuh"
#include "sm80/math.cuh"
#include "sm80/select.h"
#include "sm80/tile.cuh"

namespace ts::sm80 {

struct SddArguments {
    const void* y;
    int64_t y_ld;
    const void* x;
    int64_t x_ld;
    void* values;
    float* partial;  // [parts, nnz, bn, bk] if there are several parts
    const PlanHeader* plan;
    int64_t value_count;  // nnz * bn * bk
    int tokens;
    int parts;
    int part_tokens;  // a multiple of a step
    int row_shift;    // log2 of bn
    int col_shift;    // log2 of bk
    int stages;
    int lookahead;  // steps whose copies are under way while one is multiplied
    bool accumulate;
    int plan_key;  // that the plan must have
};

// `Result`: what values are stored as, the element of the operands or float.
template <class Math_, int kTileRows_, int kTileColumns_, int kWarpRows_, int kWarpColumns_,
          class Result_ = typename Math_::Element>
struct SddTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    using Result = Result_;
    static constexpr int kTileRows = kTileRows_;
    static constexpr int kTileColumns = kTileColumns_;
    static constexpr int kWarpRows = kWarpRows_;
    static constexpr int kWarpColumns = kWarpColumns_;
    static constexpr int kRowWarps = kTileRows / kWarpRows;
    static constexpr int kWarps = kRowWarps * (kTileColumns / kWarpColumns);
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kMTiles = kWarpRows / 16;
    static constexpr int kNTiles = kWarpColumns / 16;
    static constexpr int kStep = kLineBytes / sizeof(Element);
    static constexpr int kChunk = kChunkBytes / sizeof(Element);

    // In a row-major operand the tokens, which are summed over, are not contiguous.
    template <bool kRowMajor>
    using YTile = Tile<Element, kTileRows, !kRowMajor>;
    template <bool kRowMajor>
    using XTile = Tile<Element, kTileColumns, !kRowMajor>;

    // Both layouts of an operand take the same room.
    static constexpr int kYBytes = YTile<true>::kBytes;
    static constexpr int kStageBytes = kYBytes + XTile<true>::kBytes;
    static_assert(kYBytes == YTile<false>::kBytes && XTile<true>::kBytes == XTile<false>::kBytes);

    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 6;
    static constexpr int shared_bytes(int stages) { return stages * kStageBytes + Ring::bytes(stages); }
};

// A plan's arrays on the device. Ends the kernel with an error if it is not the plan that the launch is for.
struct SddPlan {
    int tile_count, group_rows, pieces;
    const int *rows, *masks, *k, *slots;

    __device__ SddPlan(const PlanHeader* header, int key)
        : tile_count(header->tiles), group_rows(header->group_rows), pieces(header->pieces) {
        if (header->key != key) __trap();
        const int* words = reinterpret_cast<const int*>(header);
        rows = words + header->rows_at;
        masks = words + header->masks_at;
        k = words + header->k_at;
        slots = words + header->slots_at;
    }
};

// A tile and the tokens to sum over. All tiles of one part come before the next.
struct SddWork {
    int tile;
    int part;
    int first_token;
    int last_token;

    __device__ SddWork(const SddArguments& arguments, const SddPlan& plan, int index)
        : tile(index % plan.tile_count), part(index / plan.tile_count) {
        first_token = min(part * arguments.part_tokens, arguments.tokens);
        last_token = min(first_token + arguments.part_tokens, arguments.tokens);
    }
};

// One thread's share in copying one operand: its chunk of 16 bytes in a line is fixed, the lines are
// kLinesAtOnce apart.
template <class Tile, class Element, bool kRowMajor, int kThreads>
class SddOperand {
    static constexpr int kChunk = Tile::kChunk;
    static constexpr int kLinesAtOnce = kThreads / kChunksPerLine;
    static constexpr int kOwnLines = Tile::kLines / kLinesAtOnce;
    // Row-major: lines are tokens, and each panel's chunk lies in some block.
    // Feature-major: lines are features, and each lies in some block.
    static constexpr int kOwnFeatures = kRowMajor ? Tile::kPanels : kOwnLines;

  public:
    __device__ SddOperand(const void* data, int64_t ld)
        : data_(static_cast<const Element*>(data)),
          ld_(ld),
          line_(threadIdx.x / kChunksPerLine),
          chunk_(threadIdx.x % kChunksPerLine) {}

    // `first` gives the first feature of each block of a tile, -1 where there is none.
    template <class First>
    __device__ void begin(int block_shift, First first) {
#pragma unroll
        for (int i = 0; i < kOwnFeatures; ++i) {
            const int within =
                kRowMajor ? i * Tile::kPanelExtent + chunk_ * kChunk : i * kLinesAtOnce + line_;
            const int start = first(within >> block_shift);
            features_[i] = start < 0 ? -1 : start + (within & ((1 << block_shift) - 1));
        }
    }

    // Tokens from `last` on count as zero.
    __device__ void copy(uint32_t tile, int token, int last) const {
        if constexpr (kRowMajor) {
#pragma unroll
            for (int i = 0; i < kOwnLines; ++i) {
                const int line = line_ + i * kLinesAtOnce;
                const bool inside = token + line < last;
                const Element* source = data_ + (inside ? token + line : 0) * ld_;
#pragma unroll
                for (int panel = 0; panel < Tile::kPanels; ++panel)
                    copy_async_if(features_[panel] >= 0,
                                  tile + panel * Tile::kPanelBytes + Tile::offset(line, chunk_),
                                  source + features_[panel], inside ? kChunkBytes : 0);
            }
        } else {
            const int first = token + chunk_ * kChunk;
            const int valid = min(max(last - first, 0), kChunk);
#pragma unroll
            for (int i = 0; i < kOwnFeatures; ++i)
                copy_async_if(features_[i] >= 0, tile + Tile::offset(line_ + i * kLinesAtOnce, chunk_),
                              data_ + features_[i] * ld_ + (valid > 0 ? first : 0),
                              valid * static_cast<int>(sizeof(Element)));
        }
    }

  private:
    const Element* data_;
    int64_t ld_;
    int line_, chunk_;
    int features_[kOwnFeatures];
};

// Fills the ring, walking the steps of all tiles of this CTA.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddLoader {
    using Element = typename Traits::Element;

  public:
    __device__ SddLoader(const SddArguments& arguments, const SddPlan& plan, const Ring& ring,
                         uint32_t stages)
        : arguments_(arguments),
          plan_(plan),
          ring_(ring),
          stages_(stages),
          index_(blockIdx.x),
          y_(arguments.y, arguments.y_ld),
          x_(arguments.x, arguments.x_ld) {
        find_step();
    }

    // Starts the copies of the next step, if there is one, as soon as its stage is free.
    __device__ void load() {
        if (token_ >= last_token_) return;
        ring_.empty(position_.stage).wait(position_.parity ^ 1);
        const uint32_t stage = stages_ + position_.stage * Traits::kStageBytes;
        y_.copy(stage, token_, last_token_);
        x_.copy(stage + Traits::kYBytes, token_, last_token_);
        ring_.full(position_.stage).arrive_after_copies();
        position_.advance(ring_.stages());
        token_ += Traits::kStep;
        if (token_ < last_token_) return;
        index_ += gridDim.x;
        find_step();
    }

  private:
    // The first step from the tile `index_` on; a part can have no tokens.
    __device__ void find_step() {
        token_ = last_token_ = 0;
        for (; index_ < plan_.tile_count * arguments_.parts; index_ += gridDim.x) {
            const SddWork work(arguments_, plan_, index_);
            token_ = work.first_token;
            last_token_ = work.last_token;
            if (token_ >= last_token_) continue;
            const int* rows = plan_.rows + work.tile * plan_.group_rows;
            const int* k = plan_.k + work.tile * plan_.pieces;
            const int row_shift = arguments_.row_shift;
            y_.begin(row_shift, [&](int in_group) {
                const int row = __ldg(rows + in_group);
                return row < 0 ? -1 : row << row_shift;
            });
            x_.begin(arguments_.col_shift, [&](int piece) { return __ldg(k + piece); });
            return;
        }
    }

    const SddArguments& arguments_;
    const SddPlan& plan_;
    const Ring& ring_;
    uint32_t stages_;
    RingPosition position_;
    int index_, token_, last_token_;
    SddOperand<typename Traits::template YTile<kRowMajorY>, Element, kRowMajorY, Traits::kThreads> y_;
    SddOperand<typename Traits::template XTile<kRowMajorX>, Element, kRowMajorX, Traits::kThreads> x_;
};

// One step for the 16 x 16 tiles whose bit row * kNTiles + column is set in `present`.
template <class Math, int kMTiles, int kNTiles, class ReaderA, class ReaderB>
__device__ inline void multiply_present(Accumulators<kMTiles, kNTiles>& sums, const ReaderA& read_a,
                                        uint32_t tile_a, const ReaderB& read_b, uint32_t tile_b,
                                        uint32_t present) {
    constexpr uint32_t kRow = (1u << kNTiles) - 1;
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
        typename Math::template Operand<2> b[kNTiles][2];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
            const Fragment<4> both = read_b.load(tile_b, n, quarter);
            b[n][0] = Math::prepare(Fragment<2>{both.value[0], both.value[1]});
            b[n][1] = Math::prepare(Fragment<2>{both.value[2], both.value[3]});
        }
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const uint32_t row = present >> m * kNTiles & kRow;
            if (row == 0) continue;
            const auto a = Math::prepare(read_a.load(tile_a, m, quarter));
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
                if (!(row >> n & 1)) continue;
                Math::mma(sums[m][n][0], a, b[n][0]);
                Math::mma(sums[m][n][1], a, b[n][1]);
            }
        }
    }
}

// Adds what is stored to two neighbouring sums.
template <class Result>
__device__ inline void add_pair(const Result* stored, float2& sum) {
    const auto before = *reinterpret_cast<const Pair<Result>*>(stored);
    sum.x += to_float(before.first);
    sum.y += to_float(before.second);
}

// Stores a warp's sums to the blocks' slots, or as partial sums.
template <class Traits>
__device__ inline void sdd_store(const SddArguments& arguments, const SddPlan& plan, const SddWork& work,
                                 const Accumulators<Traits::kMTiles, Traits::kNTiles>& sums, int first_row,
                                 int first_column, int lane) {
    using Result = typename Traits::Result;
    const int row_mask = (1 << arguments.row_shift) - 1, col_mask = (1 << arguments.col_shift) - 1;
#pragma unroll
    for (int tile = 0; tile < Traits::kMTiles * Traits::kNTiles; ++tile) {
        const int m = tile / Traits::kNTiles, n = tile % Traits::kNTiles;
        const int row = first_row + 16 * m, column = first_column + 16 * n;
        const int piece = column >> arguments.col_shift, in_group = row >> arguments.row_shift;
        const int slot = __ldg(plan.slots + (work.tile * plan.pieces + piece) * plan.group_rows + in_group);
        if (slot < 0) continue;
        const int64_t block = int64_t{slot} << arguments.row_shift + arguments.col_shift;
        int64_t at[4];
        float2 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int line = (row & row_mask) + i / 2 * 8 + lane / 4;
            const int within = (column & col_mask) + i % 2 * 8 + lane % 4 * 2;
            const float* pair = sums[m][n][i % 2] + i / 2 * 2;
            at[i] = block + (line << arguments.col_shift) + within;
            pairs[i] = make_float2(pair[0], pair[1]);
        }
        if (arguments.parts > 1) {
            float* const partial = arguments.partial + work.part * arguments.value_count;
#pragma unroll
            for (int i = 0; i < 4; ++i) *reinterpret_cast<float2*>(partial + at[i]) = pairs[i];
            continue;
        }
        auto* const values = static_cast<Result*>(arguments.values);
        // All that is added is read before anything is written: memory is waited for once.
        if (arguments.accumulate) {
#pragma unroll
            for (int i = 0; i < 4; ++i) add_pair(values + at[i], pairs[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) store_pair(values + at[i], pairs[i], false);
    }
}

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sdd_kernel(const __grid_constant__ SddArguments arguments) {
    constexpr int kMTiles = Traits::kMTiles, kNTiles = Traits::kNTiles;
    constexpr uint32_t kAll = kMTiles * kNTiles == 32 ? 0xffffffffu : (1u << kMTiles * kNTiles % 32) - 1;
    using Math = typename Traits::Math;
    using Element = typename Traits::Element;
    // [stages][y, x], a Tile each; [stages] barriers.
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    const Ring ring(stages + arguments.stages * Traits::kStageBytes, arguments.stages);
    if (threadIdx.x == 0) ring.init(Traits::kThreads, Traits::kThreads);
    __syncthreads();

    const SddPlan plan(arguments.plan, arguments.plan_key);
    SddLoader<Traits, kRowMajorY, kRowMajorX> loader(arguments, plan, ring, stages);
    for (int ahead = 0; ahead < arguments.lookahead; ++ahead) loader.load();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % Traits::kRowWarps * Traits::kWarpRows;
    const int warp_column = warp / Traits::kRowWarps * Traits::kWarpColumns;
    const Reader<typename Traits::template YTile<kRowMajorY>, Element, Side::a, kMTiles> read_y(warp_row,
                                                                                                lane);
    const Reader<typename Traits::template XTile<kRowMajorX>, Element, Side::b, kNTiles> read_x(warp_column,
                                                                                                lane);
    RingPosition position;
    for (int index = blockIdx.x; index < plan.tile_count * arguments.parts; index += gridDim.x) {
        const SddWork work(arguments, plan, index);
        uint32_t present = 0;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const uint32_t mask =
                __ldg(plan.masks + work.tile * (Traits::kTileRows / 16) + warp_row / 16 + m);
            present |= (mask >> warp_column / 16 & (1u << kNTiles) - 1) << m * kNTiles;
        }
        Accumulators<kMTiles, kNTiles> sums = {};
        for (int token = work.first_token; token < work.last_token; token += Traits::kStep) {
            loader.load();
            ring.full(position.stage).wait(position.parity);
            const uint32_t stage = stages + position.stage * Traits::kStageBytes;
            accumulate<Math>(sums, [&](Accumulators<kMTiles, kNTiles>& to) {
                if (present == kAll)
                    multiply_all<Math>(to, read_y, stage, read_x, stage + Traits::kYBytes);
                else if (present != 0)
                    multiply_present<Math>(to, read_y, stage, read_x, stage + Traits::kYBytes, present);
            });
            ring.empty(position.stage).arrive();
            position.advance(arguments.stages);
        }
        if (present != 0) sdd_store<Traits>(arguments, plan, work, sums, warp_row, warp_column, lane);
    }
}

// Adds the partial sums of all parts, in their order.
template <class Result>
__global__ void sdd_reduce(const __grid_constant__ SddArguments arguments) {
    const int64_t pairs = arguments.value_count / 2, stride = int64_t{gridDim.x} * blockDim.x;
    const auto* partial = reinterpret_cast<const float2*>(arguments.partial);
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pairs; i += stride) {
        float2 sum = partial[i];
        for (int part = 1; part < arguments.parts; ++part) {
            const float2 next = partial[part * pairs + i];
            sum.x += next.x;
            sum.y += next.y;
        }
        store_pair(static_cast<Result*>(arguments.values) + 2 * i, sum, arguments.accumulate);
    }
}

// Host side: one row of the registry.
template <class Math, int kTileRows, int kTileColumns, int kWarpRows, int kWarpColumns>
struct Sdd {
    using Traits = SddTraits<Math, kTileRows, kTileColumns, kWarpRows, kWarpColumns>;
    using WideTraits = SddTraits<Math, kTileRows, kTileColumns, kWarpRows, kWarpColumns, float>;
    static constexpr PlanShape kPlan = {kTileRows, kTileColumns};

    static int stages(const Device& device) { return stages_within<Traits>(device.shared_memory); }

    static const char* refuses(const Problem& problem, const Device& device) {
        if (problem.pattern.block_rows > kTileRows) return "its tile has fewer rows than a block";
        return stages(device) < Traits::kMinStages ? "the device has too little shared memory" : nullptr;
    }

    // Tiles if blocks were spread at random; the plan, which knows, is on the device.
    static double expected_tiles(const Pattern& pattern) {
        const double rows = static_cast<double>(pattern.out_features / pattern.block_rows);
        const double columns = static_cast<double>(pattern.in_features / pattern.block_cols);
        const double group_rows = kTileRows / pattern.block_rows;
        double absent = 1;  // probability that a column has no block in a group
        for (int i = 0; i < group_rows; ++i)
            absent *= 1 - static_cast<double>(pattern.nnz) / (rows * columns);
        const double group_columns = columns * (1 - absent);
        // Half a tile is lost in each group on the average.
        return rows / group_rows * (group_columns * pattern.block_cols / kTileColumns + 0.5);
    }

    // The number of parts with the least estimated time. Times are counted in steps of a tile.
    static int choose_parts(const Problem& problem, const Device& device) {
        if (problem.pattern.nnz == 0) return 1;
        constexpr double kTileOverhead = 6;        // filling the ring, storing the sums
        constexpr double kStepsPerPartial = 4e-6;  // writing, reading and adding one partial sum
        const int64_t steps = (problem.tokens + Traits::kStep - 1) / Traits::kStep;
        const double tiles = expected_tiles(problem.pattern);
        int best = 1;
        double least = 0;
        const int64_t most = std::min({kMaxParts, steps / kMinStepsOfPart, kMaxWork / problem.pattern.nnz});
        for (int count = 1; count == 1 || count <= most; ++count) {
            const auto waves =
                (static_cast<int64_t>(tiles * count) + device.multiprocessors) / device.multiprocessors;
            const double reduction =
                count > 1 ? kStepsPerPartial * count * static_cast<double>(problem.pattern.value_count()) : 0;
            const double time =
                static_cast<double>(waves) * (static_cast<double>(steps) / count + kTileOverhead) + reduction;
            if (count == 1 || time < least) best = count, least = time;
        }
        return best;
    }

    static size_t workspace_size(const Problem& problem, const Device& device) {
        const int count = choose_parts(problem, device);
        return count > 1 ? count * problem.pattern.value_count() * sizeof(float) : 0;
    }

    static int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        const int parts = choose_parts(problem, device), stage_count = stages(device);
        const int64_t steps = (problem.tokens + Traits::kStep - 1) / Traits::kStep;
        const SddArguments arguments{problem.y.data,
                                     problem.y.ld,
                                     problem.x.data,
                                     problem.x.ld,
                                     problem.values.data,
                                     static_cast<float*>(workspace),
                                     static_cast<const PlanHeader*>(problem.plan),
                                     problem.pattern.value_count(),
                                     static_cast<int>(problem.tokens),
                                     parts,
                                     static_cast<int>((steps + parts - 1) / parts * Traits::kStep),
                                     log2_of_block(problem.pattern.block_rows),
                                     log2_of_block(problem.pattern.block_cols),
                                     stage_count,
                                     lookahead(stage_count),
                                     problem.accumulate,
                                     plan_key(problem.pattern, problem.op, kPlan)};
        const auto start = problem.result_dtype == Math::kDType ? start_for<Traits> : start_for<WideTraits>;
        return start(arguments, problem, device, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row{name,
                   DeviceType::cuda,
                   80,
                   1u << static_cast<int>(Op::sdd_tn),
                   1u << static_cast<int>(Math::kDType),
                   Math::kPrecision,
                   kPlan,
                   0,
                   kTileRows,
                   0,
                   refuses,
                   workspace_size,
                   launch};
        row.result_dtypes = 1u << static_cast<int>(Math::kDType) | 1u << static_cast<int>(DType::float32);
        row.estimate = estimate_sdd;
        return row;
    }

  private:
    // The kernel, and the one that adds partial sums, for one dtype of results.
    template <class OfResult>
    static cudaError_t start_for(const SddArguments& arguments, const Problem& problem, const Device& device,
                                 void* stream) {
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        const auto start =
            row_major_y ? (row_major_x ? ts::sm80::launch<sdd_kernel<OfResult, true, true>, SddArguments>
                                       : ts::sm80::launch<sdd_kernel<OfResult, true, false>, SddArguments>)
                        : (row_major_x ? ts::sm80::launch<sdd_kernel<OfResult, false, true>, SddArguments>
                                       : ts::sm80::launch<sdd_kernel<OfResult, false, false>, SddArguments>);
        const int bytes = Traits::shared_bytes(arguments.stages);
        if (const cudaError_t error =
                start(arguments, device.multiprocessors, Traits::kThreads, bytes, bytes, stream))
            return error;
        if (arguments.parts == 1) return cudaSuccess;
        constexpr int kReduceThreads = 256;
        return ts::sm80::launch<sdd_reduce<typename OfResult::Result>, SddArguments>(
            arguments, 8 * device.multiprocessors, kReduceThreads, 0, 0, stream);
    }

    static constexpr int64_t kMaxParts = 16;
    static constexpr int64_t kMinStepsOfPart = 8;
    static constexpr int64_t kMaxWork = 1 << 30;  // tiles of all parts, which 32 bits number
};

}  // namespace ts::sm80

#define TS_INSTANCE(name, kernel, math, tile_rows, tile_columns, warp_rows, warp_columns) \
    namespace ts::sm80 {                                                                  \
    const Kernel& name() {                                                                \
        static constexpr Kernel kRow =                                                    \
            Sdd<math, tile_rows, tile_columns, warp_rows, warp_columns>::row(#name);      \
        return kRow;                                                                      \
    }                                                                                     \
    }
