// dds in float64: dense activations times the block-sparse weight (sm_90, mma.sync).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Operands: activations and results row-major or column-major, values [nnz, bn, bk]; all float64, as sums.
// CTA: tiles of 128 tokens x 128 features, one after another, in bands of 1024 tokens, which stay in L2.
// Warps: 1 loads, 8 multiply 16 features by all tokens of the tile. No other warp needs their weight, which
// goes from memory to registers while the step before is multiplied.
// K loop: the plan's steps of 16, those in which a block row of the tile has a block, through a ring of as
// many stages as shared memory holds (TMA). A warp visits those in which its own features have one: nothing
// but blocks is multiplied, and warps may be a whole ring apart.
// Grouped products: a tile has tokens and features of one group, see ampere/gemm.cuh.
// Chosen where its estimate is least among the kernels that compute the product.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/mma_sm90.hpp>

#include <algorithm>

#include "ampere/gemm.cuh"
#include "ampere/launch.cuh"
#include "ampere/math.cuh"
#include "ampere/weights.cuh"
#include "common/epilogue.cuh"
#include "common/plan_view.cuh"
#include "hopper/launch.cuh"
#include "tma/ring.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// float64 with the instructions of 9.0, which multiply twice as fast as those of 8.0: the kernels of sm80
// otherwise.

struct Of16x8x8 {
    __device__ static void fma(double (&c)[4], const double (&a)[4], const double (&b)[2]) {
        cute::SM90::MMA_16x8x8_F64F64F64F64_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0],
                                                    b[1], c[0], c[1], c[2], c[3]);
    }
};

using f64_k8 = sm80::Float64<Of16x8x8, 2>;

// A row of sdd of sm80 whose code is for 9.0 alone. No measurement of 16 bits speaks for it: what a tile
// unites and does not have costs more here.
template <class Host>
struct Float64Row {
    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, 0, 1)) return reason;
        return Host::refuses(problem, device);
    }
    static constexpr Kernel row(const char* name) {
        Kernel row = Host::row(name);
        row.family = "sm90_sdd_f64";
        row.min_compute_capability = 90;
        row.refuses = refuses;
        return row;
    }
};

// Arguments of the dds kernel in float64, and what its warps share.

struct Float64Arguments {
    CUtensorMap input;       // of pairs of float32
    sm80::DdsArguments dds;  // without `input` and what is known of it
};

struct Float64Tile {
    static constexpr int kTokens = 128;
    static constexpr int kFeatures = 128;
    static constexpr int kStep = 16;
    static constexpr int kWarpFeatures = 16;
    static constexpr int kWarps = kFeatures / kWarpFeatures;  // that multiply
    static constexpr int kThreads = 32 * kWarps + 128;
    static constexpr int kLineBytes = 128;
    static constexpr int kLine = kLineBytes / sizeof(double);
    static constexpr int kStageBytes = kTokens * kStep * sizeof(double);
    static constexpr int kMaxStages = 31;  // less than weights
};

// Places of the weight of a warp's features in a step, in pairs of values, but for two:
constexpr uint32_t kNoWeight = ~0u;
constexpr uint32_t kEndOfSteps = kNoWeight - 1;

// A CTA's warps tell each other, behind the stages. Steps are numbered over all tiles of the CTA.
struct Float64Progress {
    tma::Barrier full[Float64Tile::kMaxStages + 1];
    uint32_t weights[Float64Tile::kWarps][32];     // of each warp in a step, by its number modulo 32
    uint32_t candidates[Float64Tile::kWarps][32];  // likewise, of steps that are loaded next
    int needed[Float64Tile::kWarps];               // the first step that a warp that multiplies needs, and
    int loading;                                   // that the one that loads has not started
};

__device__ inline int read_now(const int& shared) {
    const int value = *static_cast<const volatile int*>(&shared);
    asm volatile("" ::: "memory");
    return value;
}
__device__ inline void write_now(int& shared, int value) {
    asm volatile("" ::: "memory");
    *static_cast<volatile int*>(&shared) = value;
}

// The warp that loads in the dds kernel in float64.

