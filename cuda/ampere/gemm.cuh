// dds: dense activations times the block-sparse weight (sm_80, mma.sync).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Below, "features" are the columns of the result and k is what is summed over, in either direction.
// Operands: activations and results row-major or column-major, bf16, fp16, float32 (TF32, or three TF32
// products with float32's error) or float64; values [nnz, bn, bk] of the same dtype or, NT in 16 bits, 2:4;
// float32 sums, or float64. NT in 8 bits: X row-major and values int8 (int32 sums) or float8_e4m3fn (as fp16
// before 8.9, float32 sums), times a scale for each token and one for each feature; results row-major or
// column-major, bf16, fp16 or float32. Or float8_e4m3fn with scales inside of the sums, of 128 k of a token
// and of a block of 128 x 128, which is a step of a tile: its sums are multiplied by both as they are added
// to the tile's.
// A CTA computes tiles of kTileTokens x 128 features, one after another, in bands of 1024 tokens whose
// activations stay in L2. A tile's features belong to several block rows (see common/plan.h).
// Warps: 8, or 16 with half of the sums, which all load and multiply: warps that only load would leave the
// others 168 registers instead of 255, too few to hide the latency of 64 x 64 sums' fragments. 2:4 has half
// as much to multiply for what is loaded, and 4 more warps only load: 48 x 64 sums, for which 168 registers
// suffice, take 0.8 to 0.9 of the time of 64 x 64 sums whose warps load.
// K loop: the plan's steps of 128 bytes, those in which a block row of the tile has a block, through a ring
// of 2 to 8 stages (cp.async, mbarriers), on into the next tile. Warps skip the parts of W that do not exist.
// Grouped products: a tile has tokens and features of one group. CTAs count the tiles of each group first,
// from offsets that only they read.
// Chosen where its estimate is least among the kernels that compute the product.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ampere/epilogue.cuh"
#include "ampere/launch.cuh"
#include "ampere/weights.cuh"
#include "common/plan_view.cuh"
#include "common/problem.h"
#include "common/token_groups.h"

namespace ts::sm80 {

// Which tiles and steps a CTA of a dds kernel walks.

// Tiles in the order CTAs take them: tokens in bands whose input stays in L2 while the rows of W pass. These
// come with the most steps first, and last in every other band, so that no CTA has the longest tiles of all
// bands.
class DdsTiles {
  public:
    struct Place {
        int row_tile;
        int token_tile;
    };

    __device__ DdsTiles(int tile_tokens, int token_tiles, int row_tiles)
        : token_tiles_(token_tiles), row_tiles_(row_tiles), width_(kBandTokens / tile_tokens) {}

    __device__ int size() const { return token_tiles_ * row_tiles_; }
    __device__ Place at(int index) const {
        const int band = index / (width_ * row_tiles_), within = index % (width_ * row_tiles_);
        const int width = min(width_, token_tiles_ - band * width_);
        const int row = within / width;
        return {band % 2 == 0 ? row : row_tiles_ - 1 - row, band * width_ + within % width};
    }

  private:
    static constexpr int kBandTokens = 1024;

    int token_tiles_, row_tiles_;
    int width_;  // of a band, in tiles
};

// Schedule of a product with one weight. `kTokens`: of a tile.
template <int kTokens>
class DdsSchedule {
  public:
    struct Work {
        int row_tile;
        int first_token;
    };

    __device__ static void begin(const DdsArguments&, int*) {}

    __device__ DdsSchedule(const DdsArguments& arguments, const int*)
        : tiles_(kTokens, (arguments.tokens + kTokens - 1) / kTokens, arguments.row_tiles) {}

    __device__ int size() const { return tiles_.size(); }
    __device__ Work at(int index) const {
        const auto place = tiles_.at(index);
        return {place.row_tile, place.token_tile * kTokens};
    }

    // The arguments as they are for the results of a tile.
    template <class Result>
    __device__ static const DdsArguments& of_results(const DdsArguments& arguments, const Work&) {
        return arguments;
    }

  private:
    DdsTiles tiles_;
};

// Schedule of a grouped product: no tile has tokens of two groups. Tiles of the same features and one group's
// tokens follow one another, as they do with one weight; those of different groups share nothing.
template <int kTokens>
class GroupedDdsSchedule {
  public:
    struct Work {
        int row_tile;
        int first_token;
        int last_token;
        int group;
    };

