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

#include "ampere/async.cuh"
#include "ampere/launch.cuh"
#include "ampere/math.cuh"
#include "common/epilogue.cuh"
#include "common/problem.h"
#include "common/token_groups.h"
#include "stream/formats.cuh"

namespace ts::sm80 {

// Constants that follow from the tile of a decode kernel.

// `Weight`: its format, see formats.cuh.
template <class Math_, class Weight_, int kTokenTiles_>
struct DecodeTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    using Weight = Weight_;
    static constexpr int kRows = Weight::kRows;
    static constexpr int kTokenTiles = kTokenTiles_;  // of 8 tokens
    static constexpr int kTokens = 8 * kTokenTiles;
    static constexpr int kSlice = Weight::kSlice;         // elements of k
    static constexpr int kChunks = Weight::kBlockChunks;  // of 16 bytes, of a block's k in a slice
    static constexpr int kBlocks = kSlice / 8 / kChunks;  // of a slice

    // The warps of a team of four multiply different halves of each slice, and all different rows or tokens.
    static constexpr int kTeam = kTokenTiles == 8 && kRows >= 32 ? 4 : kRows == 64 ? 2 : 1;
    static constexpr int kHalves = kTeam == 4 ? 2 : 1;
    static constexpr int kWarpRows = kRows > 32 ? 32 : kRows;
    static constexpr int kRowWarps = kRows / kWarpRows;
    static constexpr int kWarpTokens = kTokens * kRowWarps * kHalves / kTeam;
    static constexpr int kWarpRowTiles = kWarpRows / 16;
    static constexpr int kWarpTokenTiles = kWarpTokens / 8;

    // A stage has the weight of a slice, and of each of its blocks [kTokens][8 * kChunks of k].
    using Lines = typename Weight::template Lines<32 * kTeam>;  // of tokens
    static constexpr int kStageBytes = Weight::kBytes + kTokens * kSlice * static_cast<int>(sizeof(Input));
    // Many short rings in a multiprocessor are better than few long ones (measured on an H200).
    static constexpr int kStages = kTeam > 1 || (kStageBytes <= 4096 && !Weight::kFewBytes) ? 3 : 2;
    static constexpr int kRingBytes = kStages * kStageBytes;
    // Sums are [kTokens][kSumLine], of which kRows are used.
    static constexpr int kSumLine = kRows + 4;              // of a token; the padding avoids bank conflicts
    static constexpr int kSumBytes = kRingBytes / kHalves;  // the sums of all rows take the ring's place
    static_assert(sizeof(Input) == 2);
    static_assert(kTokens * kSumLine * static_cast<int>(sizeof(float)) <= kSumBytes);
};

template <class Traits>
using DecodeSums = typename Traits::Accumulator[Traits::kWarpRowTiles][Traits::kWarpTokenTiles][4];

// How the operands of a team come into its ring.

template <int kPending>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Copies the slices of a team's share of a block row into its ring, one after another.
template <class Traits>
class DecodeLoader {
    using Lines = typename Traits::Lines;
    static constexpr int kChunks = Traits::kChunks, kCopyLines = Lines::kCopyLines;
    static constexpr int kBatch = 32;  // entries: one a lane

  public:
    __device__ DecodeLoader(const DecodeArguments& arguments, int feature, int token, int team, int teams,
                            uint32_t ring, int thread)
        : arguments_(arguments),
          tokens_(arguments.tokens - token),
          lane_(thread % 32),
          line_(thread / kChunks),
          weight_(arguments, feature, thread, Lines::offset(line_, thread % kChunks)) {
        const int row = feature >> arguments.row_shift, k_shift = Traits::Weight::k_shift(arguments);
        const int first = __ldg(arguments.rows.ptr + row);
        last_entry_ = __ldg(arguments.rows.ptr + row + 1);
        const uint32_t k = static_cast<uint32_t>(last_entry_ - first) << k_shift;
        const int slices = (k + Traits::kSlice - 1) / Traits::kSlice;
        slice_ = slices * team / teams;
        last_slice_ = slices * (team + 1) / teams;
        entry_ = batch_ = first + (slice_ * Traits::kSlice >> k_shift);
        current_ = fetch(batch_);
        next_ = fetch(batch_ + kBatch);

        const int chunk = thread % kChunks;
        input_ =
            static_cast<const char*>(arguments.input) + (token + line_) * arguments.input_ld + chunk * 16;
        stage_ = ring + Lines::offset(line_, chunk);
        if constexpr (Traits::Weight::kFewBytes) {
            input_ = kept(input_);
            stage_ = kept(stage_);
            line_ = kept(line_);
            tokens_ = kept(tokens_);
        }
        first_stage_ = stage_;
    }

