// Wgrad in float64 for blocks of 16 x 16 (sm_90, mma.sync).
//   W[n,k] (+)= sum over tokens t of Y[t,n] * X[t,k], for the kept blocks only, in their slots.
// Operands: Y and X row-major, through TMA.
// CTA: half of the blocks of a tile of common/list_plan.h, up to 64, and the units of 64 features of Y and of
// X in which they lie.
// Warps: 1 loads, 8 multiply a list of up to 8 blocks each and keep their sums in registers.
// Loop over tokens: steps of 8 through a ring of 6 stages, or of 3 where there are more than 9 units.
// Features of X are read for each block, and those of Y where they change.
// Split: tiles of the last round are cut over the tokens; a second kernel adds the sums in a fixed order.
// Chosen where its estimate is least.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "ampere/launch.cuh"
#include "ampere/wgrad.cuh"
#include "common/list_plan.h"
#include "common/plan_view.cuh"
#include "hopper/float64.cuh"
#include "hopper/launch.cuh"
#include "tma/ring.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// The sdd kernel in float64 for blocks of 16 x 16: which warps load and multiply.

struct Float64ListArguments {
    CUtensorMap y;  // of pairs of float32
    CUtensorMap x;
    const PlanHeader* plan;
    double* values;
    double2* partial;  // [kMostPartials][kSums / 2 * kComputers]
    int steps;         // of tokens
    int ctas;
    bool accumulate;
    int plan_key;  // that the plan must have
    PlanReport plan_report;
};

// A CTA has half of the blocks of a plan's tile, which are the lists of half as many warps.
struct Float64ListTile {
    static constexpr int kWarps = kListWarps / 2;  // that multiply
    static constexpr int kComputers = 32 * kWarps;
    static constexpr int kThreads = kComputers + 128;
    static constexpr int kBlocks = kListBlocks;
    static constexpr int kBlockSums = 16 * 16 / 32;  // of a lane
    static constexpr int kSums = kBlocks * kBlockSums;
    static constexpr int kStep = 8;  // tokens
    static constexpr int kStripBytes = 16 * kStep * sizeof(double);
    static constexpr int kUnitBytes = kListUnit * kStep * sizeof(double);
    // A step takes one place in shared memory, or two.
    static constexpr int kPlaceUnits = kListUnits / 2;
    static constexpr int kPlaceBytes = kPlaceUnits * kUnitBytes;
    static constexpr int kPlaces = 6;
    static constexpr int kMostRounds = 4;  // of parts of tiles

    struct Shared {
        // Units are [4 strips][8 tokens][16 features], in lines of 128 bytes.
        alignas(1024) char places[kPlaces * kPlaceBytes];
        tma::Barrier full[kPlaces];
        int needed[kWarps];  // the first place that a warp needs, of all that were ever filled
    };
    static constexpr int kSharedBytes = sizeof(Shared);
};

struct Float64ListWork {
    int half;  // 2 * tile, and 1 for the second half
    int first_step, last_step;
    int partial;  // place of the sums in the workspace, or -1 where they are all
};

// As many halves of tiles as fill whole rounds of all CTAs, and the others in parts over the tokens, so that
// CTAs end together.
class Float64ListSchedule {
  public:
    __device__ Float64ListSchedule(int tiles, int steps, int ctas)
        : steps_(steps), whole_(2 * tiles / ctas * ctas), split_(2 * tiles - whole_), parts_(1) {
        constexpr int kMostParts = 16, kMinSteps = 16;
        float least = 2;
        for (int parts = 1; parts <= kMostParts; ++parts) {
            const int rounds = (split_ * parts + ctas - 1) / ctas;
            if (rounds > Float64ListTile::kMostRounds || (parts > 1 && steps < parts * kMinSteps)) break;
            constexpr float kEach = 0.01f;  // share of the time of a half that another part costs
            const float time = static_cast<float>(rounds) / static_cast<float>(parts) + kEach * parts;
            if (time < least) least = time, parts_ = parts;
        }
    }