    // Counts the tiles of tokens before each group's first: [groups + 1] in shared memory, which the first
    // warp writes, each lane for some groups.
    __device__ static void begin(const DdsArguments& arguments, int* tiles_before) {
        if (threadIdx.x >= 32) return;
        const int lane = threadIdx.x, most = arguments.most_token_tiles;
        const TileCount count{groups_of(arguments), kTokens, most};
        const int own = (arguments.groups + 31) / 32;
        const int first = min(lane * own, arguments.groups), last = min(first + own, arguments.groups);
        int sum = count.add(0, first, last, nullptr);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum = min(sum + other, most);
        }
        const int before = __shfl_up_sync(~0u, sum, 1);
        if (lane == 0) tiles_before[0] = 0;
        count.add(lane == 0 ? 0 : before, first, last, tiles_before);
    }

    __device__ GroupedDdsSchedule(const DdsArguments& arguments, const int* tiles_before)
        : arguments_(arguments),
          tiles_before_(tiles_before),
          tiles_(kTokens, tiles_before[arguments.groups], arguments.row_tiles) {}

    __device__ int size() const { return tiles_.size(); }
    __device__ Work at(int index) const {
        const auto place = tiles_.at(index);
        const int group = group_of_tile(tiles_before_, arguments_.groups, place.token_tile);
        const TokenSpan span = groups_of(arguments_).span(group);
        return {group * arguments_.row_tiles + place.row_tile,
                span.first + (place.token_tile - tiles_before_[group]) * kTokens, span.last, group};
    }

    // The arguments as they are for the results of a tile: its tokens end where the group does. Features are
    // numbered over all groups in plan and bias, and results lie as far before as the group's first one.
    template <class Result>
    __device__ static DdsArguments of_results(const DdsArguments& arguments, const Work& work) {
        DdsArguments own = arguments;
        const int64_t before = int64_t{work.group} * arguments.group_features;
        own.tokens = work.last_token;
        own.output_layout = Layout::row_major;
        own.output = static_cast<Result*>(arguments.output) - before;
        if (arguments.residual != nullptr)
            own.residual = static_cast<const Result*>(arguments.residual) - before;
        return own;
    }

  private:
    __device__ static TokenGroups groups_of(const DdsArguments& arguments) {
        return {arguments.offsets, arguments.groups, arguments.tokens};
    }

    const DdsArguments& arguments_;
    const int* tiles_before_;
    DdsTiles tiles_;
};

// Walks the steps of all tiles of this CTA.
template <class Schedule>
class DdsCursor {
  public:
    __device__ DdsCursor(const Schedule& schedule, const PlanView& plan)
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
            const int2 steps = plan_.tile<int2>(work.row_tile);
            step_ = steps.x;
            last_ = steps.x + steps.y;
            first_token_ = work.first_token;
            if (steps.y > 0) return;
        }
    }

    const Schedule& schedule_;
    const PlanView& plan_;
    int index_, step_, last_, first_token_;
};

// How the operands of the steps of a dds kernel come into the ring.

// One thread's share in filling the ring: of the input, its chunk of 16 bytes in a line is fixed, the lines
// are kLinesAtOnce apart; of the weight see its format. What does not depend on the step is computed once.
template <class Traits, bool kRowMajorInput, class Schedule>
class DdsLoader {
    using Input = typename Traits::Input;
    using InputTile = typename Traits::template InputTile<kRowMajorInput>;
    static constexpr int kChunk = Traits::kChunk;
    using Share = Shares<InputTile, Traits::kLoaders>;
    static constexpr int kLinesAtOnce = Share::kLinesAtOnce;
    static constexpr int kOwnLines = Share::kOwnLines;

    // One of two blocks of 16 that share a quarter of a step and its products may be missing. Its weights
    // are zeros, and the input must be, which otherwise could be NaN.
    static constexpr bool kFillsInput = Traits::Weight::kMayShareQuarters;

    // Threads that only load have the registers to keep where their lines of a tile begin.
    static constexpr bool kKeepsLines = Traits::kOnlyLoad && kRowMajorInput;
    struct KeptLines {
        int first_token = -1;
        const char* lines[kOwnLines];
    };
    struct Nothing {};

