// dds for decode and small batches, which are bound by reading W (sm_80, mma.sync).
//   NT: Y[M,N] = X[M,K] * W[N,K]^T      NN: X[M,K] = Y[M,N] * W[N,K]
// Operands: activations row-major, bf16 or fp16; values [nnz, bn, bk] of the same dtype or, NT alone, 2:4, or
// int8, float8_e4m3fn or int4 with scales; results row-major or column-major; float32 sums.
// A CTA computes 16, 32 or 64 features of one block row (NN: block column) for 8 to 64 tokens.
// Warps: up to 8, in teams of one or, where many tokens make copies of x a burden, of two or four that share
// what they copy. The teams share the row's blocks evenly and add up their sums in shared memory in the end.
// K loop: each team walks its share in slices of 64 or 128 k, through a ring of its own of 2 or 3 stages
// (cp.async): that keeps more bytes under way than registers could hold, and no team waits for another.
// Grouped products: a CTA computes its features for all tokens of its group, 16 at a time, and ends at once
// where the group has none: the values of such groups are not read.
// Chosen where its estimate is least, for at most 1024 tokens, of all groups together.
#pragma once

#include <algorithm>

#include "common/problem.h"
#include "common/token_groups.h"
#include "sm80/async.cuh"
#include "sm80/decode_arguments.cuh"
#include "sm80/decode_compressed.cuh"
#include "sm80/decode_epilogue.cuh"
#include "sm80/decode_int4.cuh"
#include "sm80/decode_loader.cuh"
#include "sm80/decode_traits.cuh"
#include "sm80/decode_weight.cuh"
#include "sm80/launch.cuh"
#include "sm80/math.cuh"

namespace ts::sm80 {

// The arguments as they are for one group, as if there were no other.
template <class Traits>
__device__ inline DecodeArguments of_group(const DecodeArguments& arguments, int group, int last_token) {
    DecodeArguments own = arguments;
    const int64_t first_feature = int64_t{group} * arguments.group_features;
    own.tokens = last_token;
    own.output_layout = Layout::row_major;
    own.rows.ptr += first_feature >> arguments.row_shift;
    if (arguments.bias != nullptr)
        own.bias = static_cast<const typename Traits::Result*>(arguments.bias) + first_feature;
    return own;
}

template <class Traits>
using DecodeInput = typename Traits::Weight::template Input<Traits::kTokens>;

template <class Traits>
__device__ inline void multiply_slice(DecodeSums<Traits>& sums, const typename Traits::Weight::Reader& weight,
                                      const DecodeInput<Traits>& input, uint32_t stage, int half) {
    using Weight = typename Traits::Weight;
    constexpr int kTokenTiles = Traits::kWarpTokenTiles, kTiles = Weight::kTiles;
    constexpr int kSteps = Traits::kSlice / Weight::kStep / Traits::kHalves;
    static_assert(kSteps > 0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const int step = half * kSteps + i;
        decltype(weight.load(stage, step, 0)) a[Traits::kWarpRowTiles];
#pragma unroll
        for (int m = 0; m < Traits::kWarpRowTiles; ++m) a[m] = weight.load(stage, step, m);
#pragma unroll
        for (int part = 0; part < Weight::kParts; ++part) {
            Fragment<4> b[(kTokenTiles + kTiles - 1) / kTiles];
#pragma unroll
            for (int n = 0; n < (kTokenTiles + kTiles - 1) / kTiles; ++n)
                b[n] = input.load(stage, step * Weight::kParts + part, n);
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                for (int m = 0; m < Traits::kWarpRowTiles; ++m)
                    Weight::multiply(sums[m][n], a[m], b[n / kTiles], part, n % kTiles);
        }
    }
}

constexpr int kMaxDecodeWarps = 8;

// Waits for the warps of a team.
template <int kTeam>
__device__ inline void sync_team(int team) {
    if constexpr (kTeam == 1)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * kTeam) : "memory");
}

struct DecodePlace {
    int feature, token;
};

