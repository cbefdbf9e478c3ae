// sdd: the gradient of the block-sparse weight, for the kept blocks alone (sm_80, mma.sync).
//   dW[N,K] = Y[M,N]^T * X[M,K], written or added to values
// Operands: Y and X each row-major or column-major, bf16, fp16, float32 (TF32, or three TF32 products with
// float32's error) or float64; values [nnz, bn, bk] of the same dtype or float32; float32 sums, or float64.
// A CTA computes tiles of kTileRows features of y x kTileColumns features of x, one after another: block rows
// and columns that have blocks in common, both gathered (see common/plan.h).
// Warps: 8 or 16, which all load and multiply. They skip the parts of a tile that are not kept.
// M loop: steps of 128 bytes of tokens through a ring of 2 to 6 stages (cp.async, mbarriers), on into the
// next tile.
// Split over tokens, where tiles are too few for the GPU: partial sums go to the workspace, and a second
// kernel adds them in a fixed order.
// Grouped products: a tile has blocks of one group and sums over this group's tokens, which only the device
// knows; they are not split.
// Chosen where its estimate is least: 64 rows for blocks of 32 or 64 rows, otherwise 128; one row of blocks
// of 32 in float64.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ampere/async.cuh"
#include "ampere/launch.cuh"
#include "ampere/math.cuh"
#include "ampere/tile.cuh"
#include "common/epilogue.cuh"
#include "common/plan.h"
#include "common/plan_view.cuh"
#include "common/problem.h"
#include "common/token_groups.h"

namespace ts::sm80 {

// The arguments of an sdd kernel and what follows from its tile.

struct SddArguments {
    const void* y;
    int64_t y_ld;
    const void* x;
    int64_t x_ld;
    void* values;
    void* sums;  // [parts, nnz, bn, bk]: of several parts, or values that are stored as sums; or null
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
    // Grouped products:
    const int32_t* offsets;
    int groups;
    int group_rows;  // block rows
    PlanReport plan_report;
};

// Values are stored as Math::Result, the type of the operands or float.
template <class Math_, int kTileRows_, int kTileColumns_, int kWarpRows_, int kWarpColumns_>
struct SddTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr int kTileRows = kTileRows_;
    static constexpr int kTileColumns = kTileColumns_;
    static constexpr int kWarpRows = kWarpRows_;
    static constexpr int kWarpColumns = kWarpColumns_;
    static constexpr int kRowWarps = kTileRows / kWarpRows;
    static constexpr int kWarps = kRowWarps * (kTileColumns / kWarpColumns);
    static constexpr int kThreads = 32 * kWarps;
    // CTAs on a multiprocessor: its registers hold 16 warps of 32 x 32 sums in float64. Tiles of one block
    // row of 32 are halves of what they could be.
    static constexpr int kResident =
        sizeof(Input) == 8 && kWarps == 8 && kTileRows == 32 && kWarpColumns <= 32 ? 2 : 1;
    static constexpr int kMTiles = kWarpRows / 16;
    static constexpr int kNTiles = kWarpColumns / 16;
    static constexpr int kStep = kLineBytes / sizeof(Input);
    static constexpr int kChunk = kChunkBytes / sizeof(Input);

    // In a row-major operand the tokens, which are summed over, are not contiguous.
    template <bool kRowMajor>
    using YTile = Tile<Input, kTileRows, !kRowMajor>;
    template <bool kRowMajor>
    using XTile = Tile<Input, kTileColumns, !kRowMajor>;

    // Both layouts of an operand take the same room.
    static constexpr int kYBytes = YTile<true>::kBytes;
    static constexpr int kStageBytes = kYBytes + XTile<true>::kBytes;
    static_assert(kYBytes == YTile<false>::kBytes && XTile<true>::kBytes == XTile<false>::kBytes);