  public:
    __device__ DdsLoader(const DdsArguments& arguments, const Schedule& schedule, const PlanView& plan,
                         const Ring& ring, uint32_t stages)
        : arguments_(arguments),
          plan_(plan),
          ring_(ring),
          stages_(stages),
          cursor_(schedule, plan),
          line_(Share::line()),
          chunk_(threadIdx.x % kChunksPerLine),
          piece_shift_(min(arguments.k_shift, Traits::kStepShift)),
          weight_(arguments, plan) {
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
            copy_column_major(stage);
        weight_.copy(stage + Traits::kInputBytes);
        ring_.full(position_.stage).arrive_after_copies();
        position_.advance(ring_.stages());
        cursor_.next();
        if (!cursor_.done()) fetch();
    }

    // Loads all steps, for a thread that does nothing else.
    __device__ void load_all() {
        while (!cursor_.done()) load();
        wait_for_copies();
    }

  private:
    // Reads where the operands of the step lie; done one step ahead, to hide its latency.
    __device__ void fetch() {
        const int* k = plan_.k + cursor_.step() * plan_.pieces;
        if constexpr (kKeepsLines) find_lines();
        if constexpr (kRowMajorInput) {
            chunk_k_ = __ldg(k + (chunk_ * kChunk >> piece_shift_));
        } else {
#pragma unroll
            for (int i = 0; i < kOwnLines; ++i)
                line_k_[i] = __ldg(k + (line_ + i * kLinesAtOnce >> piece_shift_));
        }
        weight_.fetch(cursor_.step());
    }

    // Position of this thread's chunk or line in its piece.
    __device__ int chunk_in_piece() const { return chunk_ * kChunk & ((1 << piece_shift_) - 1); }
    __device__ int line_in_piece(int i) const { return line_ + i * kLinesAtOnce & ((1 << piece_shift_) - 1); }

    // Lines beyond the last token repeat it, and those of other groups are multiplied: neither results are
    // stored.
    __device__ void copy_row_major(uint32_t tile) const {
        if constexpr (kKeepsLines) return copy_lines(tile);
        const int token = cursor_.first_token() + line_, last = arguments_.tokens - 1;
        const int first_k = kFillsInput ? max(chunk_k_, 0) : chunk_k_;  // to zeros, too, belongs an address
        const char* source = address(arguments_.input, min(token, last), arguments_.input_ld) +
                             (first_k + chunk_in_piece()) * static_cast<int>(sizeof(Input));
        const uint32_t target = tile + InputTile::offset(line_, chunk_);
        const bool exists = !kFillsInput || chunk_k_ >= 0;
        const int left = max(last - token, 0);
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i) {
            const uint32_t chunks = min(i * kLinesAtOnce, left) * kChunkBytes;
            copy_async_if(kFillsInput || chunk_k_ >= 0, target + i * kLinesAtOnce * kLineBytes,
                          source + uint64_t{chunks} * arguments_.input_ld, exists ? kChunkBytes : 0);
        }
    }

    __device__ void copy_lines(uint32_t tile) const {
        const uint32_t offset = (chunk_k_ + chunk_in_piece()) * static_cast<int>(sizeof(Input));
        const uint32_t target = tile + InputTile::offset(line_, chunk_);
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i)
            copy_async_if(chunk_k_ >= 0, target + i * kLinesAtOnce * kLineBytes, kept_.lines[i] + offset);
    }
    __device__ void find_lines() {
        if (cursor_.first_token() == kept_.first_token) return;
        kept_.first_token = cursor_.first_token();
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i) {
            const int token = min(kept_.first_token + line_ + i * kLinesAtOnce, arguments_.tokens - 1);
            kept_.lines[i] = address(arguments_.input, token, arguments_.input_ld);
        }
    }

    __device__ void copy_column_major(uint32_t tile) const {
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i) {
            const char* source =
                address(arguments_.input, line_k_[i] + line_in_piece(i), arguments_.input_ld);
#pragma unroll
            for (int j = 0; j < Share::kOwnPanels; ++j) {
                const int panel = Share::panel() + j * Share::kPanelsAtOnce;
                const int within = panel * InputTile::kPanelExtent + chunk_ * kChunk;
                if (InputTile::kPanelExtent > Traits::kTileTokens && within >= Traits::kTileTokens) continue;
                const int token = cursor_.first_token() + within;
                const int bytes =
                    min(max(arguments_.tokens - token, 0), kChunk) * static_cast<int>(sizeof(Input));
                const uint32_t target = tile + panel * InputTile::kPanelBytes +
                                        InputTile::offset(line_ + i * kLinesAtOnce, chunk_);
                copy_async_if(line_k_[i] >= 0 && bytes > 0, target,
                              source + token * static_cast<int64_t>(sizeof(Input)), bytes);
            }
        }
    }

    __device__ static const char* address(const void* matrix, int line, uint32_t ld) {
        return static_cast<const char*>(matrix) + static_cast<uint64_t>(line) * ld * kChunkBytes;
    }

    const DdsArguments& arguments_;
    const PlanView& plan_;
    const Ring& ring_;
    uint32_t stages_;
    RingPosition position_;
    DdsCursor<Schedule> cursor_;
    int line_, chunk_;
    int piece_shift_;  // log2 of the k that one piece contributes to a step
    // The next step, -1 where there is none:
    int chunk_k_;  // k of the piece this thread's chunk lies in, where k runs along lines
    int line_k_[kRowMajorInput ? 1 : kOwnLines];  // k of the pieces this thread's lines lie in, where they
                                                  // run along k
    typename Traits::Weight::template Loader<Traits::kLoaders> weight_;
    std::conditional_t<kKeepsLines, KeptLines, Nothing> kept_;
};