// Loads the activations of all steps, and tells the warps that multiply where their weight lies. Stages are
// not released one by one, since most warps need few of them: a stage is free once all warps say that they
// need later steps. Of 32 steps of a tile those come first that leave all schedulers with about as many
// blocks: warps can be no further apart than a ring, and block rows have runs of blocks and gaps.
template <Op kOp, bool kRowMajorInput, class Schedule>
class Float64Producer {
    using Tile = Float64Tile;

  public:
    __device__ Float64Producer(const Float64Arguments& arguments, const Schedule& schedule,
                               const PlanView& plan, char* stages, Float64Progress& progress)
        : arguments_(arguments),
          schedule_(schedule),
          plan_(plan),
          stages_(stages),
          progress_(progress),
          lane_(threadIdx.x % 32) {}

    __device__ void run() {
        for (int tile = blockIdx.x; tile < schedule_.size(); tile += gridDim.x) {
            const auto work = schedule_.at(tile);
            const int2 steps = plan_.tile<int2>(work.row_tile);
            for (int first = 0; first < steps.y; first += 32) {
                const int count = min(steps.y - first, 32);
                read(steps.x + first, lane_ < count);
                for (unsigned left = ~0u >> 32 - count; left != 0;) {
                    const int step = choose(left);
                    left &= ~(1u << step);
                    wait();
                    if (lane_ < Tile::kWarps)
                        progress_.weights[lane_][ring_ % 32] = progress_.candidates[lane_][step];
                    load(__shfl_sync(~0u, k_, step), work.first_token);
                    publish();
                }
            }
        }
        wait();
        if (lane_ < Tile::kWarps) progress_.weights[lane_][ring_ % 32] = kEndOfSteps;
        publish();
    }

  private:
    // Reads a step for each lane: k, and where the blocks of each warp's features lie.
    __device__ void read(int first, bool has_step) {
        const sm80::DdsArguments& own = arguments_.dds;
        const int* const slots = plan_.slots + (first + lane_) * plan_.group_rows;
        k_ = has_step ? __ldg(plan_.k + first + lane_) : 0;
        const int k = k_ & (1 << own.k_shift) - 1;
        blocks_ = 0;
#pragma unroll 4
        for (int i = 0; i < Tile::kWarps; ++i) {
            const int slot = has_step ? __ldg(slots + (16 * i >> own.row_shift)) : -1;
            const int feature = 16 * i & (1 << own.row_shift) - 1;
            const int within = kOp == Op::dds_nn ? k << own.row_shift | feature : feature << own.k_shift | k;
            const uint32_t at = (static_cast<uint32_t>(slot) << own.row_shift + own.k_shift - 1) + within / 2;
            progress_.candidates[i][lane_] = slot < 0 ? kNoWeight : at;
            if (slot >= 0) blocks_ += 1u << i % 4 * 8;
        }
        __syncwarp();
    }

    // The number of blocks of the scheduler that has most of them, less that of the one with the fewest.
    __device__ static unsigned difference(unsigned blocks) {
        const unsigned a = blocks & 0xff, b = blocks >> 8 & 0xff, c = blocks >> 16 & 0xff, d = blocks >> 24;
        return max(max(a, b), max(c, d)) - min(min(a, b), min(c, d));
    }

    __device__ int choose(unsigned left) {
        const unsigned own = left >> lane_ & 1 ? difference(all_blocks_ + blocks_) << 5 | lane_ : ~0u;
        const int step = __reduce_min_sync(~0u, own) & 31;
        all_blocks_ += __shfl_sync(~0u, blocks_, step);
        const unsigned a = all_blocks_ & 0xff, b = all_blocks_ >> 8 & 0xff, c = all_blocks_ >> 16 & 0xff,
                       d = all_blocks_ >> 24;
        all_blocks_ = __vminu4(all_blocks_ - min(min(a, b), min(c, d)) * 0x01010101u, 0x7f7f7f7f);
        return step;
    }