    __device__ int size() const { return whole_ + split_ * parts_; }
    // Halves whose sums are in parts, from this one on.
    __device__ int first_split() const { return whole_; }
    __device__ int split() const { return parts_ == 1 ? 0 : split_; }
    __device__ int parts() const { return parts_; }

    __device__ Float64ListWork at(int index) const {
        if (index < whole_ || parts_ == 1) return {index, 0, steps_, -1};
        const int place = index - whole_, half = place % split_, part = place / split_;
        return {whole_ + half, part * steps_ / parts_, (part + 1) * steps_ / parts_, place};
    }

  private:
    int steps_, whole_, split_, parts_;
};

// The units of y that a half needs, and those of x, which follow in shared memory.
struct Float64ListUnits {
    int first_y, of_y, of_x, tile_y;

    __device__ Float64ListUnits(const PlanView& plan, int half) {
        const int4 tile = plan.tile<int4>(half / 2);
        const int lane = threadIdx.x % 32;
        const int* const masks = plan.masks + half * (kListTileBlocks / 2);
        int first = kListUnits, last = -1;
#pragma unroll
        for (int i = 0; i < kListTileBlocks / 64; ++i) {
            const unsigned mask = __ldg(masks + 32 * i + lane);
            const int unit = static_cast<int>(mask >> 16 & 0x7fff) / (kListUnit / 16);
            if (mask != 0) first = min(first, unit), last = max(last, unit);
        }
        first_y = __reduce_min_sync(~0u, first);
        of_y = max(__reduce_max_sync(~0u, last) + 1 - first_y, 0);
        tile_y = tile.x;
        of_x = of_y == 0 ? 0 : tile.y;
    }
    __device__ int all() const { return of_y + of_x; }
    __device__ int places() const { return all() > Float64ListTile::kPlaceUnits ? 2 : 1; }
    // The place of 16 features of the tile's units in a step.
    __device__ uint32_t offset_y(int strip) const {
        return (strip - 4 * first_y) * Float64ListTile::kStripBytes;
    }
    __device__ uint32_t offset_x(int strip) const {
        return (strip - 4 * (tile_y - of_y)) * Float64ListTile::kStripBytes;
    }
};

// Places that steps take one after another. Those that take two begin at an even one.
struct Float64ListPlace {
    int next = 0;         // of all that were ever filled
    uint32_t parity = 0;  // a bit for each place

    // Goes on to the next step and returns its place.
    __device__ int take(int places) {
        next += next & places - 1;
        const int place = next % Float64ListTile::kPlaces;
        next += places;
        return place;
    }
    // Parity of the round of that place.
    __device__ uint32_t flip(int place) {
        parity ^= 1u << place;
        return ~parity >> place & 1;
    }
};

__device__ inline void load_lists(const Float64ListArguments& arguments, const PlanView& plan,
                                  const Float64ListSchedule& schedule, Float64ListTile::Shared& shared) {
    using Tile = Float64ListTile;
    const int lane = threadIdx.x % 32;
    Float64ListPlace at;
    int least = 0;
    for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
        const Float64ListWork work = schedule.at(index);
        const Float64ListUnits units(plan, work.half);
        const int unit = lane < units.of_y ? units.first_y + lane : units.tile_y + lane - units.of_y;
        const int feature = lane < units.all() ? __ldg(plan.k + work.half / 2 * kListUnits + unit) : -1;
        const CUtensorMap* const map = lane < units.of_y ? &arguments.y : &arguments.x;
        for (int step = units.all() == 0 ? work.last_step : work.first_step; step < work.last_step; ++step) {
            const int place = at.take(units.places());
            while (at.next - least > Tile::kPlaces)
                least = __reduce_min_sync(
                    ~0u, *static_cast<const volatile int*>(&shared.needed[lane % Tile::kWarps]));
            tma::Barrier& full = shared.full[place];
            if (lane == 0) full.arrive_and_expect_tx(units.all() * Tile::kUnitBytes);
            __syncwarp();
            if (feature >= 0)
                cute::SM90_TMA_LOAD_3D::copy(
                    map, reinterpret_cast<uint64_t*>(&full),
                    static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                    shared.places + place * Tile::kPlaceBytes + lane * Tile::kUnitBytes, 0,
                    step * Tile::kStep, feature / 16);
            __syncwarp();
        }
    }
}