// In the place of the loader of threads that only compute.
struct NoLoader {
    template <class... Arguments>
    __device__ explicit NoLoader(const Arguments&...) {}
    __device__ void load() const {}
};

template <class Traits, bool kRowMajorInput, class Schedule>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kResident)
    dds_kernel(const __grid_constant__ DdsArguments arguments) {
    // [stages][input, weight], a Tile each; [kWarps] staging memory; [stages] barriers; of grouped products
    // [groups + 1] numbers, see GroupedDdsSchedule.
    extern __shared__ __align__(128) char shared[];
    const uint32_t stages = shared_address(shared);
    char* const staging = shared + arguments.stages * Traits::kStageBytes;
    const Ring ring(shared_address(staging + Traits::kStagingBytes), arguments.stages);
    if (threadIdx.x == 0) ring.init(Traits::kLoaders, Traits::kComputers);
    auto* const numbers =
        reinterpret_cast<int*>(staging + Traits::kStagingBytes + Ring::bytes(arguments.stages));
    Schedule::begin(arguments, numbers);
    __syncthreads();

    const OwnPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    if (!plan.is_own) return;
    const Schedule schedule(arguments, numbers);
    using Loader = DdsLoader<Traits, kRowMajorInput, Schedule>;
    if constexpr (Traits::kOnlyLoad) {
        if (threadIdx.x < Traits::kLoaders) return Loader(arguments, schedule, plan, ring, stages).load_all();
    }
    std::conditional_t<Traits::kOnlyLoad, NoLoader, Loader> loader(arguments, schedule, plan, ring, stages);
    for (int ahead = 0; ahead < arguments.lookahead; ++ahead) loader.load();

    const int warp = (threadIdx.x - Traits::kFirstComputer) / 32, lane = threadIdx.x % 32;
    // The warps of one scheduler (every fourth) differ in their features, of which some may be absent.
    const int warp_token = warp % Traits::kTokenWarps * Traits::kWarpTokens;
    const int warp_feature = warp / Traits::kTokenWarps * Traits::kWarpFeatures;
    const typename Traits::template InputReader<kRowMajorInput> read_input(warp_token, lane);
    const typename Traits::WeightReader read_weight(warp_feature, lane);
    RingPosition position;
    bool ready = false;  // the stage of that position, as far as is known to threads that only compute
    for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
        const auto work = schedule.at(index);
        const int2 steps = plan.tile<int2>(work.row_tile);
        typename Traits::Sums sums = {};
        for (int step = steps.x; step < steps.x + steps.y; ++step) {
            const uint32_t mask = __ldg(plan.masks + step);
            loader.load();
            const typename Traits::StepScales scales(arguments, plan, step, work.first_token + warp_token,
                                                     lane);
            if (!ready) ring.full(position.stage).wait(position.parity);
            const uint32_t stage = stages + position.stage * Traits::kStageBytes;
            const uint32_t present = mask >> warp_feature / 4 & kAllPresent<Traits::kFeatureTiles>;
            if constexpr (Traits::kOnlyLoad) {
                // The barrier of the next step is tested among the products of this one, since the
                // answer takes as long as some products.
                const Barrier empty = ring.empty(position.stage);
                position.advance(arguments.stages);
                Traits::Weight::multiply(sums, read_input, stage, read_weight, stage + Traits::kInputBytes,
                                         present,
                                         [&] { ready = ring.full(position.stage).test(position.parity); });
                empty.arrive();
            } else {
                accumulate<typename Traits::Math>(
                    sums,
                    [&](typename Traits::Sums& to) {
                        Traits::Weight::multiply(to, read_input, stage, read_weight,
                                                 stage + Traits::kInputBytes, present,
                                                 [&] { ring.empty(position.stage).arrive(); });
                    },
                    scales);
                position.advance(arguments.stages);
            }
        }
        const auto& own = Schedule::template of_results<typename Traits::Result>(arguments, work);
        using Epilogue = std::conditional_t<Traits::kStages, DdsEpilogue<Traits>, DirectEpilogue<Traits>>;
        const Epilogue epilogue(own, plan.rows + work.row_tile * plan.group_rows,
                                staging + warp * Traits::kStagingFloats * sizeof(float));
        epilogue.store(sums, work.first_token + warp_token, warp_feature);
    }
}

