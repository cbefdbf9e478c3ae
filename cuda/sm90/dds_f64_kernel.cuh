// The dds kernel in float64: which warps load and multiply.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/dds_f64_epilogue.cuh"
#include "sm90/dds_f64_producer.cuh"
#include "sm90/f64.cuh"

namespace ts::sm90 {

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

    // Of half of the step, if there is a block.
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
    // Where the activations of the next step will be; false behind the last step.
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

}  // namespace ts::sm90