    // Until the stage of the next step is free.
    __device__ void wait() {
        while (ring_ - least_ >= arguments_.dds.stages)
            least_ = __reduce_min_sync(~0u, read_now(progress_.needed[lane_ % Tile::kWarps]));
    }

    __device__ void load(int k, int first_token) {
        if (lane_ == 0) {
            tma::Barrier& full = progress_.full[stage_];
            char* const to = stages_ + stage_ * Tile::kStageBytes;
            full.arrive_and_expect_tx(Tile::kStageBytes);
            constexpr int kBoxes = kRowMajorInput ? 1 : Tile::kTokens / Tile::kLine;
#pragma unroll
            for (int i = 0; i < kBoxes; ++i) {
                const int token = first_token + i * Tile::kLine;
                cute::SM90_TMA_LOAD_2D::copy(&arguments_.input, reinterpret_cast<uint64_t*>(&full),
                                             static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                             to + i * (Tile::kStageBytes / kBoxes),
                                             2 * (kRowMajorInput ? k : token), kRowMajorInput ? token : k);
            }
        }
        if (++stage_ == arguments_.dds.stages) stage_ = 0;
    }

    __device__ void publish() {
        __syncwarp();
        ++ring_;
        if (lane_ == 0) write_now(progress_.loading, ring_);
    }

    const Float64Arguments& arguments_;
    const Schedule& schedule_;
    const PlanView& plan_;
    char* stages_;
    Float64Progress& progress_;
    int lane_;
    int ring_ = 0, stage_ = 0, least_ = 0;
    int k_ = 0;                // of the lane's step
    unsigned blocks_ = 0;      // of the lane's step, for each scheduler in 8 bits
    unsigned all_blocks_ = 0;  // of all steps so far, less those that all schedulers have
};

// How the sums of a dds kernel in float64 become results.

// Sums of 16 features by 16 x 8 tokens of a warp: a lane has two neighbouring features, which fill a store of
// 16 bytes, of two tokens of each 8. Activations, residual and gate come later, to results that are read
// again: they would take the registers of the sums, or as much code for each.
using Float64Sums = double[16][4];

// `kRowMajorInput`: decides which tokens a lane has.
template <bool kRowMajorInput>
class Float64Epilogue {
  public:
    __device__ Float64Epilogue(const sm80::DdsArguments& arguments, const int* rows, int first_token)
        : arguments_(arguments), rows_(rows), first_token_(first_token), lane_(threadIdx.x % 32) {}

    __device__ void store(const Float64Sums& sums, int first_feature) const {
        const int64_t feature = output_feature(first_feature + lane_ / 4 * 2);
        if (feature < 0) return;
        const auto* const bias = static_cast<const double*>(arguments_.bias);
        const double first = bias == nullptr ? 0 : bias[feature],
                     second = bias == nullptr ? 0 : bias[feature + 1];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const double* const sum = sums[i / 2] + i % 2;
            write(token_of(i), feature, sum[0] + first, sum[2] + second);
        }
        if (arguments_.activation == Activation::none && arguments_.residual == nullptr) return;
#pragma unroll 1
        for (int i = 0; i < 32; ++i) {
            const int64_t token = token_of(i);
            if (token >= arguments_.tokens) continue;
            finish(token, feature);
            finish(token, feature + 1);
        }
    }

  private:
    // The token of a lane's `i`-th sums, see Float64Input.
    __device__ int token_of(int i) const {
        const int column = lane_ % 4;
        return first_token_ + (kRowMajorInput ? i / 2 * 8 + column + i % 2 * 4
                                              : i / 4 * 16 + column * 4 + i % 2 * 2 + i / 2 % 2);
    }

    // The output feature of one in the tile, or -1 beyond the matrix.
    __device__ int64_t output_feature(int feature) const {
        const int64_t row = __ldg(rows_ + (feature >> arguments_.row_shift));
        return row < 0 ? -1 : (row << arguments_.row_shift) + (feature & ((1 << arguments_.row_shift) - 1));
    }

    __device__ bool is_row_major() const { return arguments_.output_layout == Layout::row_major; }
    __device__ int64_t place(int64_t token, int64_t feature, int64_t ld) const {
        return is_row_major() ? token * ld + feature : feature * ld + token;
    }
    __device__ double* output() const { return static_cast<double*>(arguments_.output); }

    __device__ void write(int64_t token, int64_t feature, double first, double second) const {
        if (token >= arguments_.tokens) return;
        double* const target = output() + place(token, feature, arguments_.output_ld);
        if (is_row_major())
            *reinterpret_cast<double2*>(target) = make_double2(first, second);
        else
            target[0] = first, target[arguments_.output_ld] = second;
    }

    __device__ void finish(int64_t token, int64_t feature) const {
        double& result = output()[place(token, feature, arguments_.output_ld)];
        double value = activate(result, arguments_.activation);
        if (arguments_.residual != nullptr) {
            const double other = static_cast<const double*>(
                arguments_.residual)[place(token, feature, arguments_.residual_ld)];
            value = arguments_.gated ? value * activate(other, arguments_.gate_activation) : value + other;
        }
        result = value;
    }

    const sm80::DdsArguments& arguments_;
    const int* rows_;
    int first_token_;
    int lane_;
};