// Host side: one row of the registry.
template <Op kOp, class Math, template <Op, class, int> class WeightFormat, int kTileTokens,
          int kTileFeatures, int kWarpTokens, int kWarpFeatures>
struct Dds {
    using Weight = WeightFormat<kOp, Math, kTileFeatures>;
    using Traits = DdsTraits<Math, Weight, kTileTokens, kWarpTokens, kWarpFeatures>;
    static constexpr PlanShape kPlan = {kTileFeatures, Traits::kStep};
    // True if it computes grouped products, too: in 8 bits not by the largest tiles, which few groups fill.
    static constexpr bool kGroups = !Traits::kScaled && (!Traits::kQuantized || kTileTokens <= 128);

    struct Occupancy {
        int resident;  // CTAs on a multiprocessor
        int stages;
    };

    // As many CTAs as registers allow, if shared memory holds enough stages of each, beside some other bytes.
    static Occupancy occupancy(const Device& device, int other_bytes) {
        constexpr int kReservedBytes = 1024;  // of each CTA, by the system
        for (int resident = Traits::kResident; resident > 0; --resident) {
            const int bytes =
                (device.shared_memory + kReservedBytes) / resident - kReservedBytes - other_bytes;
            const int stages = stages_within<Traits>(bytes);
            if (stages >= Traits::kMinStages) return {resident, stages};
        }
        return {0, 0};
    }

    static const char* refuses(const Problem& problem, const Device& device) {
        if (are_too_wide<Traits>(problem)) return kTooWide;
        if (!Traits::kColumnMajorInput && problem.input().layout == Layout::column_major)
            return "it reads row-major x only";
        if (problem.pattern.value_count() / Traits::kChunk > UINT32_MAX)
            return "values of more than 64 GiB are out of its reach";
        if (problem.input().layout == Layout::row_major &&
            problem.k_size() * element_size(problem.input_dtype) > INT32_MAX)
            return "activations of 2 GiB for a token are out of its reach";
        if (row_tiles(problem) * token_tiles(problem) > kMaxTiles) return "so much work is out of its reach";
        return occupancy(device, number_bytes(problem)).resident == 0
                   ? "the device has too little shared memory"
                   : nullptr;
    }