    static constexpr int kMinStages = 2;
    static constexpr int kMaxStages = 6;
    static constexpr int shared_bytes(int stages) { return stages * kStageBytes + Ring::bytes(stages); }
};

// Which tiles and tokens a CTA of an sdd kernel walks, and how the operands of a step come into the ring.

// A tile and the tokens to sum over.
struct SddWork {
    int tile;
    int part;
    int first_token;
    int last_token;
    int first_row;  // block row at which y begins: that of the group
};

// All tiles of one part come before the next; of grouped products there is one, and tokens are the group's.
template <bool kGrouped>
__device__ inline SddWork sdd_work(const SddArguments& arguments, const PlanView& plan, int index) {
    if constexpr (kGrouped) {
        const int group = max(__ldg(plan.rows + index * plan.group_rows), 0) / arguments.group_rows;
        const TokenGroups groups{arguments.offsets, arguments.groups, arguments.tokens};
        const TokenSpan span = groups.span(group);
        return {index, 0, span.first, span.last, group * arguments.group_rows};
    } else {
        const int tile = index % plan.tile_count, part = index / plan.tile_count;
        const int first = min(part * arguments.part_tokens, arguments.tokens);
        return {tile, part, first, min(first + arguments.part_tokens, arguments.tokens), 0};
    }
}

// One thread's share in copying one operand: its chunk of 16 bytes in a line is fixed, the lines are
// kLinesAtOnce apart.
template <class Tile, class Input, bool kRowMajor, int kThreads>
class SddOperand {
    static constexpr int kChunk = Tile::kChunk;
    using Share = Shares<Tile, kThreads>;
    static constexpr int kLinesAtOnce = Share::kLinesAtOnce;
    static constexpr int kOwnLines = Share::kOwnLines;
    // Row-major: lines are tokens, and each panel's chunk lies in some block.
    // Column-major: lines are features, and each lies in some block.
    static constexpr int kOwnFeatures = kRowMajor ? Share::kOwnPanels : kOwnLines;

  public:
    __device__ SddOperand(const void* data, int64_t ld)
        : data_(static_cast<const Input*>(data)),
          ld_(ld),
          line_(Share::line()),
          chunk_(threadIdx.x % kChunksPerLine) {}

    // `first` gives the first feature of each block of a tile, -1 where there is none.
    template <class First>
    __device__ void begin(int block_shift, First first) {
#pragma unroll
        for (int i = 0; i < kOwnFeatures; ++i) {
            const int within =
                kRowMajor ? panel_at(i) * Tile::kPanelExtent + chunk_ * kChunk : i * kLinesAtOnce + line_;
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
                const Input* source = data_ + (inside ? token + line : 0) * ld_;
#pragma unroll
                for (int panel = 0; panel < Share::kOwnPanels; ++panel)
                    copy_async_if(features_[panel] >= 0,
                                  tile + panel_at(panel) * Tile::kPanelBytes + Tile::offset(line, chunk_),
                                  source + features_[panel], inside ? kChunkBytes : 0);
            }
        } else {
            const int first = token + chunk_ * kChunk;
            const int valid = min(max(last - first, 0), kChunk);
#pragma unroll
            for (int i = 0; i < kOwnFeatures; ++i)
                copy_async_if(features_[i] >= 0, tile + Tile::offset(line_ + i * kLinesAtOnce, chunk_),
                              data_ + features_[i] * ld_ + (valid > 0 ? first : 0),
                              valid * static_cast<int>(sizeof(Input)));
        }
    }

  private:
    __device__ static int panel_at(int i) { return Share::panel() + i * Share::kPanelsAtOnce; }

    const Input* data_;
    int64_t ld_;
    int line_, chunk_;
    int features_[kOwnFeatures];
};

// Fills the ring, walking the steps of all tiles of this CTA.
template <class Traits, bool kRowMajorY, bool kRowMajorX, bool kGrouped>
class SddLoader {
    using Input = typename Traits::Input;

