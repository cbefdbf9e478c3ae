// Shared by the files of instruction sets: each compiles the steps for its own. Include this first.
#pragma once

// A multiplication and the addition of its result are one instruction where the processor has it, in
// every language mode.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=fast")
// Vectors wider than the baseline's are only passed to functions that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#include "cpu/steps.h"

#include <algorithm>

#include "cpu/eight_bits.h"
#include "cpu/finish.h"
#include "cpu/four_bits.h"
#include "cpu/multiply.h"
#include "cpu/multiply_decode.h"
#include "cpu/multiply_skip.h"
#include "cpu/pack.h"
#include "cpu/quantize_steps.h"
#include "cpu/scale.h"
#include "cpu/vectors.h"

namespace ts::cpu {
namespace {

constexpr int kSquareBytes = 32;  // of a row of the squares in which results are transposed
constexpr int kVectors = 3;       // of a tile; with them ROWS sums each and an element stay in registers

template <class Set, DType T>
constexpr Steps steps_of() {
    using C = Codec<T, Set::kBytes>;
    using V = typename C::V;
    static_assert(lanes_of<V> / 2 <= kMostDecodeTokens);
    Steps steps{kVectors * lanes_of<V>,
                lanes_of<V>,
                1,
                sizeof(element_t<V>),
                T == DType::float64 || T == DType::float32,
                &Set::template pack_with<Single<C>>,
                &Set::template multiply_with<Products<V>>,
                nullptr,
                nullptr,
                &Set::template multiply_decode_with<DecodeProducts<C, PlainCodec<element_t<V>, Set::kBytes>>>,
                lanes_of<V> / 2};
    if constexpr (!is_quantized(T)) {
        steps.finish = &Set::template finish_with<T>;
        steps.scale = &Set::template scale_with<C>;
    }
    if constexpr (T == DType::float16 || T == DType::bfloat16)
        steps.decode_values = &Set::template run_with<BlockDecode<C>>;
    if constexpr (!is_quantized(T) && T != DType::float64) {
        steps.largest_magnitude = &Set::template largest_magnitude_with<C>;
        steps.quantize = &Set::template quantize_with<C>;
        steps.multiply_decode_int4 = &Set::template multiply_decode_with<DecodeInt4<Set::kBytes>>;
        steps.skip_inputs = &Set::template skip_inputs_with<C>;
        steps.skip_outputs = &Set::template skip_outputs_with<C>;
    }
    return steps;
}

// int8 in pairs, of which both are widened.
template <class Set>
constexpr Steps widened_steps() {
    constexpr int bytes = Set::kBytes, lanes = bytes / 4;
    Steps steps{kVectors * lanes,
                lanes,
                2,
                4,
                false,
                &Set::template pack_with<WidenedPairs<bytes>>,
                &Set::template multiply_with<WidenedProducts<bytes>>,
                nullptr,
                nullptr,
                &Set::template multiply_decode_with<DecodePairs<bytes>>,
                lanes / 2};
    steps.skip_inputs = &Set::template skip_inputs_with<Codec<DType::int8, bytes>>;
    steps.skip_outputs = &Set::template skip_outputs_with<Codec<DType::int8, bytes>>;
    return steps;
}

template <class Set>
constexpr InstructionSet set_of(bool (*available)(), const char* missing, const EncoderSteps& encoder,
                                const BlockSteps& double_blocks, const BlockSteps& float_blocks) {
    InstructionSet set{
        available,
        missing,
        {steps_of<Set, DType::float64>(), steps_of<Set, DType::float32>(), steps_of<Set, DType::float16>(),
         steps_of<Set, DType::bfloat16>(), widened_steps<Set>(), steps_of<Set, DType::float8_e4m3fn>()},
        &encoder};
    set.steps[static_cast<int>(DType::float64)].blocks = &double_blocks;
    set.steps[static_cast<int>(DType::float32)].blocks = &float_blocks;
    return set;
}

// Vectors of BYTES bytes; ROWS rows are multiplied at once.
#define TS_INSTRUCTION_SET(NAME, TARGET, BYTES, ROWS)                                 \
    struct NAME {                                                                     \
        static constexpr int kBytes = BYTES;                                          \
        template <class Reader>                                                       \
        TARGET static void pack_with(const Pack& p) {                                 \
            pack<Reader>(p);                                                          \
        }                                                                             \
        template <class P>                                                            \
        TARGET static void multiply_with(const RowTile& s) {                          \
            multiply<P, ROWS>(s);                                                     \
        }                                                                             \
        template <class P>                                                            \
        TARGET static void multiply_decode_with(const DecodeTile& s) {                \
            multiply_decode<P>(s);                                                    \
        }                                                                             \
        template <class K>                                                            \
        TARGET static void run_with(const typename K::Arguments& a) {                 \
            K::run(a);                                                                \
        }                                                                             \
        template <class C>                                                            \
        TARGET static void skip_inputs_with(const SkipLines& s) {                     \
            skip_inputs<C>(s);                                                        \
        }                                                                             \
        template <class C>                                                            \
        TARGET static void skip_outputs_with(const SkipTile& s) {                     \
            skip_outputs<C>(s);                                                       \
        }                                                                             \
        template <DType T>                                                            \
        TARGET static void finish_with(const Output& o) {                             \
            finish<Codec<T, BYTES>, Codec<T, std::min(BYTES, kSquareBytes)>>(o);      \
        }                                                                             \
        template <class C>                                                            \
        TARGET static void scale_with(const Scaling& s) {                             \
            scale<C>(s);                                                              \
        }                                                                             \
        template <class C>                                                            \
        TARGET static uint32_t largest_magnitude_with(const void* x, int64_t count) { \
            return largest_magnitude<C>(x, count);                                    \
        }                                                                             \
        template <class C>                                                            \
        TARGET static void quantize_with(const Quantizing& q) {                       \
            quantize<C>(q);                                                           \
        }                                                                             \
    }

#ifdef __x86_64__
#define TS_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

// int8 in groups of four, whose results Set finishes.
template <class Set>
constexpr InstructionSet group_set(bool (*available)(), const char* missing, const Steps& steps,
                                   const EncoderSteps& encoder) {
    InstructionSet set{available, missing, {}, &encoder};
    set.steps[static_cast<int>(DType::float32)].finish = Set::template finish_with<DType::float32>;
    set.steps[static_cast<int>(DType::float16)].finish = Set::template finish_with<DType::float16>;
    set.steps[static_cast<int>(DType::bfloat16)].finish = Set::template finish_with<DType::bfloat16>;
    set.steps[static_cast<int>(DType::int8)] = steps;
    return set;
}

// Groups of bytes with one sign, which leaves x none.
template <class Set, bool Avx>
constexpr Steps vnni_steps() {
    constexpr int bytes = Set::kBytes, lanes = bytes / 4;
    Steps steps{kVectors * lanes,
                lanes,
                4,
                4,
                true,
                Set::template pack_with<ColumnGroups<bytes, kByteOffset>>,
                Set::template multiply_with<GroupProducts<bytes, Avx>>,
                nullptr,
                nullptr,
                Set::template multiply_decode_with<DecodeGroups<bytes, Avx>>,
                kMostDecodeTokens - 1};
    steps.x_offset = kByteOffset;
    return steps;
}

inline bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace
}  // namespace ts::cpu