    static size_t workspace_size(const Problem&, const Device&, const Decision&) { return 0; }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void*,
                          void* stream) {
        const Matrix& input = problem.input();
        const int64_t tiles = row_tiles(problem) * token_tiles(problem);
        if (tiles == 0) return cudaSuccess;
        const Occupancy fit = occupancy(device, number_bytes(problem));
        DdsArguments arguments = arguments_of(problem, kPlan, row_tiles(problem), token_tiles(problem));
        arguments.input = input.data;
        arguments.input_ld = static_cast<uint32_t>(input.ld / Traits::kChunk);
        arguments.stages = fit.stages;
        arguments.lookahead = std::min(lookahead(fit.stages), kMostAhead<typename Traits::Input>);
        const int most = fit.resident * device.multiprocessors;
        const int bytes = Traits::shared_bytes(fit.stages) + number_bytes(problem);
        return start_of(problem)(arguments, static_cast<int>(tiles < most ? tiles : most), Traits::kThreads,
                                 bytes, device.shared_memory, stream);
    }

    static constexpr Kernel row(const char* name) {
        constexpr bool kIsDense = Weight::kStorages == bits_of(Storage::dense);
        Kernel row = make_row<Dds>(name, kIsDense ? "sm80_dds" : "sm80_dds_2_4");
        if (Traits::kWarps == 16) row.variant = "_16_warps";
        row.ops = bits_of(kOp);
        row.input_dtypes = bits_of(Math::kInput);
        if (Traits::kQuantized) row.result_dtypes = bits_of(DType::float32, DType::float16, DType::bfloat16);
        if (kGroups) row.grouped = bits_of(0, 1);
        if (Traits::kScaled) row.scales_inside = bits_of(1);
        row.precision = Math::kPrecision;
        row.plan = kPlan;
        row.tile_tokens = kTileTokens;
        row.tile_features = kTileFeatures;
        row.storages = Weight::kStorages;
        row.values_dtypes = Weight::kDTypes;
        row.accumulation = Math::kAccumulation;
        row.united_features = kTileFeatures;
        return row;
    }

  private:
    static constexpr int64_t kMaxTiles = 1 << 30;  // numbered in 32 bits

    using Schedule = DdsSchedule<kTileTokens>;
    using GroupedSchedule = GroupedDdsSchedule<kTileTokens>;
    using Start = decltype(&ts::sm80::launch<dds_kernel<Traits, true, Schedule>, DdsArguments>);

    static Start start_of(const Problem& problem) {
        if constexpr (Traits::kQuantized) {
            if (problem.result_dtype == DType::float16) return start_for<__half>(problem);
            if (problem.result_dtype == DType::bfloat16) return start_for<__nv_bfloat16>(problem);
        } else if (problem.input().layout == Layout::column_major) {
            return ts::sm80::launch<dds_kernel<Traits, false, Schedule>, DdsArguments>;
        }
        return start_for<typename Math::Result>(problem);
    }
    // Launches for row-major input, with results of a type.
    template <class Result>
    static Start start_for(const Problem& problem) {
        using OfResult = DdsTraits<WithResult<Math, Result>, Weight, kTileTokens, kWarpTokens, kWarpFeatures>;
        if constexpr (kGroups)
            if (problem.grouped())
                return ts::sm80::launch<dds_kernel<OfResult, true, GroupedSchedule>, DdsArguments>;
        return ts::sm80::launch<dds_kernel<OfResult, true, Schedule>, DdsArguments>;
    }

    // Bytes of the numbers of a grouped product in shared memory.
    static int number_bytes(const Problem& problem) {
        return problem.grouped() ? (problem.pattern.groups + 1) * static_cast<int>(sizeof(int)) : 0;
    }

    // Tiles along the block rows of each group.
    static int64_t row_tiles(const Problem& problem) {
        const int group_rows = kTileFeatures / problem.row_block();
        return (problem.features() / problem.row_block() + group_rows - 1) / group_rows;
    }
    // Tiles along the tokens of all groups, at most.
    static int64_t token_tiles(const Problem& problem) {
        if (problem.grouped()) return most_token_tiles(problem.tokens, problem.pattern.groups, kTileTokens);
        return (problem.tokens + kTileTokens - 1) / kTileTokens;
    }
};

}  // namespace ts::sm80

#define TS_ROW_dds(name, op, math, weight, tile_tokens, tile_features, warp_tokens, warp_features)         \
    namespace ts::sm80 {                                                                                   \
    const Kernel& name() {                                                                                 \
        static constexpr Kernel kRow =                                                                     \
            Dds<Op::op, math, weight, tile_tokens, tile_features, warp_tokens, warp_features>::row(#name); \
        return kRow;                                                                                       \
    }                                                                                                      \
    }