  public:
    __device__ SddLoader(const SddArguments& arguments, const PlanView& plan, const Ring& ring,
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
            const SddWork work = sdd_work<kGrouped>(arguments_, plan_, index_);
            token_ = work.first_token;
            last_token_ = work.last_token;
            if (token_ >= last_token_) continue;
            const int* rows = plan_.rows + work.tile * plan_.group_rows;
            const int* k = plan_.k + work.tile * plan_.pieces;
            const int row_shift = arguments_.row_shift;
            y_.begin(row_shift, [&](int in_group) {
                const int row = __ldg(rows + in_group);
                return row < 0 ? -1 : row - work.first_row << row_shift;
            });
            x_.begin(arguments_.col_shift, [&](int piece) { return __ldg(k + piece); });
            return;
        }
    }

    const SddArguments& arguments_;
    const PlanView& plan_;
    const Ring& ring_;
    uint32_t stages_;
    RingPosition position_;
    int index_, token_, last_token_;
    SddOperand<typename Traits::template YTile<kRowMajorY>, Input, kRowMajorY, Traits::kThreads> y_;
    SddOperand<typename Traits::template XTile<kRowMajorX>, Input, kRowMajorX, Traits::kThreads> x_;
};

// How the sums of an sdd kernel become values.

// Adds what is stored to two neighbouring sums.
template <class Result, class Sum>
__device__ inline void add_pair(const Result* stored, Pair<Sum>& sum) {
    const auto before = *reinterpret_cast<const Pair<Result>*>(stored);
    sum.first += static_cast<Sum>(before.first);
    sum.second += static_cast<Sum>(before.second);
}

template <class Result, class Sum>
__device__ inline void store_sums(Result* target, const Pair<Sum>& sum) {
    auto& pair = *reinterpret_cast<Pair<Result>*>(target);
    if constexpr (std::is_same_v<Result, Sum>)
        pair = sum;
    else
        pair = {from_float<Result>(sum.first), from_float<Result>(sum.second)};
}

// Stores a warp's sums to the blocks' slots, or as partial sums.
template <class Traits>
__device__ inline void sdd_store(
    const SddArguments& arguments, const PlanView& plan, const SddWork& work,
    const Accumulators<typename Traits::Accumulator, Traits::kMTiles, Traits::kNTiles>& sums, int first_row,
    int first_column, int lane) {
    using Result = typename Traits::Result;
    using Sum = typename Traits::Accumulator;
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
        Pair<Sum> pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int line = (row & row_mask) + i / 2 * 8 + lane / 4;
            const int within = (column & col_mask) + i % 2 * 8 + lane % 4 * 2;
            const auto* pair = sums[m][n][i % 2] + i / 2 * 2;
            at[i] = block + (line << arguments.col_shift) + within;
            pairs[i] = {pair[0], pair[1]};
        }
        const auto store = [&](auto* target, bool accumulate) {
            // All that is added is read before anything is written: memory is waited for once.
            if (accumulate) {
#pragma unroll
                for (int i = 0; i < 4; ++i) add_pair(target + at[i], pairs[i]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) store_sums(target + at[i], pairs[i]);
        };
        if (arguments.sums != nullptr)
            store(static_cast<Sum*>(arguments.sums) + work.part * arguments.value_count,
                  arguments.accumulate && arguments.parts == 1);
        else if constexpr (!std::is_same_v<Result, Sum>)
            store(static_cast<Result*>(arguments.values), arguments.accumulate);
    }
}