    __device__ int slices() const { return last_slice_ - slice_; }

    // Starts the copies of the next slice, if there is one. wait_for_copies counts them as one.
    __device__ void load() {
        if (slice_ < last_slice_) copy_slice();
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

  private:
    static constexpr int kElement = sizeof(typename Traits::Input);

    __device__ void copy_slice() {
        const int k_shift = Traits::Weight::k_shift(arguments_);
        const int k =
            Traits::kBlocks == 1 ? slice_ * Traits::kSlice & ((1 << k_shift) - 1) : 0;  // in the block
#pragma unroll
        for (int j = 0; j < Traits::kBlocks; ++j) copy_block(j, k);
        ++slice_;
        stage_ += Traits::kStageBytes;
        if (stage_ == first_stage_ + Traits::kRingBytes) stage_ = first_stage_;
        if (Traits::kBlocks > 1 || k + Traits::kSlice == 1 << k_shift) entry_ += Traits::kBlocks;
        if (entry_ - batch_ < kBatch) return;
        batch_ += kBatch;
        current_ = next_;
        next_ = fetch(batch_ + kBatch);
    }

    // The j-th block of the slice; zeros past the row's last one.
    __device__ void copy_block(int j, int k) {
        const int from = entry_ + j - batch_;
        const int64_t col = __shfl_sync(~0u, current_.x, from), slot = __shfl_sync(~0u, current_.y, from);
        const int bytes = entry_ + j < last_entry_ ? 16 : 0;
        weight_.copy(stage_, j, slot, k, bytes);
        const char* x = input_ + ((col << Traits::Weight::k_shift(arguments_)) + k) * kElement;
        const uint32_t target = stage_ + Traits::Weight::kBytes + j * Traits::kTokens * Lines::kBytes;
#pragma unroll
        for (int i = 0; i < (Traits::kTokens + kCopyLines - 1) / kCopyLines; ++i)
            copy_async_if(line_ + i * kCopyLines < tokens_, (target ^ Lines::swap(i)) + i * Lines::kCopyBytes,
                          x + i * kCopyLines * arguments_.input_ld, bytes);
    }

    // A lane's column and slot of a batch.
    __device__ int2 fetch(int batch) const {
        const int entry = batch + lane_;
        if (entry >= last_entry_) return {0, 0};
        return {__ldg(arguments_.rows.idx + entry), __ldg(arguments_.rows.slot + entry)};
    }

    const DecodeArguments& arguments_;
    int tokens_;  // from the CTA's first on
    const int lane_;
    int line_;  // of the tokens copied at a time, the one of which this thread copies a chunk
    const typename Traits::Weight::template Loader<32 * Traits::kTeam> weight_;
    int slice_, last_slice_;
    int entry_, last_entry_;
    int batch_;  // first entry of the current batch
    int2 current_, next_;
    const char* input_;
    uint32_t stage_, first_stage_;  // where the thread's chunk of the first of its lines of tokens goes
};

// How the sums of a decode kernel become results.

// Puts a warp's sums into shared memory, token by token from its first row and token on.
template <class Traits>
__device__ inline void stage_sums(const DecodeSums<Traits>& sums, float* to, int lane) {
    float* const first = to + lane % 4 * 2 * Traits::kSumLine + lane / 4;
#pragma unroll
    for (int m = 0; m < Traits::kWarpRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < Traits::kWarpTokenTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                first[(8 * n + i % 2) * Traits::kSumLine + 16 * m + i / 2 * 8] = sums[m][n][i];
}

template <class Result>
__device__ inline float2 activate(float2 values, Activation activation) {
    return {activate<Result>(values.x, activation), activate<Result>(values.y, activation)};
}

// The places of a CTA's sums and of the results.
struct DecodeSumsPlace {
    uint32_t sums;  // shared: [addends][tokens][kRows + 4], `bytes` apart, of which kRows are used
    int addends, bytes;
    int tokens, first_feature, first_token;
};

// Adds the sums of all teams and halves, always in the same order, and stores the results. Called, not
// inlined: one function serves all kernels with as many rows, and these need no more registers for it.
template <class Result, int kRows>
__device__ __noinline__ void store_sums(const DecodeSumsPlace place, const DecodeResults results) {
    const auto* const bias = static_cast<const Result*>(results.bias);
    auto* const output = static_cast<Result*>(results.output);
    const auto* const residual = static_cast<const Result*>(results.residual);
    const bool row_major = results.layout == Layout::row_major;
    constexpr int kPairs = kRows / 2;
    for (int i = threadIdx.x; i < kPairs * place.tokens; i += blockDim.x) {
        const int row = i % kPairs * 2, token_of_cta = i / kPairs;
        const int64_t token = place.first_token + token_of_cta;
        const int64_t feature = place.first_feature + row;
        float2 sum = bias == nullptr ? make_float2(0.0f, 0.0f)
                                     : make_float2(to_float(bias[feature]), to_float(bias[feature + 1]));
        uint32_t addend = place.sums + (token_of_cta * (kRows + 4) + row) * static_cast<int>(sizeof(float));
        for (int a = 0; a < place.addends; ++a, addend += place.bytes) {
            const uint2 added = load_words(addend);
            sum.x += __uint_as_float(added.x);
            sum.y += __uint_as_float(added.y);
        }
        float2 other = sum;  // what is activated: the sum or, where results are gated, the gate
        if (residual != nullptr) {
            const int64_t ld = results.residual_ld,
                          at = row_major ? token * ld + feature : feature * ld + token;
            other = {to_float(residual[at]), to_float(residual[at + (row_major ? 1 : ld)])};
        }
        const float2 active = activate<Result>(results.gated ? other : sum, results.activation);
        if (results.gated)
            sum = {sum.x * rounded_to<Result>(active.x), sum.y * rounded_to<Result>(active.y)};
        else if (residual != nullptr)
            sum = {active.x + other.x, active.y + other.y};
        else
            sum = active;
        if (row_major) {
            store_pair(output + token * results.output_ld + feature, sum, false);
        } else {
            output[feature * results.output_ld + token] = from_float<Result>(sum.x);
            output[(feature + 1) * results.output_ld + token] = from_float<Result>(sum.y);
        }
    }
}

// The arguments as they are for one group, as if there were no other.
template <class Traits>
__device__ inline DecodeArguments of_group(const DecodeArguments& arguments, int group, int last_token) {
    DecodeArguments own = arguments;
    const int64_t first_feature = int64_t{group} * arguments.group_features;
    own.tokens = last_token;
    own.results.layout = Layout::row_major;
    own.rows.ptr += first_feature >> arguments.row_shift;
    if (arguments.results.bias != nullptr)
        own.results.bias =
            static_cast<const typename Traits::Result*>(arguments.results.bias) + first_feature;
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
    // Sums of a block without its scales. Those of more tiles would take too many registers.
    constexpr int kBlockParts = kTokenTiles == 1 ? Weight::kBlockParts : 1;
    DecodeSums<Traits> own = {};
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
            const int chunk = step * Weight::kParts + part;
            const bool ends = Weight::kScalesSums && (chunk + 1) % kBlockParts == 0;
            float2 scales[Traits::kWarpRowTiles];
            if constexpr (Weight::kScalesSums)
#pragma unroll
                for (int m = 0; m < Traits::kWarpRowTiles; ++m)
                    if (ends) scales[m] = weight.load_scales(stage, chunk, m);
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
                for (int m = 0; m < Traits::kWarpRowTiles; ++m) {
                    auto& of_block = Weight::kScalesSums ? own[m][n] : sums[m][n];
                    Weight::multiply(of_block, a[m], b[n / kTiles], part, n % kTiles);
                    if constexpr (Weight::kScalesSums) {
                        if (!ends) continue;
                        add_scaled(sums[m][n], of_block, scales[m]);
#pragma unroll
                        for (float& sum : of_block) sum = 0;
                    }
                }
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
template <class Traits, class Place>
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
    const int tokens = min(Traits::kTokens, arguments.tokens - token);
    store_sums<typename Traits::Result, Traits::kRows>(
        {shared_address(shared), teams * kHalves, Traits::kSumBytes, tokens, feature, token},
        arguments.results);
}

template <class Traits>
__global__ void __launch_bounds__(32 * kMaxDecodeWarps)
    decode_kernel(const __grid_constant__ DecodeArguments arguments) {
    extern __shared__ __align__(128) char shared[];
    decode<Traits>(arguments, shared, [&]() -> DecodePlace {
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
        decode<Traits>(own, shared, [&]() -> DecodePlace { return {feature, token}; });
        __syncthreads();  // before the next tokens take the place of the sums
    }
}

// Host side.

constexpr int kDecodeSharedBytes = 96 << 10;  // of a CTA, at most: two of them on large devices

// The host's view of DecodeTraits: the same code starts all decode kernels.
struct DecodeTile {
    int rows, tokens, slice, team, ring_bytes;
    int element;  // bytes of one of x
    bool few_bytes;
};
template <class Traits>
constexpr DecodeTile decode_tile = {Traits::kRows,
                                    Traits::kTokens,
                                    Traits::kSlice,
                                    Traits::kTeam,
                                    Traits::kRingBytes,
                                    sizeof(typename Traits::Input),
                                    Traits::Weight::kFewBytes};

// Facts about a kernel that were asked for once.
struct DecodeStart {
    std::array<std::atomic<int>, kMaxDevices> registers{};
    std::atomic<uint64_t> devices_done{0};
};

// How many teams a CTA has.
class DecodeTeams {
  public:
    // `ctas`: that have something to do. `warps`: of a multiprocessor, if known.
    DecodeTeams(const Problem& problem, const Device& device, const DecodeTile& tile, int ctas, int warps)
        : device_(device), tile_(tile), ctas_(ctas), warps_(warps) {
        const int64_t rows = problem.features() * problem.pattern.groups;
        slices_ = problem.pattern.value_count() / rows / tile.slice;
    }

    int count() const { return tile_.few_bytes ? at_once() : usual(); }

  private:
    static constexpr int kReserved = 1 << 10;  // of shared memory, by each CTA

    // Enough slices for each team to keep its ring full for a while, in the mean of all rows (measured on an
    // H200); where there are few CTAs, one slice. Fewer where a second round of CTAs would be short: then
    // most of them run at a time.
    int usual() const {
        const bool few_blocks = ctas_ < 2 * device_.multiprocessors;
        const int64_t most = few_blocks ? 2 * slices_ - 1 : slices_ / (tile_.team == 1 ? 3 : 8);
        int teams = 1;
        while (2 * teams <= most && 2 * teams * tile_.team <= kMaxDecodeWarps &&
               2 * teams * tile_.ring_bytes <= kDecodeSharedBytes)
            teams *= 2;
        if (tile_.team == 1 || teams == 1) return teams;
        const int at_once = std::min(warps_ / (tile_.team * teams),
                                     device_.shared_memory / (teams * tile_.ring_bytes + kReserved));
        const int round = at_once * device_.multiprocessors;
        return round < ctas_ && 2 * ctas_ < 3 * round ? teams / 2 : teams;
    }

    // So many that all CTAs run at a time, or in as few rounds as leave room for two, each with slices to
    // keep its ring full for a while; where there are few CTAs, with one slice.
    int at_once() const {
        const int most = std::min(kMaxDecodeWarps / tile_.team, kDecodeSharedBytes / tile_.ring_bytes);
        const auto fit = [&](int at_once) {
            return std::min(warps_ / tile_.team / at_once,
                            (device_.shared_memory / at_once - kReserved) / tile_.ring_bytes);
        };
        const int all = (ctas_ - 1) / device_.multiprocessors + 1;  // of a multiprocessor
        int at_once = all;
        while (at_once > 1 && fit(at_once) < 2) at_once = (at_once + 1) / 2;
        const auto slices = static_cast<int>(slices_);
        return std::clamp(std::min(fit(at_once), all == 1 ? slices : slices / 4), 1, most);
    }

    const Device& device_;
    const DecodeTile& tile_;
    int64_t slices_;  // of a block row, in the mean of all
    int ctas_, warps_;
};

// Warps of a multiprocessor that its registers suffice for, each of which takes them in multiples of 256.
inline cudaError_t warps_of_multiprocessor(const void* kernel, DecodeStart& known, int& warps) {
    constexpr int kRegisters = 65536, kMultiple = 256;
    int registers = 0;
    if (const cudaError_t error = registers_of(kernel, known.registers, registers)) return error;
    warps = kRegisters / ((32 * registers + kMultiple - 1) / kMultiple * kMultiple);
    return cudaSuccess;
}

inline cudaError_t start_decode(const Problem& problem, const Device& device, const void* kernel,
                                const DecodeTile& tile, bool grouped, DecodeStart& known, void* stream) {
    const Matrix &input = problem.input(), &output = problem.output();
    const Values& values = problem.values;
    const auto blocks = static_cast<int>(problem.features() / tile.rows);
    const int chunks = grouped ? 1 : static_cast<int>((problem.tokens + tile.tokens - 1) / tile.tokens);
    const int ctas = blocks * (grouped ? problem.pattern.groups : chunks);
    // Thread blocks that have something to do.
    const auto busy = grouped ? static_cast<int>(blocks * busy_groups(problem)) : ctas;
    DecodeArguments arguments{};
    arguments.input = input.data;
    arguments.input_ld = input.ld * tile.element;
    arguments.results = {output.data,
                         problem.bias,
                         problem.residual.data,
                         output.ld,
                         problem.residual.ld,
                         output.layout,
                         problem.gated ? problem.gate_activation : problem.activation,
                         problem.gated};
    arguments.values = values.data;
    arguments.rows = problem.block_rows();
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
    int warps = 0;  // where how many teams there are depends on them
    if (tile.few_bytes || tile.team > 1)
        if (const cudaError_t error = warps_of_multiprocessor(kernel, known, warps)) return error;
    const int teams = DecodeTeams(problem, device, tile, busy, warps).count();
    if (const cudaError_t error = allow_shared_memory(kernel, kDecodeSharedBytes, known.devices_done))
        return error;
    void* parameters[] = {&arguments};
    return cudaLaunchKernel(kernel, dim3(ctas), dim3(32 * tile.team * teams), parameters,
                            teams * tile.ring_bytes, static_cast<cudaStream_t>(stream));
}

// One row of the registry, of the formats that `Formats` chooses from by the values of a problem.
template <class Math, class Formats>
struct Decode {
    static constexpr int kMaxTokens = 1024;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (problem.input().layout == Layout::column_major) return "it reads row-major activations";
        if (const char* reason = Formats::refuses(problem)) return reason;
        const int64_t chunks = problem.grouped() ? problem.pattern.groups : (problem.tokens + 63) / 64;
        if (problem.features() / 16 * chunks > kMaxCtas) return "so many results are out of its reach";
        return device.shared_memory < kDecodeSharedBytes ? "the device has too little shared memory"
                                                         : nullptr;
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
    static constexpr int64_t kMaxCtas = 1 << 30;

    template <class Format, class Shape>
    using TraitsOf = DecodeTraits<Math, typename Format::template Weight<Math, Shape>, Shape::kTokenTiles>;

    template <class Traits, bool kGrouped>
    static int32_t start(const Problem& problem, const Device& device, void* stream) {
        static DecodeStart known{};
        const void* kernel;
        if constexpr (kGrouped)
            kernel = reinterpret_cast<const void*>(grouped_decode_kernel<Traits>);
        else
            kernel = reinterpret_cast<const void*>(decode_kernel<Traits>);
        return start_decode(problem, device, kernel, decode_tile<Traits>, kGrouped, known, stream);
    }
};

}  // namespace ts::sm80

#define TS_ROW_decode(name, math, formats)                                \
    namespace ts::sm80 {                                                  \
    const Kernel& name() {                                                \
        static constexpr Kernel kRow = Decode<math, formats>::row(#name); \
        return kRow;                                                      \
    }                                                                     \
    }