// The place of a lane's part of a block: of 2 lines, 4 neighbours each. Which features a lane has follows
// from how operands are read.
class Float64ListBlock {
  public:
    __device__ Float64ListBlock(double* values, int slot, int lane)
        : at_(slot < 0 ? nullptr : values + int64_t{slot} * 256 + lane / 4 * 32 + lane % 4 * 4) {}

    __device__ void store(double (&sums)[8], bool accumulate) const {
        if (at_ == nullptr) return;
#pragma unroll
        for (int line = 0; line < 2; ++line)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                auto* const to = reinterpret_cast<double2*>(at_ + 16 * line + 2 * pair);
                double2 sum = make_double2(sums[2 * line + pair], sums[4 + 2 * line + pair]);
                if (accumulate) {
                    const double2 before = *to;
                    sum.x += before.x, sum.y += before.y;
                }
                *to = sum;
            }
    }

  private:
    double* at_;
};

// Reads 16 features of 8 tokens: two neighbouring features of two tokens for each lane.
__device__ inline void load_strip(double (&to)[4], uint32_t address) {
    // Lines of 128 bytes are swizzled, and that of the second token is the next one.
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(to[0]), "=d"(to[1]) : "r"(address));
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(to[2]), "=d"(to[3]) : "r"((address ^ 16) + 128));
}

// One warp's products of its blocks of all tiles.
class Float64ListConsumer {
    using Tile = Float64ListTile;

  public:
    __device__ Float64ListConsumer(const Float64ListArguments& arguments, Tile::Shared& shared, int warp)
        : arguments_(arguments), shared_(shared), warp_(warp), lane_(threadIdx.x % 32) {
        const int line = lane_ % 4 * 2;
        offset_ = line * 128 + (lane_ / 4 ^ line) * 16;
    }