// Adds the partial sums of all parts, in their order. There are none where the plan was not the launch's.
template <class Math>
__global__ void sdd_reduce(const __grid_constant__ SddArguments arguments) {
    using Result = typename Math::Result;
    using Sum = typename Math::Accumulator;
    if (arguments.plan->key != arguments.plan_key) return;
    const int64_t pairs = arguments.value_count / 2, stride = int64_t{gridDim.x} * blockDim.x;
    const auto* partial = static_cast<const Pair<Sum>*>(arguments.sums);
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pairs; i += stride) {
        Pair<Sum> sum = partial[i];
        for (int part = 1; part < arguments.parts; ++part) {
            const Pair<Sum> next = partial[part * pairs + i];
            sum.first += next.first;
            sum.second += next.second;
        }
        auto* const values = static_cast<Result*>(arguments.values) + 2 * i;
        if (arguments.accumulate) add_pair(values, sum);
        store_sums(values, sum);
    }
}

// One step for the 16 x 16 tiles whose bit row * kNTiles + column is set in `present`, by instructions of a
// quarter.
template <class Math, class Sum, int kMTiles, int kNTiles, class ReaderA, class ReaderB>
__device__ inline void multiply_present(Accumulators<Sum, kMTiles, kNTiles>& sums, const ReaderA& read_a,
                                        uint32_t tile_a, const ReaderB& read_b, uint32_t tile_b,
                                        uint32_t present) {
    constexpr uint32_t kRow = (1u << kNTiles) - 1;
    for (int quarter = 0; quarter < kQuarters; quarter += Math::kQuarters) {
        typename Math::template Operand<2 * Math::kQuarters> b[kNTiles][2];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
            load_b<Math>(read_b, tile_b, n, quarter,
                         [&](int half, const auto& of_half) { b[n][half] = of_half; });
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const uint32_t row = present >> m * kNTiles & kRow;
            if (row == 0) continue;
            const auto a = load_a<Math>(read_a, tile_a, m, quarter);
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
                if (!(row >> n & 1)) continue;
                Math::mma(sums[m][n][0], a, b[n][0]);
                Math::mma(sums[m][n][1], a, b[n][1]);
            }
        }
    }
}

template <class Traits, bool kRowMajorY, bool kRowMajorX, bool kGrouped = false>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kResident)
    sdd_kernel(const __grid_constant__ SddArguments arguments) {
    constexpr int kMTiles = Traits::kMTiles, kNTiles = Traits::kNTiles;
    constexpr uint32_t kAll = kMTiles * kNTiles == 32 ? 0xffffffffu : (1u << kMTiles * kNTiles % 32) - 1;
    using Math = typename Traits::Math;
    using Input = typename Traits::Input;
    using Sums = Accumulators<typename Traits::Accumulator, kMTiles, kNTiles>;
    // [stages][y, x], a Tile each; [stages] barriers.
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    const Ring ring(stages + arguments.stages * Traits::kStageBytes, arguments.stages);
    if (threadIdx.x == 0) ring.init(Traits::kThreads, Traits::kThreads);
    __syncthreads();

    const OwnPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    if (!plan.is_own) return;
    SddLoader<Traits, kRowMajorY, kRowMajorX, kGrouped> loader(arguments, plan, ring, stages);
    for (int ahead = 0; ahead < arguments.lookahead; ++ahead) loader.load();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % Traits::kRowWarps * Traits::kWarpRows;
    const int warp_column = warp / Traits::kRowWarps * Traits::kWarpColumns;
    const Reader<typename Traits::template YTile<kRowMajorY>, Input, Side::a, kMTiles> read_y(warp_row, lane);
    const Reader<typename Traits::template XTile<kRowMajorX>, Input, Side::b, kNTiles> read_x(warp_column,
                                                                                              lane);
    RingPosition position;
    for (int index = blockIdx.x; index < plan.tile_count * arguments.parts; index += gridDim.x) {
        const SddWork work = sdd_work<kGrouped>(arguments, plan, index);
        uint32_t present = 0;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            const uint32_t mask =
                __ldg(plan.masks + work.tile * (Traits::kTileRows / 16) + warp_row / 16 + m);
            present |= (mask >> warp_column / 16 & (1u << kNTiles) - 1) << m * kNTiles;
        }
        Sums sums = {};
        for (int token = work.first_token; token < work.last_token; token += Traits::kStep) {
            loader.load();
            ring.full(position.stage).wait(position.parity);
            const uint32_t stage = stages + position.stage * Traits::kStageBytes;
            accumulate<Math>(sums, [&](Sums& to) {
                const uint32_t x = stage + Traits::kYBytes;
                const auto release = [&] { ring.empty(position.stage).arrive(); };
                if constexpr (Math::kQuarters > 1) {
                    const auto multiply = [&](auto has) {
                        multiply_long<Math>(to, read_y, stage, read_x, x, has, release);
                    };
                    if (present == kAll) return multiply([](int, int) { return true; });
                    if (present != 0)
                        return multiply([&](int m, int n) { return present >> m * kNTiles + n & 1; });
                } else if (present == kAll) {
                    multiply_all<Math>(to, read_y, stage, read_x, x);
                } else if (present != 0) {
                    multiply_present<Math>(to, read_y, stage, read_x, x, present);
                }
                release();
            });
            position.advance(arguments.stages);
        }
        if (present != 0) sdd_store<Traits>(arguments, plan, work, sums, warp_row, warp_column, lane);
    }
}

