// dds_nt for up to 8 tokens, where the instructions beside reading W are what decides: values go from memory to
// registers, without shared memory. A warp has 16 rows and a share of their block row's k; the sums of a CTA's
// warps are added in shared memory. mma.sync multiplies 16 of k in any order, so k is permuted: each lane
// loads neighbours, of x as well. Products take values of 8 and 4 bits themselves, which 16 bits hold
// exactly; their sums over a step times its scale are added to those of the results.
#pragma once

#include "sm80/decode_epilogue.cuh"
#include "sm80/decode_int4.cuh"

namespace ts::sm80 {

// int8 in bfloat16, which has 8 bits of fraction: without its sign a byte is added to 128, with it taken away.
__device__ inline uint32_t exact_int8(uint32_t word, int pair) {
    const uint32_t apart = __byte_perm(word, 0, pair == 0 ? 0x4140 : 0x4342);
    uint32_t biased, bias;
    constexpr int kAndOr = (0xf0 & 0xcc) | 0xaa;
    asm("lop3.b32 %0, %1, %2, %3, %4;"
        : "=r"(biased)
        : "r"(apart), "n"(0x007f007f), "n"(0x43004300), "n"(kAndOr));
    asm("lop3.b32 %0, %1, %2, %3, %4;"
        : "=r"(bias)
        : "r"(apart), "n"(0x00800080), "n"(0x43004300), "n"(kAndOr));
    const __nv_bfloat162 result = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&biased),
                                          *reinterpret_cast<const __nv_bfloat162*>(&bias));
    return *reinterpret_cast<const uint32_t*>(&result);
}

// The operands of a row for a product: 4 of k of a lane, from its words of a step.
template <DType kDType, class Value>
__device__ inline Fragment<2> row_operands(const uint32_t* words, int product) {
    if constexpr (kDType == DType::int4) {
        const uint32_t word = words[product / 2], later = word >> 4;
        const int first = product % 2 * 2;
        return {decode_int4<Value>(word, later, first), decode_int4<Value>(word, later, first + 1)};
    } else if constexpr (!is_quantized(kDType)) {
        return {words[2 * product], words[2 * product + 1]};
    } else if constexpr (kDType == DType::int8 && std::is_same_v<Value, __nv_bfloat16>) {
        return {exact_int8(words[product], 0), exact_int8(words[product], 1)};
    } else {
        const auto exact = [&](int pair) {
            const __half2 values = decode_pair<kDType>(words[product], pair);
            if constexpr (std::is_same_v<Value, __half>)
                return *reinterpret_cast<const uint32_t*>(&values);
            else
                return round_pair(__half22float2(values), Value());
        };
        return {exact(0), exact(1)};
    }
}

// Loads words that are read once.
template <int kWords>
__device__ inline Fragment<kWords> load_once(const char* from) {
    Fragment<kWords> to;
    if constexpr (kWords == 4)
        asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to.value[0]), "=r"(to.value[1]), "=r"(to.value[2]), "=r"(to.value[3])
                     : "l"(from));
    else if constexpr (kWords == 2)
        asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
                     : "=r"(to.value[0]), "=r"(to.value[1])
                     : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(to.value[0]) : "l"(from));
    return to;
}

// `kDType`: of values; those of 16 bits have that of x. `kStep`: elements of k, at most those of a block.
template <class Math_, DType kDType_, int kStep_>
struct StreamTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    static constexpr DType kDType = kDType_;
    static constexpr bool kQuantized = is_quantized(kDType);
    static constexpr int kStep = kStep_;
    static constexpr int kBits = kDType == DType::int4 ? 4 : kQuantized ? 8 : 16;
    static constexpr int kProducts = kStep / 16;           // of a step
    static constexpr int kOfLane = kStep / 4;              // elements of k of a step
    static constexpr int kWords = kOfLane * kBits / 32;    // of a row and a step
    static constexpr int kLoad = std::min(kWords, 4);      // words at a time, next to those of other lanes
    static constexpr int kInputWords = kOfLane / 2;
    static constexpr int kInputOfLoad = kInputWords * kLoad / kWords;  // likewise
    static constexpr int kAhead = kBits == 16 ? 128 / kStep : 256 / kStep;  // steps
    // As the epilogue knows them from DecodeTraits.
    static constexpr int kTeam = 1, kHalves = 1, kWarpRowTiles = 1, kWarpTokenTiles = 1;
    static constexpr int kRows = 16, kTokens = 8;
    static constexpr int kSumLine = kRows + 4;
    static constexpr int kSumBytes = kTokens * kSumLine * static_cast<int>(sizeof(float));
    static_assert(sizeof(Input) == 2 && kWords > 0);
};

// What a lane has loaded of a step: of rows lane / 4 and 8 more, and of token lane / 4.
template <class Traits>
struct StreamStep {
    uint32_t values[2][Traits::kWords];
    alignas(16) uint32_t input[Traits::kInputWords];
    float2 scales;
};