// The dds kernel in float64: which warps load and multiply.

// Reads operand B, 8 tokens by 8 of k, of 128 tokens and 16 of k in lines of 128 bytes that TMA swizzled.
// Which tokens and k a lane has is free as long as lanes of the weight and results have the same: they are
// such that eight lanes read all banks, two elements each. Of k those are neighbours, 2 and 3 of each 8 for
// lanes of one remainder.
template <bool kRowMajor>
class Float64Input {
  public:
    __device__ explicit Float64Input(int lane) {
        const int row = lane / 4, column = lane % 4;
        // Lines of tokens: 0, 4, 1, 5 and so on for the rows. Lines of k: neighbouring tokens go to two of
        // the operands.
        const int line = kRowMajor ? row / 2 + row % 2 * 4 : 2 * column, chunk = kRowMajor ? column : row;
        offset_ = line * 128 + (chunk ^ line) * 16;
    }

    // Operands 2 i and 2 i + 1 of half of the step.
    __device__ void load(double (&to)[2][2], uint32_t stage, int i, int half) const {
        if constexpr (kRowMajor) {
            const uint32_t from = stage + (offset_ ^ 64 * half) + 2048 * i;
            read(to[0][0], to[0][1], from);
            read(to[1][0], to[1][1], from + 1024);
        } else {
            const uint32_t from = stage + 1024 * half + 2048 * i;
            read(to[0][0], to[1][0], from + offset_);
            read(to[0][1], to[1][1], from + 128 + (offset_ ^ 16));
        }
    }

  private:
    __device__ static void read(double& first, double& second, uint32_t address) {
        asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(first), "=d"(second) : "r"(address));
    }

    uint32_t offset_;
};

// Reads operand A, 16 features by 8 of k of a block, from memory: two neighbours of k, or of features where
// the block lies along these, on each of two lines.
template <bool kTransposed>
class Float64Weight {
  public:
    __device__ Float64Weight(const sm80::DdsArguments& arguments, int lane)
        : line_(8 << (kTransposed ? arguments.row_shift : arguments.k_shift)), zero_(arguments.stages >> 16) {
        const int row = 2 * (lane / 4), column = 2 * (lane % 4);
        first_ = static_cast<const char*>(arguments.values) +
                 (kTransposed ? column * line_ + row * 8 : row * line_ + column * 8);
        // The compiler would work both out again for each load.
        asm volatile("" : "+l"(first_), "+r"(line_));
    }

    // Loads half of a step, if there is a block.
    __device__ void load(double2 (&to)[2][2], uint32_t at, int half) const {
        if (at >= kEndOfSteps) return;
        const char* const from = first_ + uint64_t{at} * 16 + half * 8 * (kTransposed ? line_ : 8);
        to[half][0] = read(from);
        to[half][1] = read(from + line_);
    }

