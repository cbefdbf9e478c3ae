// dds_nt for a small batch of neurons most of which are off (any GPU; no tensor cores, no plan).
//   inputs:  Y[M,N] = act(X[M,K] * W[N,K]^T + bias) + residual, values with each block transposed [nnz, bk,
//   bn] outputs: Y[M,N] = (X[M,K] * W[N,K]^T + bias) * gate[M,N], values [nnz, bn, bk]
// Operands: activations row-major bf16 or fp16; values of the same dtype, for inputs also int8 with scales in
// blocks of 128 rows; float32 sums. A number with
// |x| <= threshold counts as zero; NaN and infinities never do. What is zero for all tokens is not read: of
// `inputs` the weights of this k, lines of 32 to 128 bytes of a transposed block; of `outputs` the weights of
// this feature.
//
// inputs: a CTA has 16 to 64 features of a block row and a part of its k. Each of its 8 warps takes 128 k at
// a time, lists those that are on in shared memory, and streams their lines, several at a time. Sums of
// warps are added in the CTA, those of CTAs within a cluster, or by a second kernel. In a grouped product
// each token has CTAs of its own, which read the weight of its group: L2 holds what several of them read.
// outputs: a CTA has up to 32 features of a block row, and lists those that are on. A warp has four of them
// and a quarter of k, in steps of 256.
//
// All sums are added in a fixed order. The CUDA cores multiply: by their peak, 8 tokens of 16 bits take an
// H100 a third of the time of reading the weight.
#include "elementwise/skip.h"

#include <cooperative_groups.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <climits>

#include "common/epilogue.cuh"
#include "common/launch.cuh"

namespace ts::skip {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kUnit = 64;   // neighbouring k of a warp
constexpr int kUnits = 2;   // that it lists at a time
constexpr int kUnroll = 4;  // lines that a lane loads at a time, while it multiplies as many
constexpr int kVector = 8;  // weights of a line that a lane loads
constexpr int kCtas = 4;    // of a multiprocessor; 2 and 8 are slower

struct Arguments {
    const void* x;
    int64_t x_ld;
    const void* values;
    const float* scales;  // of int8: [nnz, scale_step] of rows of blocks, or of blocks where the step is 0
    int scale_step;
    Adjacency rows;
    float threshold;
    const int32_t* offsets;  // of groups, or null
    int groups;
    int tokens;              // of groups 1, whatever there are
    int features;            // of a group
    int all_columns;         // of blocks in each row, or 0 if some are not kept
    int row_shift, k_shift;  // log2 of the rows (features) and columns (k) of a block
    int parts;               // of the k of a block row
    float* sums;             // [parts, tokens, features]
    void* y;
    int64_t y_ld;
    const void* bias;
    const void* other;  // residual or gate, or null
    int64_t other_ld;
    Activation activation;  // of results, or of the gate
    bool gated;
};

// ---- eight neighbouring weights ----

__device__ inline void read_once(const void* from, uint4& raw) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "l"(from));
}

__device__ inline float2 floats_of(uint32_t pair, __nv_bfloat16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
__device__ inline float2 floats_of(uint32_t pair, __half) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <class Element>
struct Weights {
    using Raw = uint4;

    // Bytes of so many weights.
    __device__ static int64_t bytes(int64_t count) { return count * static_cast<int64_t>(sizeof(Element)); }

    __device__ static void decode(const Raw& raw, float (&weights)[kVector]) {
        const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = floats_of(words[i], Element());
            weights[2 * i] = pair.x;
            weights[2 * i + 1] = pair.y;
        }
    }
};

__device__ inline bool is_off(float x, float threshold) { return fabsf(x) <= threshold; }