    __device__ void run(const PlanView& plan, const Float64ListSchedule& schedule) {
        for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
            const Float64ListWork work = schedule.at(index);
            const Float64ListUnits units(plan, work.half);
            if (units.all() == 0) continue;
            const int list = (work.half * Tile::kWarps + warp_) * Tile::kBlocks;
            const int count = read_list(plan.masks + list, units);
            double sums[Tile::kBlocks][Tile::kBlockSums] = {};
            const int steps = work.last_step - work.first_step;
            if (count > Tile::kBlocks / 2)
                multiply<Tile::kBlocks>(sums, steps, units.places());
            else
                multiply<Tile::kBlocks / 2>(sums, steps, units.places());
            if (work.partial >= 0)
                store_partial(sums, work.partial);
            else
                store(sums, plan.slots + list);
        }
    }

  private:
    // Returns the number of blocks.
    __device__ int read_list(const int* masks, const Float64ListUnits& units) {
        int count = 0;
        changes_ = 0;
#pragma unroll
        for (int i = 0; i < Tile::kBlocks; ++i) {
            const unsigned mask = __shfl_sync(~0u, __ldg(masks + i), 0);
            at_x_[i] = mask == 0 ? 0 : units.offset_x(mask & 0xffff);
            at_y_[i] = mask == 0 ? 0 : units.offset_y(mask >> 16 & 0x7fff);
            changes_ |= mask >> 31 << i;
            count += mask != 0;
        }
        return count;
    }

    // Multiplies the first `kCount` blocks of the list. Features of x are read some blocks ahead, and those
    // of y where they change.
    template <int kCount>
    __device__ void multiply(double (&sums)[Tile::kBlocks][Tile::kBlockSums], int steps, int places) {
        constexpr int kAhead = 2;
        for (int step = 0; step < steps; ++step) {
            const int place = at_.take(places);
            tma::wait(shared_.full[place], at_.flip(place));
            const uint32_t base =
                cute::cast_smem_ptr_to_uint(shared_.places) + place * Tile::kPlaceBytes + offset_;
            double y[4], x[kAhead + 1][4];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) load_strip(x[i], base + at_x_[i]);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                if (i + kAhead < kCount) load_strip(x[(i + kAhead) % (kAhead + 1)], base + at_x_[i + kAhead]);
                if (changes_ >> i & 1) load_strip(y, base + at_y_[i]);
                const double (&from)[4] = x[i % (kAhead + 1)];
                auto& first = reinterpret_cast<double (&)[4]>(sums[i][0]);
                auto& second = reinterpret_cast<double (&)[4]>(sums[i][4]);
                Of16x8x8::fma(first, y, {from[0], from[2]});
                Of16x8x8::fma(second, y, {from[1], from[3]});
            }
            // The value written depends on the last of what was read, which could be overtaken: no bit of
            // `warp_` above the fifth is set, which the compiler does not know.
            const int last = __double2loint(x[(kCount - 1) % (kAhead + 1)][3]) ^ __double2loint(y[3]);
            __syncwarp();
            if (lane_ == 0)
                *static_cast<volatile int*>(&shared_.needed[warp_]) = at_.next + (last & warp_ >> 8);
        }
    }

    __device__ void store(double (&sums)[Tile::kBlocks][Tile::kBlockSums], const int* slots) const {
#pragma unroll
        for (int i = 0; i < Tile::kBlocks; ++i)
            Float64ListBlock(arguments_.values, __ldg(slots + i), lane_)
                .store(sums[i], arguments_.accumulate);
    }

    __device__ void store_partial(const double (&sums)[Tile::kBlocks][Tile::kBlockSums], int partial) const {
        double2* const to =
            arguments_.partial + (int64_t{partial} * Tile::kWarps + warp_) * (Tile::kSums * 16) + lane_;
#pragma unroll
        for (int i = 0; i < Tile::kSums / 2; ++i)
            to[32 * i] = make_double2(sums[i / 4][i % 4 * 2], sums[i / 4][i % 4 * 2 + 1]);
    }

    const Float64ListArguments& arguments_;
    Tile::Shared& shared_;
    int warp_, lane_;
    uint32_t offset_;
    uint32_t at_x_[Tile::kBlocks];  // in a step
    uint32_t at_y_[Tile::kBlocks];
    uint32_t changes_;  // bit i: block i has other features of y than the one before it
    Float64ListPlace at_;
};

__global__ void __launch_bounds__(Float64ListTile::kThreads, 1)
    sdd_f64_lists_kernel(const __grid_constant__ Float64ListArguments arguments) {
    using Tile = Float64ListTile;
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<Tile::Shared*>(memory);
    if (threadIdx.x == 0) {
        for (tma::Barrier& full : shared.full) full.init(1);
        for (int& needed : shared.needed) needed = 0;
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    const OwnPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    if (!plan.is_own) return;
    const Float64ListSchedule schedule(plan.tile_count, arguments.steps, arguments.ctas);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= Tile::kWarps) {
        cutlass::arch::warpgroup_reg_dealloc<24>();
        if (warp == Tile::kWarps) load_lists(arguments, plan, schedule, shared);
    } else {
        cutlass::arch::warpgroup_reg_alloc<240>();
        Float64ListConsumer(arguments, shared, warp).run(plan, schedule);
    }
}

// Adds the parts of the sums of the last halves, in their order. A warp has a block at a time.
__global__ void __launch_bounds__(256)
    sdd_f64_lists_reduce(const __grid_constant__ Float64ListArguments arguments) {
    using Tile = Float64ListTile;
    if (arguments.plan->key != arguments.plan_key) return;
    const OwnPlan plan(arguments.plan, arguments.plan_key, arguments.plan_report);
    const Float64ListSchedule schedule(plan.tile_count, arguments.steps, arguments.ctas);
    const int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
    constexpr int kBlocks = Tile::kWarps * Tile::kBlocks;  // of a half
    for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < schedule.split() * kBlocks; i += warps) {
        const int slot = __ldg(plan.slots + schedule.first_split() * kBlocks + i);
        if (slot < 0) continue;
        double sums[Tile::kBlockSums] = {};
        for (int part = 0; part < schedule.parts(); ++part) {
            const double2* const from =
                arguments.partial +
                (int64_t{part} * schedule.split() * kBlocks + i) * (Tile::kBlockSums * 16) + lane;
#pragma unroll
            for (int j = 0; j < Tile::kBlockSums / 2; ++j) {
                const double2 pair = __ldcs(from + 32 * j);
                sums[2 * j] += pair.x, sums[2 * j + 1] += pair.y;
            }
        }
        Float64ListBlock(arguments.values, slot, lane).store(sums, arguments.accumulate);
    }
}