    // As the instruction wants it: two features of one k first. Moves would be repeated for each product,
    // where the compiler reads a value from the registers that it was loaded to.
    __device__ void order(double (&a)[4], const double2 (&lines)[2]) const {
        a[0] = moved(lines[0].x), a[1] = moved(kTransposed ? lines[0].y : lines[1].x);
        a[2] = moved(kTransposed ? lines[1].x : lines[0].y), a[3] = moved(lines[1].y);
    }

  private:
    __device__ double moved(double value) const {
        return __hiloint2double(__double2hiint(value) ^ zero_, __double2loint(value) ^ zero_);
    }
    __device__ static double2 read(const char* from) {
        double2 pair;
        asm volatile("ld.global.nc.v2.f64 {%0, %1}, [%2];" : "=d"(pair.x), "=d"(pair.y) : "l"(from));
        return pair;
    }

    const char* first_;  // of the lane in the first block
    int line_;           // bytes of a block's line
    int zero_;           // as the compiler does not know
};

// Finds the steps in which a warp's features have a block, one after another, among those that are loading.
class Float64Steps {
  public:
    __device__ Float64Steps(Float64Progress& progress, int warp)
        : progress_(progress), warp_(warp), lane_(threadIdx.x % 32) {}

    // Goes on to the next step. False if it is not known yet.
    __device__ bool find() {
        while (present_ == 0) {
            window_ = needed_;
            const int count = min(read_now(progress_.loading) - window_, 32);
            if (count <= 0) return false;
            own_ = progress_.weights[warp_][(window_ + lane_) % 32];
            present_ = __ballot_sync(~0u, lane_ < count && own_ != kNoWeight);
            needed_ = window_ + count;
        }
        const int from = __ffs(present_) - 1;
        present_ &= present_ - 1;
        ring = window_ + from;
        at = __shfl_sync(~0u, own_, from);
        return true;
    }

    // Waits for it, and says that the steps before are not needed.
    __device__ void wait() {
        while (!find()) tell(needed_);
    }

    __device__ void tell(int needed) const {
        if (lane_ == 0) write_now(progress_.needed[warp_], needed);
    }
    // The first step that may be needed where none was found.
    __device__ int unknown() const { return needed_; }

    int ring;     // the step's number
    uint32_t at;  // where its weight lies

  private:
    Float64Progress& progress_;
    int warp_, lane_;
    int window_ = 0, needed_ = 0;  // first of the steps that were looked at, and of those that were not
    unsigned present_ = 0;         // of those that were
    uint32_t own_ = 0;             // the lane's of these
};

// Operands B of a step that are read ahead of their products, and of the next one.
constexpr int kOperandsAhead = 2;
using Float64Operands = double[2 * kOperandsAhead][2][2];

// Adds the products of one step, of which the first operands are there. Calls `ordered(half)` when the weight
// of half of the step is where it is multiplied from, and `read_next(i)` for the first operands of the next
// step. Returns bits of what was read last of this one.
template <class Weight, class Input, class Ordered, class ReadNext>
__device__ inline uint32_t multiply_step(Float64Sums& sums, const Weight& reader,
                                         const double2 (&weight)[2][2], const Input& input,
                                         Float64Operands& b, uint32_t stage, Ordered ordered,
                                         ReadNext read_next) {
    constexpr int kPairs = Float64Tile::kTokens / 16, kTurns = 2 * kPairs, kBuffers = 2 * kOperandsAhead;
    static_assert(kTurns % kBuffers == 0);
    double a[4];
    uint32_t last = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int ahead = turn + kOperandsAhead;
        if (ahead < kTurns)
            input.load(b[ahead % kBuffers], stage, ahead % kPairs, ahead / kPairs);
        else
            read_next(ahead - kTurns);
        if (turn % kPairs == 0) {
            reader.order(a, weight[turn / kPairs]);
            ordered(turn / kPairs);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) Of16x8x8::fma(sums[turn % kPairs * 2 + i], a, b[turn % kBuffers][i]);
        if (turn == kTurns - 1)
            last = __double2loint(b[turn % kBuffers][0][0]) ^ __double2loint(b[turn % kBuffers][1][0]);
    }
    return last;
}