template <class Element>
__device__ inline float finished(const Arguments& arguments, float sum, int token, int group, int feature) {
    if (arguments.bias != nullptr)
        sum += to_float(static_cast<const Element*>(arguments.bias)[group * arguments.features + feature]);
    const bool adds = arguments.other != nullptr && !arguments.gated;
    if (!arguments.gated) sum = activate<Element>(sum, arguments.activation);
    if (arguments.other == nullptr) return sum;
    const float other =
        to_float(static_cast<const Element*>(arguments.other)[token * arguments.other_ld + feature]);
    return adds ? sum + other : sum * rounded_to<Element>(activate<Element>(other, arguments.activation));
}

template <class Element>
__device__ inline void write(const Arguments& arguments, float sum, int token, int group, int feature) {
    static_cast<Element*>(arguments.y)[token * arguments.y_ld + feature] =
        from_float<Element>(finished<Element>(arguments, sum, token, group, feature));
}

// ---- inputs ----

// The group that has a row of x, by all lanes of a warp: the number of those after the first that begin at it
// or before. All offsets are on their way at once.
__device__ inline int group_of(const int32_t* offsets, int groups, int row) {
    const int lane = threadIdx.x % 32;
    int group = 0;
#pragma unroll 4
    for (int first = 1; first < groups; first += 32) {
        const int next = first + lane;
        group += __popc(__ballot_sync(~0u, next < groups && __ldg(offsets + next) <= row));
    }
    return group;
}

// A CTA's part of `inputs`: features of a token or of all of them, and a part of their k.
struct Place {
    int part, token, group, feature, first, all, in_block;
};

template <int kFeatures>
__device__ inline Place place_of(const Arguments& arguments) {
    int tile = static_cast<int>(blockIdx.x) / arguments.parts;
    Place place{};
    place.part = static_cast<int>(blockIdx.x) - tile * arguments.parts;
    if (arguments.offsets != nullptr) {  // each token has CTAs of its own
        const int tiles = arguments.features / kFeatures;
        place.token = tile / tiles;
        tile -= place.token * tiles;
        place.group = group_of(arguments.offsets, arguments.groups, place.token);
    }
    place.feature = tile * kFeatures;
    place.in_block = place.feature & ((1 << arguments.row_shift) - 1);
    const int block_row = (place.group * arguments.features + place.feature) >> arguments.row_shift;
    // If all blocks are kept, nothing waits for the arrays but for slots.
    const int columns = arguments.all_columns;
    place.first = columns > 0 ? block_row * columns : __ldg(arguments.rows.ptr + block_row);
    const int entries = columns > 0 ? columns : __ldg(arguments.rows.ptr + block_row + 1) - place.first;
    place.all = entries << arguments.k_shift;
    return place;
}

// The k of some units that are on: their rows in the values, and x.
template <int kTokens, int kCapacity>
struct Lists {
    int rows[kCapacity];
    float x[kTokens][kCapacity];
};