// One row of the registry.
struct SddFloat64Lists {
    using Tile = Float64ListTile;
    static constexpr PlanShape kPlan = kListPlan;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (const char* reason = sm90::refuses(device, Tile::kSharedBytes, 1)) return reason;
        if (!are_listed_blocks(problem.pattern)) return "its blocks are 16 x 16";
        if (problem.y.layout != Layout::row_major || problem.x.layout != Layout::row_major)
            return "it reads row-major y and x only";
        return problem.tokens > kMostTokens ? "so many tokens are out of its reach" : nullptr;
    }

    static size_t workspace_size(const Problem& problem, const Device& device, const Decision&) {
        if (problem.pattern.nnz == 0) return 0;
        constexpr size_t kPartial = size_t{Tile::kSums} * Tile::kComputers * sizeof(double);
        return Tile::kMostRounds * device.multiprocessors * kPartial;
    }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void* workspace,
                          void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        Float64ListArguments arguments{};
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.values = static_cast<double*>(problem.values.data);
        arguments.partial = static_cast<double2*>(workspace);
        arguments.steps = static_cast<int>((problem.tokens + Tile::kStep - 1) / Tile::kStep);
        arguments.ctas = device.multiprocessors;
        arguments.accumulate = problem.accumulate;
        arguments.plan_key = plan_key(problem.pattern, problem.op, kPlan);
        arguments.plan_report = problem.plan_report;
        if (problem.tokens > 0) {
            const Pattern& pattern = problem.pattern;
            if (const cudaError_t error = map(arguments.y, problem.y, problem.tokens, pattern.out_features))
                return error;
            if (const cudaError_t error = map(arguments.x, problem.x, problem.tokens, pattern.in_features))
                return error;
        }
        if (const cudaError_t error = sm80::launch<sdd_f64_lists_kernel>(
                arguments, arguments.ctas, Tile::kThreads, Tile::kSharedBytes, Tile::kSharedBytes, stream))
            return error;
        return sm80::launch<sdd_f64_lists_reduce>(arguments, 2 * arguments.ctas, 256, 0, 0, stream);
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<SddFloat64Lists>(name, "sm90_sdd_narrow");
        row.instructions = Instructions::mma_sync;
        row.ops = bits_of(Op::sdd_tn);
        row.input_dtypes = bits_of(DType::float64);
        row.result_dtypes = bits_of(DType::float64);
        row.precision = Precision::highest;
        row.tile_features = kListUnit;
        row.tile_values = kListTileValues / 2;
        row.step_time = 7;  // about; tiles are split in another way, wherever it helps
        return row;
    }

  private:
    static constexpr int64_t kMostTokens = 1 << 30;

    // Float64 is copied as pairs of float32, bit by bit, in strips of 16 features.
    static cudaError_t map(CUtensorMap& map, const Matrix& matrix, int64_t tokens, int64_t features) {
        return tma::encode(
            map, DType::float32, matrix.data,
            {{32, 1, 32}, {tokens, 2 * matrix.ld, Tile::kStep}, {features / 16, 32, kListUnit / 16}});
    }
};

}  // namespace ts::sm90

#define TS_ROW_sdd_f64_lists(name) TS_SM90_ROW(name, SddFloat64Lists)

// The kernel of ampere/wgrad.cuh with these instructions.
#define TS_ROW_sdd_f64(name, math, tile_rows, tile_columns, warp_rows, warp_columns) \
    TS_SM90_ROW(name, Float64Row<sm80::Sdd<math, tile_rows, tile_columns, warp_rows, warp_columns>>)