// Computes some features of some tokens, those from `place()` on.
// `shared`: [teams][kStages] stages; in their place, at last, sums [teams][kHalves], see DecodeTraits.
template <class Traits, bool kGrouped, class Place>
__device__ inline void decode(const DecodeArguments& arguments, char* shared, Place place) {
    constexpr int kTeam = Traits::kTeam, kHalves = Traits::kHalves;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team = warp / kTeam, member = warp % kTeam, teams = blockDim.x / (32 * kTeam);
    const int half = member % kHalves, rows_and_tokens = member / kHalves;
    const int first_row = rows_and_tokens % Traits::kRowWarps * Traits::kWarpRows;
    const int first_token = rows_and_tokens / Traits::kRowWarps * Traits::kWarpTokens;
    const auto [feature, token] = place();
    const uint32_t ring = shared_address(shared) + team * Traits::kRingBytes;
    DecodeLoader<Traits> loader(arguments, feature, token, team, teams, ring, threadIdx.x % (32 * kTeam));
    const int slices = loader.slices();
#pragma unroll 1
    for (int i = 0; i < Traits::kStages; ++i) loader.load();

    const typename Traits::Weight::Reader read_weight(arguments, lane, first_row);
    const DecodeInput<Traits> read_input(lane, first_token);
    DecodeSums<Traits> sums = {};
    uint32_t stage = ring;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        wait_for_copies<Traits::kStages - 1>();
        sync_team<kTeam>(team);
        multiply_slice<Traits>(sums, read_weight, read_input, stage, half);
        sync_team<kTeam>(team);
        loader.load();
        stage = stage == ring + Traits::kRingBytes - Traits::kStageBytes ? ring : stage + Traits::kStageBytes;
    }
    char* const own = shared + (team * kHalves + half) * Traits::kSumBytes;
    stage_sums<Traits>(sums, reinterpret_cast<float*>(own) + first_token * Traits::kSumLine + first_row,
                       lane);
    __syncthreads();
    if (!arguments.gated)
        store_sums<Traits, false>(arguments, shared, feature, token);
    else if constexpr (kGrouped)
        store_gated_sums<Traits>(DecodeArguments(arguments), shared, feature, token);  // not kept in memory
    else
        store_gated_sums<Traits>(arguments, shared, feature, token);
}

template <class Traits>
__global__ void __launch_bounds__(32 * kMaxDecodeWarps)
    decode_kernel(const __grid_constant__ DecodeArguments arguments) {
    extern __shared__ __align__(128) char shared[];
    decode<Traits, false>(arguments, shared, [&]() -> DecodePlace {
        const int block = static_cast<int>(blockIdx.x) / arguments.chunks;
        const int token = (static_cast<int>(blockIdx.x) - block * arguments.chunks) * Traits::kTokens;
        return {block * Traits::kRows, token};
    });
}

// Work of a grouped product: features of one group, for all of its tokens.
template <class Traits>
__global__ void __launch_bounds__(32 * kMaxDecodeWarps)
    grouped_decode_kernel(const __grid_constant__ DecodeArguments arguments) {
    extern __shared__ __align__(128) char shared[];
    const int blocks = arguments.group_features / Traits::kRows;
    const int group = static_cast<int>(blockIdx.x) / blocks;
    const int feature = (static_cast<int>(blockIdx.x) - group * blocks) * Traits::kRows;
    const TokenSpan span = TokenGroups{arguments.offsets, arguments.groups, arguments.tokens}.span(group);
    const DecodeArguments own = of_group<Traits>(arguments, group, span.last);
    for (int token = span.first; token < span.last; token += Traits::kTokens) {
        decode<Traits, true>(own, shared, [&]() -> DecodePlace { return {feature, token}; });
        __syncthreads();  // before the next tokens take the place of the sums
    }
}