// Lists a unit and those `step` after it for a warp; returns how many k are on. With `kPad` each unit fills
// up with rows of -1 to a multiple of it, `ends` where it does so, and has a block of its own, in
// slots[unit].
template <class Element, int kPad, int kTokens, int kCapacity>
__device__ inline int list_units(const Arguments& arguments, const Place& place, int unit, int step,
                                 Lists<kTokens, kCapacity>& lists, int (&ends)[kUnits],
                                 int (&slots)[kUnits]) {
    constexpr int kRounds = kUnits * kUnit / 32;
    const int lane = threadIdx.x % 32, k_shift = arguments.k_shift;
    const auto* const own_x = static_cast<const Element*>(arguments.x) + place.token * arguments.x_ld;
    float x[kRounds][kTokens] = {};
    int row[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
        const int k = (unit + 32 * i / kUnit * step) * kUnit + 32 * i % kUnit + lane;
        row[i] = -1;
        if (k >= place.all) continue;
        const int entry = place.first + (k >> k_shift), within = k & ((1 << k_shift) - 1);
        const int column =
            arguments.all_columns > 0 ? entry - place.first : __ldg(arguments.rows.idx + entry);
        const auto* const from = own_x + (int64_t{column} << k_shift) + within;
        row[i] = (__ldg(arguments.rows.slot + entry) << k_shift) + within;
#pragma unroll
        for (int t = 0; t < kTokens; ++t)
            if (t < arguments.tokens) x[i][t] = to_float(from[t * arguments.x_ld]);
    }
    int count = 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
        bool is_on = false;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            if (is_off(x[i][t], arguments.threshold))
                x[i][t] = 0.0f;
            else
                is_on = true;
        }
        const uint32_t mask = __ballot_sync(~0u, is_on);
        if (is_on) {
            const int at = count + __popc(mask & ((1u << lane) - 1));
            lists.rows[at] = row[i];
#pragma unroll
            for (int t = 0; t < kTokens; ++t) lists.x[t][at] = x[i][t];
        }
        count += __popc(mask);
        if constexpr (kPad > 1) {
            if (32 * (i + 1) % kUnit != 0) continue;
            static_assert(kPad <= 32);
            const int more = (kPad - count % kPad) % kPad, u = 32 * i / kUnit;
            if (lane < more) {
                lists.rows[count + lane] = -1;
#pragma unroll
                for (int t = 0; t < kTokens; ++t) lists.x[t][count + lane] = 0.0f;
            }
            count += more;
            ends[u] = count;
            slots[u] = __shfl_sync(~0u, row[i - kUnit / 32 + 1], 0) >> k_shift;  // negative for none
        }
    }
    __syncwarp();
    return count;
}