template <class Traits>
__global__ void __launch_bounds__(256) stream_kernel(const __grid_constant__ DecodeArguments arguments) {
    extern __shared__ __align__(128) char shared[];
    constexpr int kAhead = Traits::kAhead, kBatch = 32;  // entries: one a lane
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int feature = static_cast<int>(blockIdx.x) * Traits::kRows;
    const int row = feature >> arguments.row_shift, rows = 1 << arguments.row_shift;
    const int first_entry = __ldg(arguments.rows.ptr + row), last_entry = __ldg(arguments.rows.ptr + row + 1);
    const int to_entry = Traits::kStep < 64 ? 0 : arguments.k_shift - 6;  // log2 of the steps of a block
    const int all = (last_entry - first_entry) << to_entry;
    const int first = all * warp / warps, last = all * (warp + 1) / warps;  // steps

    const int row_in_block = (feature & (rows - 1)) + lane / 4;
    const int k_bytes = (Traits::kStep << to_entry) * Traits::kBits / 8;  // of a row of a block
    const char* const values = static_cast<const char*>(arguments.values) +
                               static_cast<int64_t>(row_in_block) * k_bytes + lane % 4 * 4 * Traits::kLoad;
    const bool has_token = lane / 4 < arguments.tokens;
    const char* const input = static_cast<const char*>(arguments.input) +
                              lane / 4 * arguments.input_ld + lane % 4 * 4 * Traits::kInputOfLoad;
    const float* const scales = arguments.scales + (arguments.row_scales ? row_in_block : 0);

    int batch = first_entry + (first >> to_entry);
    int2 entries = {0, 0};  // column and slot
    const auto fetch = [&] {
        const int entry = batch + lane;
        if (entry < last_entry)
            entries = {__ldg(arguments.rows.idx + entry), __ldg(arguments.rows.slot + entry)};
    };
    fetch();

    StreamStep<Traits> steps[kAhead] = {};
    const auto load = [&](int step, StreamStep<Traits>& to) {
        const int entry = first_entry + (step >> to_entry), in_block = step & ((1 << to_entry) - 1);
        if (entry == batch + kBatch) {
            batch += kBatch;
            fetch();
        }
        const int64_t column = __shfl_sync(~0u, entries.x, entry - batch);
        const int64_t slot = __shfl_sync(~0u, entries.y, entry - batch);
        const char* const from =
            values + (slot << arguments.row_shift) * k_bytes + in_block * (Traits::kStep * Traits::kBits / 8);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < Traits::kWords; i += Traits::kLoad) {
                const auto words = load_once<Traits::kLoad>(from + half * 8 * k_bytes + 16 * i);
#pragma unroll
                for (int j = 0; j < Traits::kLoad; ++j) to.values[half][i + j] = words.value[j];
            }
        if constexpr (Traits::kQuantized) {
            const float* const scale = scales + (arguments.row_scales ? slot << arguments.row_shift : slot);
            to.scales = {__ldg(scale), __ldg(scale + (arguments.row_scales ? 8 : 0))};
        }
        if (!has_token) return;
        const char* const x = input + ((column << to_entry) + in_block) * (2 * Traits::kStep);
        constexpr int kTogether = Traits::kInputOfLoad, kLoad = std::min(kTogether, 4);
#pragma unroll
        for (int i = 0; i < Traits::kInputWords; i += kLoad) {
            const char* const at = x + i / kTogether * 16 * kTogether + i % kTogether * 4;
            if constexpr (kLoad == 4)
                *reinterpret_cast<uint4*>(to.input + i) = __ldg(reinterpret_cast<const uint4*>(at));
            else
                *reinterpret_cast<uint2*>(to.input + i) = __ldg(reinterpret_cast<const uint2*>(at));
        }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
        if (first + i < last) load(first + i, steps[i]);

    DecodeSums<Traits> sums = {};
    const auto multiply = [&](const StreamStep<Traits>& step) {
        float own[4] = {};
        float(&to)[4] = Traits::kQuantized ? own : sums[0][0];
#pragma unroll
        for (int i = 0; i < Traits::kProducts; ++i) {
            const auto upper = row_operands<Traits::kDType, typename Traits::Input>(step.values[0], i);
            const auto lower = row_operands<Traits::kDType, typename Traits::Input>(step.values[1], i);
            Traits::Math::mma(to, {upper.value[0], lower.value[0], upper.value[1], lower.value[1]},
                              {step.input[2 * i], step.input[2 * i + 1]});
        }
        if constexpr (Traits::kQuantized) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][0][i] += own[i] * (i < 2 ? step.scales.x : step.scales.y);
        }
    };
#pragma unroll 1
    for (int step = first; step < last; step += kAhead)
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (step + i < last) multiply(steps[i]);
            if (step + i + kAhead < last) load(step + i + kAhead, steps[i]);
        }

    stage_sums<Traits>(sums, reinterpret_cast<float*>(shared + warp * Traits::kSumBytes), lane);
    __syncthreads();
    if (!arguments.gated)
        store_sums<Traits, false>(arguments, shared, feature, 0);
    else
        store_gated_sums<Traits>(arguments, shared, feature, 0);
}

}  // namespace ts::sm80