// Host side: one row of the registry, of the formats that `Formats` chooses from by the values of a problem.
template <class Math, class Formats>
struct Decode {
    static constexpr int kMaxTokens = 1024;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (problem.input().layout == Layout::column_major) return "it reads row-major activations";
        if (const char* reason = Formats::refuses(problem)) return reason;
        const int64_t chunks = problem.grouped() ? problem.pattern.groups : (problem.tokens + 63) / 64;
        if (problem.features() / 16 * chunks > kMaxCtas) return "so many results are out of its reach";
        return device.shared_memory < kSharedBytes ? "the device has too little shared memory" : nullptr;
    }

    static size_t workspace_size(const Problem&, const Device&, const Decision&) { return 0; }

    static int32_t launch(const Problem& problem, const Device& device, const Decision&, void*,
                          void* stream) {
        if (problem.tokens == 0 || problem.features() == 0) return cudaSuccess;
        const int64_t features = problem.features() * ((problem.tokens + 63) / 64) / device.multiprocessors;
        return Formats::with_format(problem, [&](auto format) {
            using Format = decltype(format);
            if (problem.grouped())
                return Format::with_group_shape(problem, [&](auto shape) {
                    return start<TraitsOf<Format, decltype(shape)>, true>(problem, device, stream);
                });
            return Format::with_shape(problem, features, [&](auto shape) {
                return start<TraitsOf<Format, decltype(shape)>, false>(problem, device, stream);
            });
        });
    }

    static constexpr Kernel row(const char* name) {
        Kernel row = make_row<Decode>(name, Formats::kFamily);
        row.ops = Formats::kOps;
        row.input_dtypes = bits_of(Math::kInput);
        row.grouped = bits_of(0, 1);
        row.precision = Math::kPrecision;
        row.max_tokens = kMaxTokens;
        row.storages = Formats::kStorages;
        row.values_dtypes = Formats::kDTypes;
        return row;
    }

  private:
    static constexpr int kSharedBytes = 96 << 10;  // of a CTA, at most: two of them on large devices
    static constexpr int kReserved = 1 << 10;      // of shared memory, by each CTA
    static constexpr int64_t kMaxCtas = 1 << 30;

    template <class Format, class Shape>
    using TraitsOf = DecodeTraits<Math, typename Format::template Weight<Math, Shape>, Shape::kTokenTiles>;

    template <class Traits, bool kGrouped>
    static constexpr auto kernel_of() {
        if constexpr (kGrouped)
            return &grouped_decode_kernel<Traits>;
        else
            return &decode_kernel<Traits>;
    }

    template <class Traits, bool kGrouped>
    static int32_t start(const Problem& problem, const Device& device, void* stream) {
        const Matrix &input = problem.input(), &output = problem.output();
        const Values& values = problem.values;
        const auto blocks = static_cast<int>(problem.features() / Traits::kRows);
        const int chunks =
            kGrouped ? 1 : static_cast<int>((problem.tokens + Traits::kTokens - 1) / Traits::kTokens);
        const int ctas = blocks * (kGrouped ? problem.pattern.groups : chunks);
        // Thread blocks that have something to do.
        const auto busy = kGrouped ? static_cast<int>(blocks * busy_groups(problem)) : ctas;
        DecodeArguments arguments{};
        arguments.input = input.data;
        arguments.input_ld = input.ld * static_cast<int64_t>(sizeof(typename Traits::Input));
        arguments.output = output.data;
        arguments.output_ld = output.ld;
        arguments.values = values.data;
        arguments.bias = problem.bias;
        arguments.residual = problem.residual.data;
        arguments.residual_ld = problem.residual.ld;
        arguments.rows = problem.block_rows();
        arguments.output_layout = output.layout;
        arguments.activation = problem.gated ? problem.gate_activation : problem.activation;
        arguments.gated = problem.gated;
        arguments.tokens = static_cast<int>(problem.tokens);
        arguments.row_shift = log2_of_block(problem.row_block());
        arguments.k_shift = log2_of_block(problem.k_block());
        arguments.metadata = values.metadata;
        arguments.scales = values.scales;
        arguments.row_scales = values.scales_per == ScalesPer::row;
        arguments.chunks = chunks;
        arguments.offsets = problem.offsets;
        arguments.groups = problem.pattern.groups;
        arguments.group_features = static_cast<int>(problem.features());
        int warps = 0;  // of a multiprocessor, where how many teams there are depends on them
        if constexpr (Traits::Weight::kFewBytes || Traits::kTeam > 1)
            if (const cudaError_t error = warps_of_multiprocessor<kernel_of<Traits, kGrouped>()>(warps))
                return error;
        const int teams = Traits::Weight::kFewBytes ? teams_at_once<Traits>(problem, device, busy, warps)
                                                    : teams_of<Traits>(problem, device, busy, warps);
        return ts::sm80::launch<kernel_of<Traits, kGrouped>()>(
            arguments, dim3(ctas), 32 * Traits::kTeam * teams, teams * Traits::kRingBytes, kSharedBytes,
            stream);
    }

    // Slices of a block row, in the mean of all.
    template <class Traits>
    static int64_t slices_of(const Problem& problem) {
        const int64_t rows = problem.features() * problem.pattern.groups;
        return problem.pattern.value_count() / rows / Traits::kSlice;
    }

    // Enough slices for each team to keep its ring full for a while, in the mean of all rows (measured on an
    // H200); where there are few CTAs, one slice. Fewer where a second round of CTAs would be short: then
    // most of them run at a time.
    template <class Traits>
    static int teams_of(const Problem& problem, const Device& device, int ctas, int warps) {
        const bool few_blocks = ctas < 2 * device.multiprocessors;
        const int64_t slices = slices_of<Traits>(problem);
        const int64_t most = few_blocks ? 2 * slices - 1 : slices / (Traits::kTeam == 1 ? 3 : 8);
        int teams = 1;
        while (2 * teams <= most && 2 * teams * Traits::kTeam <= kMaxDecodeWarps &&
               2 * teams * Traits::kRingBytes <= kSharedBytes)
            teams *= 2;
        if (Traits::kTeam == 1 || teams == 1) return teams;
        const int at_once = std::min(warps / (Traits::kTeam * teams),
                                     device.shared_memory / (teams * Traits::kRingBytes + kReserved));
        const int round = at_once * device.multiprocessors;
        return round < ctas && 2 * ctas < 3 * round ? teams / 2 : teams;
    }

    // Warps that its registers suffice for, each of which takes them in multiples of 256.
    template <auto kKernel>
    static cudaError_t warps_of_multiprocessor(int& warps) {
        constexpr int kRegisters = 65536, kMultiple = 256;
        static std::array<std::atomic<int>, kMaxDevices> known{};
        int registers = 0;
        const auto kernel = reinterpret_cast<const void*>(kKernel);
        if (const cudaError_t error = registers_of(kernel, known, registers)) return error;
        warps = kRegisters / ((32 * registers + kMultiple - 1) / kMultiple * kMultiple);
        return cudaSuccess;
    }

    // So many that all CTAs run at a time, or in as few rounds as leave room for two, each with slices to
    // keep its ring full for a while; where there are few CTAs, with one slice.
    template <class Traits>
    static int teams_at_once(const Problem& problem, const Device& device, int ctas, int warps) {
        constexpr int kMost = std::min(kMaxDecodeWarps / Traits::kTeam, kSharedBytes / Traits::kRingBytes);
        const auto fit = [&](int at_once) {
            return std::min(warps / Traits::kTeam / at_once,
                            (device.shared_memory / at_once - kReserved) / Traits::kRingBytes);
        };
        const int all = (ctas - 1) / device.multiprocessors + 1;  // of a multiprocessor
        int at_once = all;
        while (at_once > 1 && fit(at_once) < 2) at_once = (at_once + 1) / 2;
        const auto slices = static_cast<int>(slices_of<Traits>(problem));
        return std::clamp(std::min(fit(at_once), all == 1 ? slices : slices / 4), 1, kMost);
    }
};

}  // namespace ts::sm80

#define TS_INSTANCE(name, kernel, math, formats)                          \
    namespace ts::sm80 {                                                  \
    const Kernel& name() {                                                \
        static constexpr Kernel kRow = Decode<math, formats>::row(#name); \
        return kRow;                                                      \
    }                                                                     \
    }