// Adds the sums of lanes, warps and, of a cluster, CTAs in a fixed order, and finishes results or stores
// those of a part. `room` is [kWarps, kTokens, features] in shared memory that nothing else uses any more.
template <class Element, int kLanes, bool kCluster, int kTokens, int kWidth>
__device__ inline void add_up(const Arguments& arguments, const Place& place, float (&sums)[kTokens][kWidth],
                              float* room) {
    constexpr int kFeatures = kWidth * kLanes, kSums = kTokens * kFeatures;
    __shared__ float part_sums[kCluster ? kSums : 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
#pragma unroll
        for (int f = 0; f < kWidth; ++f)
#pragma unroll
            for (int other = kLanes; other < 32; other *= 2)
                sums[t][f] += __shfl_xor_sync(~0u, sums[t][f], other);
    __syncthreads();  // before sums take the place of the lists
    if (lane < kLanes)
#pragma unroll
        for (int t = 0; t < kTokens; ++t)
#pragma unroll
            for (int f = 0; f < kWidth; ++f)
                room[warp * kSums + t * kFeatures + lane * kWidth + f] = sums[t][f];
    __syncthreads();
    for (int i = threadIdx.x; i < kSums; i += kThreads) {
        const int token = place.token + i / kFeatures, feature = place.feature + i % kFeatures;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += room[w * kSums + i];
        if constexpr (kCluster)
            part_sums[i] = sum;
        else if (i / kFeatures >= arguments.tokens)
            break;
        else if (arguments.parts == 1)
            write<Element>(arguments, sum, token, place.group, feature);
        else
            arguments.sums[(int64_t{place.part} * arguments.tokens + token) * arguments.features + feature] =
                sum;
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
        const auto cluster = cooperative_groups::this_cluster();
        cluster.sync();
        const int share = (kSums + arguments.parts - 1) / arguments.parts;
        const int end = min((place.part + 1) * share, kSums);
        for (int i = place.part * share + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
            if (i / kFeatures >= arguments.tokens) break;
            float sum = 0.0f;
            for (int p = 0; p < arguments.parts; ++p) sum += *cluster.map_shared_rank(part_sums + i, p);
            write<Element>(arguments, sum, i / kFeatures, 0, place.feature + i % kFeatures);
        }
        cluster.sync();  // before the sums that others read are gone
    }
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasClusters = false;
#else
constexpr bool kHasClusters = true;
#endif

// `kLanes`: of a warp, that read a line together. `kCluster`: the parts of a tile are a cluster of CTAs.
template <class Element, int kLanes, int kTokens, bool kCluster>
__global__ void __launch_bounds__(kThreads, kTokens == 1 ? 0 : kCtas)
    skip_inputs(const __grid_constant__ Arguments arguments) {
    if (kCluster && !kHasClusters) return;
    using W = Weights<Element>;
    constexpr int kFeatures = kVector * kLanes, kLines = 32 / kLanes, kBatch = kLines * kUnroll;
    constexpr int kBatches = kTokens == 1 ? 2 : 1;  // that registers suffice for
    __shared__ union {
        Lists<kTokens, kUnits * kUnit> lists[kWarps];
        float sums[kWarps * kTokens * kFeatures];
    } shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place place = place_of<kFeatures>(arguments);
    const int units = (place.all + kUnit - 1) / kUnit, step = arguments.parts * kWarps;
    const char* const values =
        static_cast<const char*>(arguments.values) + W::bytes(place.in_block + lane % kLanes * kVector);
    const int64_t line_bytes = W::bytes(int64_t{1} << arguments.row_shift);
    auto& lists = shared.lists[warp];
    float sums[kTokens][kVector] = {};
    for (int unit = place.part * kWarps + warp; unit < units; unit += step * kUnits) {
        int unused[kUnits];
        const int count = list_units<Element, 1>(arguments, place, unit, step, lists, unused, unused);
        typename W::Raw raw[kUnroll], next[kUnroll];
        const auto fetch = [&](typename W::Raw(&to)[kUnroll], int i) {
#pragma unroll
            for (int j = 0; j < kUnroll; ++j) {
                const int line = i + j * kLines + lane / kLanes;
                to[j] = {};
                if (line < count) read_once(values + lists.rows[line] * line_bytes, to[j]);
            }
        };
        fetch(raw, 0);
#pragma unroll kBatches
        for (int i = 0; i < count; i += kBatch) {
            fetch(next, i + kBatch);
#pragma unroll
            for (int j = 0; j < kUnroll; ++j) {
                const int line = i + j * kLines + lane / kLanes;
                float weights[kVector];
                W::decode(raw[j], weights);
#pragma unroll
                for (int t = 0; t < kTokens; ++t) {
                    const float x = line < count ? lists.x[t][line] : 0.0f;
#pragma unroll
                    for (int f = 0; f < kVector; ++f) sums[t][f] = fmaf(x, weights[f], sums[t][f]);
                }
                raw[j] = next[j];
            }
        }
        __syncwarp();
    }
    add_up<Element, kLanes, kCluster>(arguments, place, sums, shared.sums);
}

// ---- inputs of int8 ----

// In registers as many bytes as the memory needs on their way are too many weights: lines of 128 bytes come
// through a ring in shared memory, with the scales of their unit.
constexpr int kLaneBytes = 16, kRingLanes = 8, kRingFeatures = kLaneBytes * kRingLanes;
constexpr int kRingLines = 8, kStages = 4;  // lines of a stage
constexpr int kRingCtas = 2;                // of a multiprocessor; 3 and 4 are slower

template <int kTokens>
struct Ring {
    char lines[kStages][kRingLines][kRingFeatures];
    float scales[kUnits][kRingFeatures];
    Lists<kTokens, kUnits*(kUnit + kRingLines)> lists;
};

__device__ inline void copy(void* to, const void* from, bool is_there) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

__device__ inline void decode_int8(const uint4& raw, float (&weights)[kLaneBytes]) {
    // In the lowest bits of 2^23 a number has no fraction.
    constexpr uint32_t kWhole = 0x4b000000;
    const uint32_t words[] = {raw.x ^ 0x80808080, raw.y ^ 0x80808080, raw.z ^ 0x80808080, raw.w ^ 0x80808080};
#pragma unroll
    for (int i = 0; i < kLaneBytes; ++i)
        weights[i] = __uint_as_float(__byte_perm(words[i / 4], kWhole, 0x7440 + i % 4)) - 8388736.0f;
}

template <class Element, int kTokens, bool kCluster>
__global__ void __launch_bounds__(kThreads) skip_int8(const __grid_constant__ Arguments arguments) {
    if (kCluster && !kHasClusters) return;
    extern __shared__ __align__(16) char memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& ring = reinterpret_cast<Ring<kTokens>*>(memory)[warp];
    const Place place = place_of<kRingFeatures>(arguments);
    const int units = (place.all + kUnit - 1) / kUnit, step = arguments.parts * kWarps;
    const int own = lane % kRingLanes * kLaneBytes;
    const char* const values = static_cast<const char*>(arguments.values) + place.in_block + own;
    const bool of_rows = arguments.scale_step > 0;
    float sums[kTokens][kLaneBytes] = {};
    for (int unit = place.part * kWarps + warp; unit < units; unit += step * kUnits) {
        int ends[kUnits], slots[kUnits];
        const int count =
            list_units<Element, kRingLines>(arguments, place, unit, step, ring.lists, ends, slots);
        if (of_rows)
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
                copy(&ring.scales[u][4 * lane],
                     arguments.scales + int64_t{max(slots[u], 0)} * arguments.scale_step + place.in_block +
                         4 * lane,
                     slots[u] >= 0);
        const auto fetch = [&](int stage) {
            if (stage * kRingLines < count)
#pragma unroll
                for (int line = lane / kRingLanes; line < kRingLines; line += 32 / kRingLanes) {
                    const int row = ring.lists.rows[stage * kRingLines + line];
                    copy(&ring.lines[stage % kStages][line][own],
                         values + (int64_t{max(row, 0)} << arguments.row_shift), row >= 0);
                }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
#pragma unroll
        for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage);
        int stage = 0;
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            if (stage * kRingLines == ends[u]) continue;  // its scales may not have come
            float of_unit[kTokens][kLaneBytes] = {};
            for (; stage * kRingLines < ends[u]; ++stage) {
                asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
                __syncwarp();
                fetch(stage + kStages - 1);
#pragma unroll
                for (int line = lane / kRingLanes; line < kRingLines; line += 32 / kRingLanes) {
                    float weights[kLaneBytes];
                    decode_int8(*reinterpret_cast<const uint4*>(&ring.lines[stage % kStages][line][own]),
                                weights);
#pragma unroll
                    for (int t = 0; t < kTokens; ++t) {
                        const float x = ring.lists.x[t][stage * kRingLines + line];
#pragma unroll
                        for (int f = 0; f < kLaneBytes; ++f)
                            of_unit[t][f] = fmaf(x, weights[f], of_unit[t][f]);
                    }
                }
                __syncwarp();  // before a copy takes the place of these lines
            }
            const float scale = of_rows ? 0.0f : __ldg(arguments.scales + max(slots[u], 0));
#pragma unroll
            for (int f = 0; f < kLaneBytes; ++f)
#pragma unroll
                for (int t = 0; t < kTokens; ++t)
                    sums[t][f] = fmaf(of_unit[t][f], of_rows ? ring.scales[u][own + f] : scale, sums[t][f]);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
    }
    add_up<Element, kRingLanes, kCluster>(arguments, place, sums, reinterpret_cast<float*>(memory));
}

template <class Element>
__global__ void __launch_bounds__(kThreads) add_parts(const __grid_constant__ Arguments arguments) {
    const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    const int count = arguments.tokens * arguments.features;
    if (i >= count) return;
    float sum = 0.0f;
    for (int part = 0; part < arguments.parts; ++part) sum += arguments.sums[int64_t{part} * count + i];
    const int token = i / arguments.features, feature = i - token * arguments.features;
    write<Element>(arguments, sum, token, 0, feature);
}

// ---- outputs ----

constexpr int kRows = 4;           // of a warp
constexpr int kMostFeatures = 32;  // of a CTA
constexpr int kShares = 4;         // of k

template <class Element, int kTokens>
__global__ void __launch_bounds__(kThreads) skip_outputs(const __grid_constant__ Arguments arguments) {
    using W = Weights<Element>;
    __shared__ int listed[kMostFeatures];
    __shared__ float sums[kShares][kMostFeatures][kTokens];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_shift = arguments.row_shift, k_shift = arguments.k_shift;
    const int features = min(kMostFeatures, 1 << row_shift),
              feature = static_cast<int>(blockIdx.x) * features;
    const auto* const gates = static_cast<const Element*>(arguments.other);
    bool is_on = false;
    if (lane < features)
        for (int t = 0; t < arguments.tokens; ++t)
            is_on |= !is_off(to_float(gates[t * arguments.other_ld + feature + lane]), arguments.threshold);
    const uint32_t mask = __ballot_sync(~0u, is_on);  // the same in every warp
    const int count = __popc(mask), place = __popc(mask & ((1u << lane) - 1));
    if (warp == 0 && is_on) listed[place] = lane;
    const int block_row = feature >> row_shift, in_block = feature & ((1 << row_shift) - 1);
    const int first = __ldg(arguments.rows.ptr + block_row);
    const int all = (__ldg(arguments.rows.ptr + block_row + 1) - first) << k_shift;
    __syncthreads();
    constexpr int kStep = 32 * kVector;
    const int groups = (count + kRows - 1) / kRows;
    for (int item = warp; item < groups * kShares; item += kWarps) {
        const int group = item / kShares, share = item % kShares;
        int64_t row_at[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            row_at[r] = int64_t{in_block + listed[min(group * kRows + r, count - 1)]} << k_shift;
        float own[kRows][kTokens] = {};
#pragma unroll 2
        for (int k = share * kStep + lane * kVector; k < all; k += kShares * kStep) {
            const int entry = first + (k >> k_shift), within = k & ((1 << k_shift) - 1);
            const int64_t slot = __ldg(arguments.rows.slot + entry);
            const int64_t column = (int64_t{__ldg(arguments.rows.idx + entry)} << k_shift) + within;
            const char* const block = static_cast<const char*>(arguments.values) +
                                      W::bytes((slot << (row_shift + k_shift)) + within);
            typename W::Raw raw[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) read_once(block + W::bytes(row_at[r]), raw[r]);
            float weights[kRows][kVector];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                W::decode(raw[r], weights[r]);
            }
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
                if (t >= arguments.tokens) break;
                const uint4 xs = *reinterpret_cast<const uint4*>(static_cast<const Element*>(arguments.x) +
                                                                 t * arguments.x_ld + column);
                float x[kVector];
                W::decode(xs, x);
#pragma unroll
                for (int r = 0; r < kRows; ++r)
#pragma unroll
                    for (int i = 0; i < kVector; ++i) own[r][t] = fmaf(weights[r][i], x[i], own[r][t]);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
#pragma unroll
                for (int other = 16; other > 0; other /= 2)
                    own[r][t] += __shfl_xor_sync(~0u, own[r][t], other);
                if (lane == 0 && group * kRows + r < count) sums[share][group * kRows + r][t] = own[r][t];
            }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kMostFeatures * arguments.tokens; i += kThreads) {
        const int token = i / kMostFeatures;  // of a warp
        if (lane >= features) continue;
        float result = 0.0f;
        if (is_on) {
            for (int share = 0; share < kShares; ++share) result += sums[share][place][token];
            if (arguments.bias != nullptr)
                result += to_float(static_cast<const Element*>(arguments.bias)[feature + lane]);
            const float gate = to_float(gates[token * arguments.other_ld + feature + lane]);
            result *= is_off(gate, arguments.threshold) ? 0.0f : gate;
        }
        static_cast<Element*>(arguments.y)[token * arguments.y_ld + feature + lane] =
            from_float<Element>(result);
    }
}

// ---- launches ----

// Features of a CTA for `inputs`: lines of 128 bytes, or those of a block.
int features_of(const Problem& problem) {
    const int most = problem.values.dtype == DType::int8 ? kRingFeatures : 64;
    return std::min<int>(problem.pattern.block_rows, most);
}

constexpr int kMostCluster = 4;  // CTAs; with 8 of them sums take as long as a second kernel, or longer
constexpr int kMostAtOnce = 2;   // tokens

// Enough CTAs for each multiprocessor to have several, each with something to do for all of its warps.
// Experts have as many as there are tokens and tiles: parts of them were slower from 2 tokens of 8 experts
// on.
int parts_of(const Problem& problem, const Device& device) {
    if (problem.grouped()) return 1;
    const int ctas = problem.values.dtype == DType::int8 ? kRingCtas : kCtas;
    const Pattern& pattern = problem.pattern;
    const int64_t tiles = pattern.out_features / features_of(problem);
    const int64_t units =
        pattern.nnz * pattern.block_cols / (pattern.out_features / pattern.block_rows) / kUnit;
    const int64_t most = std::max<int64_t>(1, units / kWarps);
    return static_cast<int>(std::clamp<int64_t>(ctas * device.multiprocessors / tiles, 1, most));
}

// True if the parts of a tile are a cluster, which adds their sums; otherwise a second kernel does. GPUs
// after 9.0 run code for 8.0, which has no clusters.
bool is_cluster(const Device& device, int parts) {
#ifdef TILESPARSE_NATIVE_90
    constexpr bool kNative = true;
#else
    constexpr bool kNative = false;
#endif
    return kNative && device.compute_capability == 90 && parts > 1 && parts <= kMostCluster &&
           (device.max_cluster == 0 || parts <= device.max_cluster);
}

Arguments arguments_of(const Problem& problem, const Device& device, void* workspace) {
    const Values& values = problem.values;
    const Pattern& pattern = problem.pattern;
    Arguments arguments{};
    arguments.x = problem.x.data;
    arguments.x_ld = problem.x.ld;
    arguments.values = values.data;
    arguments.scales = values.scales;
    arguments.scale_step = values.scales_per == ScalesPer::row ? pattern.block_rows : 0;
    arguments.rows = pattern.rows;
    arguments.threshold = std::min(problem.threshold, FLT_MAX);
    arguments.offsets = problem.offsets;
    arguments.groups = pattern.groups;
    arguments.tokens = problem.grouped() ? 1 : static_cast<int>(problem.tokens);
    arguments.features = static_cast<int>(problem.features());
    const int64_t grid = pattern.row_count() * pattern.col_count();
    arguments.all_columns = pattern.nnz == grid ? static_cast<int>(pattern.col_count()) : 0;
    arguments.row_shift = log2_of_block(pattern.block_rows);
    arguments.k_shift = log2_of_block(pattern.block_cols);
    arguments.parts = parts_of(problem, device);
    arguments.sums = static_cast<float*>(workspace);
    arguments.y = problem.y.data;
    arguments.y_ld = problem.y.ld;
    arguments.bias = problem.bias;
    arguments.other = problem.residual.data;
    arguments.other_ld = problem.residual.ld;
    arguments.activation = problem.gated ? problem.gate_activation : problem.activation;
    arguments.gated = problem.gated;
    return arguments;
}

template <int... kChoices, class Run>
int32_t with_choice(int value, Run run) {
    int32_t result = cudaErrorInvalidConfiguration;
    ((value <= kChoices && result == cudaErrorInvalidConfiguration
          ? void(result = run(std::integral_constant<int, kChoices>{}))
          : void()),
     ...);
    return result;
}

// `parts`: CTAs of a cluster, if it is more than 1.
int32_t launch_ctas(void (*kernel)(Arguments), int64_t ctas, int parts, int bytes, void* stream,
                    const Arguments& arguments) {
    if (ctas > INT_MAX) return cudaErrorInvalidConfiguration;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(parts), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = parts > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, arguments);
}

template <class Element, int kTokens, bool kCluster>
int32_t launch_inputs(const Problem& problem, const Arguments& arguments, void* stream) {
    const int features = features_of(problem), cluster = kCluster ? arguments.parts : 1;
    const int64_t ctas =
        (problem.grouped() ? problem.tokens : 1) * (arguments.features / features) * arguments.parts;
    if (problem.values.dtype == DType::int8) {
        constexpr int kBytes = kWarps * sizeof(Ring<kTokens>);
        static std::atomic<uint64_t> allowed = 0;
        const auto kernel = &skip_int8<Element, kTokens, kCluster>;
        const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), kBytes, allowed);
        return error != cudaSuccess ? error : launch_ctas(kernel, ctas, cluster, kBytes, stream, arguments);
    }
    return with_choice<2, 4, 8>(features / kVector, [&](auto lanes) -> int32_t {
        return launch_ctas(&skip_inputs<Element, decltype(lanes)::value, kTokens, kCluster>, ctas, cluster, 0,
                           stream, arguments);
    });
}