// Host side: one row of the registry.
template <class Math, int kTileRows, int kTileColumns, int kWarpRows, int kWarpColumns>
struct Sdd {
    using Traits = SddTraits<Math, kTileRows, kTileColumns, kWarpRows, kWarpColumns>;
    // The values of products whose result is as wide as sums.
    using Wide =
        std::conditional_t<std::is_same_v<typename Math::Accumulator, double>, Math, WithResult<Math, float>>;
    static constexpr PlanShape kPlan = {kTileRows, kTileColumns};

    static int stages(const Device& device) {
        constexpr int kReservedBytes = 1024;  // of each CTA, by the system
        return stages_within<Traits>((device.shared_memory + kReservedBytes) / Traits::kResident -
                                     kReservedBytes);
    }

    static const char* refuses(const Problem& problem, const Device& device) {
        if (are_too_wide<Traits>(problem)) return kTooWide;
        if (problem.pattern.block_rows > kTileRows) return "its tile has fewer rows than a block";
        if (Traits::kResident > 1 && problem.pattern.block_rows < kTileRows)
            return "its tile is one block row";
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
        if (problem.pattern.nnz == 0 || problem.grouped()) return 1;
        constexpr double kTileOverhead = 6;        // filling the ring, storing the sums
        constexpr double kStepsPerPartial = 4e-6;  // writing, reading and adding one partial sum
        const int64_t steps = (problem.tokens + Traits::kStep - 1) / Traits::kStep;
        const double tiles = expected_tiles(problem.pattern);
        const int64_t ctas = Traits::kResident * device.multiprocessors;
        int best = 1;
        double least = 0;
        const int64_t most = std::min({kMaxParts, steps / kMinStepsOfPart, kMaxWork / problem.pattern.nnz});
        for (int count = 1; count == 1 || count <= most; ++count) {
            const int64_t waves = (static_cast<int64_t>(tiles * count) + ctas) / ctas;
            const double reduction =
                count > 1 ? kStepsPerPartial * count * static_cast<double>(problem.pattern.value_count()) : 0;
            const double time =
                static_cast<double>(waves) * (static_cast<double>(steps) / count + kTileOverhead) + reduction;
            if (count == 1 || time < least) best = count, least = time;
        }
        return best;
    }