template <Op kOp, bool kRowMajorInput, class Schedule>
__global__ void __launch_bounds__(Float64Tile::kThreads, 1)
    dds_f64_kernel(const __grid_constant__ Float64Arguments arguments) {
    using Tile = Float64Tile;
    // [stages] of activations; Float64Progress; of grouped products [groups + 1] numbers.
    extern __shared__ __align__(1024) char memory[];
    const sm80::DdsArguments& own = arguments.dds;
    auto& progress = *reinterpret_cast<Float64Progress*>(memory + own.stages * Tile::kStageBytes);
    auto* const numbers = reinterpret_cast<int*>(&progress + 1);
    if (threadIdx.x == 0) {
        for (int i = 0; i < own.stages; ++i) progress.full[i].init(1);
        for (int i = 0; i < Tile::kWarps; ++i) progress.needed[i] = 0;
        progress.loading = 0;
        cutlass::arch::fence_barrier_init();
    }
    Schedule::begin(own, numbers);
    __syncthreads();
    const OwnPlan plan(own.plan, own.plan_key, own.plan_report);
    if (!plan.is_own) return;
    const Schedule schedule(own, numbers);

    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (warp >= Tile::kWarps) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (warp == Tile::kWarps)
            Float64Producer<kOp, kRowMajorInput, Schedule>(arguments, schedule, plan, memory, progress).run();
        return;
    }
    cutlass::arch::warpgroup_reg_alloc<232>();
    const Float64Weight<kOp == Op::dds_nn> read_weight(own, lane);
    const Float64Input<kRowMajorInput> input(lane);
    // Half by half the weight of the next step takes the place of what is multiplied.
    double2 weight[2][2];
    Float64Steps next(progress, warp);
    const auto load_next = [&](int half) { read_weight.load(weight, next.at, half); };
    Float64Operands operands;
    int end = 0, stage = 0, round_start = 0;
    uint32_t parity = 0, from = 0;
    // Finds the stage of the next step's activations; false behind the last step.
    const auto place_next = [&] {
        for (; next.ring - round_start >= own.stages; parity ^= 1) round_start += own.stages;
        stage = next.ring - round_start;
        from = cute::cast_smem_ptr_to_uint(memory) + stage * Tile::kStageBytes;
        return next.at != kEndOfSteps;
    };
    const auto read_next = [&](int i) {
        if (i == 0) tma::wait(progress.full[stage], parity);
        input.load(operands[i], from, i, 0);
    };
    const auto wait_for_next = [&] {
        next.wait();
        load_next(0), load_next(1);
        if (!place_next()) return;
        for (int i = 0; i < kOperandsAhead; ++i) read_next(i);
    };
    wait_for_next();
    for (int tile = blockIdx.x; tile < schedule.size(); tile += gridDim.x) {
        const auto work = schedule.at(tile);
        end += plan.tile<int2>(work.row_tile).y;
        Float64Sums sums = {};
        while (next.ring < end) {
            const uint32_t current = from;
            const bool found = next.find();
            if (!found) next.at = kNoWeight;
            const bool reads = found && place_next();
            const uint32_t last =
                multiply_step(sums, read_weight, weight, input, operands, current, load_next, [&](int i) {
                    if (reads) read_next(i);
                });
            // Loads under way could be overtaken, so what is written depends on the last of them: no bit of
            // `warp` above the fifth is set, which the compiler does not know.
            __syncwarp();
            next.tell((found ? next.ring : next.unknown()) + (last & warp >> 8));
            if (!found) wait_for_next();
        }
        const auto& results = Schedule::template of_results<double>(own, work);
        Float64Epilogue<kRowMajorInput>(results, plan.rows + work.row_tile * plan.group_rows,
                                        work.first_token)
            .store(sums, warp * Tile::kWarpFeatures);
    }
}