template <class Element, int kTokens>
int32_t launch_tokens(const Problem& problem, const Device& device, const Arguments& arguments,
                      void* stream) {
    if (problem.skip == Skip::outputs)
        return launch_kernel(&skip_outputs<Element, kTokens>,
                             arguments.features / std::min(kMostFeatures, 1 << arguments.row_shift), kThreads,
                             stream, arguments);
    if (is_cluster(device, arguments.parts))
        return launch_inputs<Element, kTokens, true>(problem, arguments, stream);
    const int32_t error = launch_inputs<Element, kTokens, false>(problem, arguments, stream);
    if (error != cudaSuccess || arguments.parts == 1) return error;
    const int64_t results = int64_t{arguments.tokens} * arguments.features;
    return launch_kernel(&add_parts<Element>, (results + kThreads - 1) / kThreads, kThreads, stream,
                         arguments);
}

// Two tokens at a time: more of them gain nothing by skipping.
template <class Element>
int32_t launch_as(const Problem& problem, const Device& device, Arguments arguments, void* stream) {
    const auto moved = [](const void* data, int64_t elements) -> const void* {
        return data == nullptr ? nullptr : static_cast<const Element*>(data) + elements;
    };
    const int all = arguments.tokens;
    int32_t error = cudaSuccess;
    for (int token = 0; token < all && error == cudaSuccess; token += kMostAtOnce) {
        arguments.tokens = std::min(kMostAtOnce, all - token);
        error = arguments.tokens == 1 ? launch_tokens<Element, 1>(problem, device, arguments, stream)
                                      : launch_tokens<Element, 2>(problem, device, arguments, stream);
        arguments.x = moved(arguments.x, kMostAtOnce * arguments.x_ld);
        arguments.y = const_cast<void*>(moved(arguments.y, kMostAtOnce * arguments.y_ld));
        arguments.other = moved(arguments.other, kMostAtOnce * arguments.other_ld);
    }
    return error;
}

}  // namespace

size_t workspace_size(const Problem& problem, const Device& device) {
    const int parts = problem.skip == Skip::outputs ? 1 : parts_of(problem, device);
    if (parts == 1 || is_cluster(device, parts)) return 0;
    return sizeof(float) * parts * std::min<int64_t>(kMostAtOnce, problem.tokens) *
           problem.pattern.out_features;
}

int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
    const Arguments arguments = arguments_of(problem, device, workspace);
    return problem.input_dtype == DType::bfloat16
               ? launch_as<__nv_bfloat16>(problem, device, arguments, stream)
               : launch_as<__half>(problem, device, arguments, stream);
}

}  // namespace ts::skip