    static size_t workspace_size(const Problem& problem, const Device& device, const Decision&) {
        const int count = choose_parts(problem, device);
        return count > 1 ? count * problem.pattern.value_count() * sizeof(typename Traits::Accumulator) : 0;
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void* workspace,
                          void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        const int parts = choose_parts(problem, device), stage_count = stages(device);
        const int64_t steps = (problem.tokens + Traits::kStep - 1) / Traits::kStep;
        SddArguments arguments{};
        arguments.y = problem.y.data;
        arguments.y_ld = problem.y.ld;
        arguments.x = problem.x.data;
        arguments.x_ld = problem.x.ld;
        arguments.values = problem.values.data;
        const bool wide = problem.result_dtype == Wide::kResult;
        arguments.sums = parts > 1 ? workspace : wide ? problem.values.data : nullptr;
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.value_count = problem.pattern.value_count();
        arguments.tokens = static_cast<int>(problem.tokens);
        arguments.parts = parts;
        arguments.part_tokens = static_cast<int>((steps + parts - 1) / parts * Traits::kStep);
        arguments.row_shift = log2_of_block(problem.pattern.block_rows);
        arguments.col_shift = log2_of_block(problem.pattern.block_cols);
        arguments.stages = stage_count;
        arguments.lookahead = std::min(lookahead(stage_count), kMostAhead<typename Traits::Input>);
        arguments.accumulate = problem.accumulate;
        arguments.plan_key = plan_key(problem.pattern, problem.op, kPlan);
        arguments.offsets = problem.offsets;
        arguments.groups = problem.pattern.groups;
        arguments.group_rows =
            static_cast<int>(problem.pattern.group_out_features() / problem.pattern.block_rows);
        arguments.plan_report = problem.plan_report;
        if (const cudaError_t error = start(arguments, problem, device, stream)) return error;
        if (parts == 1) return cudaSuccess;
        constexpr int kReduceThreads = 256;
        const auto reduce = wide ? ts::sm80::launch<sdd_reduce<Wide>, SddArguments>
                                 : ts::sm80::launch<sdd_reduce<Math>, SddArguments>;
        return reduce(arguments, 8 * device.multiprocessors, kReduceThreads, 0, 0, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<Sdd>(name, "sm80_sdd");
        if (Traits::kWarps == 16) row.variant = "_16_warps";
        row.ops = bits_of(Op::sdd_tn);
        row.input_dtypes = bits_of(Math::kInput);
        row.result_dtypes = bits_of(Math::kResult, Wide::kResult);
        row.grouped = bits_of(0, 1);
        row.precision = Math::kPrecision;
        row.plan = kPlan;
        row.tile_features = kTileRows;
        row.united_features = kTileRows;
        row.tile_values = kTileRows * kTileColumns;
        return row;
    }

  private:
    static cudaError_t start(const SddArguments& arguments, const Problem& problem, const Device& device,
                             void* stream) {
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        const auto start =
            problem.grouped() ? ts::sm80::launch<sdd_kernel<Traits, true, true, true>, SddArguments>
            : row_major_y ? (row_major_x ? ts::sm80::launch<sdd_kernel<Traits, true, true>, SddArguments>
                                         : ts::sm80::launch<sdd_kernel<Traits, true, false>, SddArguments>)
                          : (row_major_x ? ts::sm80::launch<sdd_kernel<Traits, false, true>, SddArguments>
                                         : ts::sm80::launch<sdd_kernel<Traits, false, false>, SddArguments>);
        const int bytes = Traits::shared_bytes(arguments.stages);
        return start(arguments, Traits::kResident * device.multiprocessors, Traits::kThreads, bytes, bytes,
                     stream);
    }

    static constexpr int64_t kMaxParts = 16;
    static constexpr int64_t kMinStepsOfPart = 8;
    static constexpr int64_t kMaxWork = 1 << 30;  // tiles of all parts, which 32 bits number
};

}  // namespace ts::sm80

#define TS_ROW_sdd(name, math, tile_rows, tile_columns, warp_rows, warp_columns)     \
    namespace ts::sm80 {                                                             \
    const Kernel& name() {                                                           \
        static constexpr Kernel kRow =                                               \
            Sdd<math, tile_rows, tile_columns, warp_rows, warp_columns>::row(#name); \
        return kRow;                                                                 \
    }                                                                                \
    }