// One row of the registry.
template <Op kOp>
struct DdsFloat64 {
    using Tile = Float64Tile;
    static constexpr PlanShape kPlan = {Tile::kFeatures, Tile::kStep};

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, 0, 1)) return reason;
        if (stages(problem, device) < kMinStages) return "the device has too little shared memory";
        if (row_tiles(problem) * token_tiles(problem) > kMost || problem.tokens > kMost)
            return "so much work is out of its reach";
        return nullptr;
    }

    static size_t workspace_size(const Problem&, const Device&, const Decision&) { return 0; }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void*,
                          void* stream) {
        const Matrix& input = problem.input();
        const int64_t tiles = row_tiles(problem) * token_tiles(problem);
        if (tiles == 0) return cudaSuccess;
        Float64Arguments arguments{};
        sm80::DdsArguments& own = arguments.dds;
        own = sm80::arguments_of(problem, kPlan, row_tiles(problem), token_tiles(problem));
        own.stages = stages(problem, device);
        if (const cudaError_t error = map(arguments.input, input, problem.tokens, problem.k_size()))
            return error;
        const auto start = problem.grouped()                   ? start_for<true, Grouped>
                           : input.layout == Layout::row_major ? start_for<true, Single>
                                                               : start_for<false, Single>;
        const int bytes = own.stages * Tile::kStageBytes + other_bytes(problem);
        return start(arguments, static_cast<int>(std::min<int64_t>(tiles, device.multiprocessors)),
                     Tile::kThreads, bytes, device.shared_memory, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = sm90::make_row<DdsFloat64>(name, "sm80_dds");  // estimated as those are
        row.instructions = Instructions::mma_sync;
        row.ops = bits_of(kOp);
        row.input_dtypes = bits_of(DType::float64);
        row.grouped = bits_of(0, 1);
        row.precision = Precision::highest;
        row.tile_tokens = Tile::kTokens;
        row.tile_features = Tile::kFeatures;
        row.storages = bits_of(Storage::dense);
        row.united_features = Tile::kWarpFeatures;
        return row;
    }

  private:
    static constexpr int kMinStages = 4;
    static constexpr int64_t kMost = 1 << 29;  // tiles and pairs of float32, numbered in 32 bits

    using Single = sm80::DdsSchedule<Tile::kTokens>;
    using Grouped = sm80::GroupedDdsSchedule<Tile::kTokens>;

    template <bool kRowMajorInput, class Schedule>
    static constexpr auto start_for =
        &sm80::launch<dds_f64_kernel<kOp, kRowMajorInput, Schedule>, Float64Arguments>;

    // Float64 is copied as pairs of float32, bit by bit.
    static cudaError_t map(CUtensorMap& map, const Matrix& input, int64_t tokens, int64_t k) {
        constexpr int kWords = Tile::kLineBytes / 4;
        if (input.layout == Layout::row_major)
            return tma::encode(map, DType::float32, input.data,
                               {{2 * k, 1, kWords}, {tokens, 2 * input.ld, Tile::kTokens}});
        return tma::encode(map, DType::float32, input.data,
                           {{2 * tokens, 1, kWords}, {k, 2 * input.ld, Tile::kStep}});
    }

    static int other_bytes(const Problem& problem) {
        const int numbers = problem.grouped() ? problem.pattern.groups + 1 : 0;
        return static_cast<int>(sizeof(Float64Progress)) + numbers * static_cast<int>(sizeof(int));
    }
    static int stages(const Problem& problem, const Device& device) {
        return std::min((device.shared_memory - other_bytes(problem)) / Tile::kStageBytes, Tile::kMaxStages);
    }

    // Tiles along the block rows of each group.
    static int64_t row_tiles(const Problem& problem) {
        const int group_rows = Tile::kFeatures / problem.row_block();
        return (problem.features() / problem.row_block() + group_rows - 1) / group_rows;
    }
    // Tiles along the tokens of all groups, at most.
    static int64_t token_tiles(const Problem& problem) {
        if (problem.grouped()) return most_token_tiles(problem.tokens, problem.pattern.groups, Tile::kTokens);
        return (problem.tokens + Tile::kTokens - 1) / Tile::kTokens;
    }
};

}  // namespace ts::sm90

#define TS_ROW_dds_f64(name, op) TS_SM90_ROW(name, DdsFloat64<Op::op>)
