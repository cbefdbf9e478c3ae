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

#include "common/problem.h"
#include "sm80/dds_epilogue.cuh"
#include "sm80/dds_loader.cuh"
#include "sm80/dds_traits.cuh"
#include "sm80/dds_weight_2_4.cuh"
#include "sm80/launch.cuh"

namespace ts::sm80 {

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
        const Matrix &input = problem.input(), &output = problem.output();
        const int64_t tiles = row_tiles(problem) * token_tiles(problem);
        if (tiles == 0) return cudaSuccess;
        const Occupancy fit = occupancy(device, number_bytes(problem));
        DdsArguments arguments{};
        arguments.input = input.data;
        arguments.input_ld = static_cast<uint32_t>(input.ld / Traits::kChunk);
        arguments.output = output.data;
        arguments.output_ld = output.ld;
        arguments.values = problem.values.data;
        arguments.bias = problem.bias;
        arguments.residual = problem.residual.data;
        arguments.residual_ld = problem.residual.ld;
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.output_layout = output.layout;
        arguments.activation = problem.activation;
        arguments.gate_activation = problem.gate_activation;
        arguments.gated = problem.gated;
        arguments.tokens = static_cast<int>(problem.tokens);
        arguments.row_tiles = static_cast<int>(row_tiles(problem));
        arguments.row_shift = log2_of_block(problem.row_block());
        arguments.k_shift = log2_of_block(problem.k_block());
        arguments.stages = fit.stages;
        arguments.lookahead = std::min(lookahead(fit.stages), kMostAhead<typename Traits::Input>);
        arguments.plan_key = plan_key(problem.pattern, problem.op, kPlan);
        arguments.metadata = problem.values.metadata;
        arguments.scales = problem.values.scales;
        arguments.x_scales = problem.x_scales;
        arguments.x_scales_ld = problem.x_scales_ld;
        arguments.offsets = problem.offsets;
        arguments.groups = problem.pattern.groups;
        arguments.group_features = static_cast<int>(problem.features());
        arguments.most_token_tiles = static_cast<int>(token_tiles(problem));
        arguments.plan_report = problem.plan_report;
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

#define TS_INSTANCE(name, kernel, op, math, weight, tile_tokens, tile_features, warp_tokens, warp_features) \
    namespace ts::sm80 {                                                                                    \
    const Kernel& name() {                                                                                  \
        static constexpr Kernel kRow =                                                                      \
            Dds<Op::op, math, weight, tile_tokens, tile_features, warp_tokens, warp_features>::row(#name);  \
        return kRow;                                                                                        \
    }                                                                                                       \
    }
