// Compiles the steps once for every instruction set.

// A multiplication and the addition of its result are one instruction where the processor has it, in
// every language mode.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=fast")
// Vectors wider than the baseline's are only passed to functions that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#include "cpu/steps.h"

#include <algorithm>

#include "cpu/amx.h"
#include "cpu/eight_bits.h"
#include "cpu/finish.h"
#include "cpu/four_bits.h"
#include "cpu/multiply.h"
#include "cpu/multiply_decode.h"
#include "cpu/pack.h"
#include "cpu/quantize.h"
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
    if constexpr (!is_quantized(T) && T != DType::float64) {
        steps.largest_magnitude = &Set::template largest_magnitude_with<C>;
        steps.quantize = &Set::template quantize_with<C>;
        steps.multiply_decode_int4 = &Set::template multiply_decode_with<DecodeInt4<Set::kBytes>>;
    }
    return steps;
}

// int8 in pairs, of which both are widened.
template <class Set>
constexpr Steps widened_steps() {
    constexpr int bytes = Set::kBytes, lanes = bytes / 4;
    return {kVectors * lanes,
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
}

template <class Set>
constexpr InstructionSet set_of(bool (*available)(), const char* missing) {
    return {
        available,
        missing,
        {steps_of<Set, DType::float64>(), steps_of<Set, DType::float32>(), steps_of<Set, DType::float16>(),
         steps_of<Set, DType::bfloat16>(), widened_steps<Set>(), steps_of<Set, DType::float8_e4m3fn>()}};
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

TS_INSTRUCTION_SET(Portable, , 16, 4);
#ifdef __x86_64__
TS_INSTRUCTION_SET(Avx2, __attribute__((target("avx2,fma"))), 32, 4);
TS_INSTRUCTION_SET(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), 64, 8);

#define TS_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

TS_AVX512_BF16 void pack_pairs(const Pack& p) {
    if (p.pair_rows)
        pack<RowPairs<64>>(p);
    else
        pack<ColumnPairs<64>>(p);
}

TS_AVX512_BF16 void multiply_pairs(const RowTile& s) { multiply<PairProducts<64>, 8>(s); }

// Rounds with the processor's own instruction, which takes subnormal numbers for zero as its products do.
// In assembly, because intrinsics could not be inlined into code that is written for every instruction set.
template <int Bytes>
struct NativeBfloat16 : Codec<DType::bfloat16, Bytes> {
    using typename Codec<DType::bfloat16, Bytes>::V;
    using typename Codec<DType::bfloat16, Bytes>::S;
    static TS_INLINE S encode(const V& v) {
        S result;
        asm("vcvtneps2bf16 %1, %0" : "=v"(result) : "v"(v));
        return result;
    }
};

TS_AVX512_BF16 void finish_pairs(const Output& o) {
    finish<NativeBfloat16<64>, NativeBfloat16<kSquareBytes>>(o);
}

// A vector holds so many rows of a block.
template <int kRows_ = 1>
struct DecodeBfloat16 : PairProducts<64>, Unscaled {
    using Value = uint16_t;
    using X = uint16_t;
    using Narrower = DecodeBfloat16<2 * kRows_>;
    static constexpr int kStep = 32 / kRows_, kRows = kRows_;
    static TS_INLINE Operand values(const Value* from, Row) { return load<Operand>(from); }
    static TS_INLINE Operand x(const X* from) { return repeated<kRows_, Operand>(from); }
};

constexpr InstructionSet pair_set(bool (*available)(), const char* missing, int32_t tile,
                                  void (*multiply)(const RowTile&), void (*multiply_tokens)(const TokenTile&),
                                  int32_t decode_tokens) {
    const Steps steps = {tile,
                         16,
                         2,
                         4,
                         true,
                         pack_pairs,
                         multiply,
                         finish_pairs,
                         multiply_tokens,
                         Avx512::multiply_decode_with<DecodeBfloat16<>>,
                         decode_tokens,
                         Avx512::scale_with<Codec<DType::bfloat16, 64>>};
    Steps wide{};  // results in float32 alone
    wide.finish = Avx512::finish_with<DType::float32>;
    return {available, missing, {{}, wide, {}, steps}};
}

// int8 in groups of four, whose results Set finishes.
template <class Set>
constexpr InstructionSet group_set(bool (*available)(), const char* missing, const Steps& steps) {
    InstructionSet set{available, missing, {}};
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

constexpr Steps kAmxInt8{64, 16, 4, 4, true, Avx512::pack_with<ColumnGroups<64, 0>>, multiply_amx_int8};

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }

bool has_amx_int8() {
    static const bool available = has_avx512() && request_amx_int8();
    return available;
}

bool has_amx_bf16() {
    static const bool available = has_avx512_bf16() && request_amx_bf16();
    return available;
}
#endif

}  // namespace

const InstructionSet portable = set_of<Portable>([] { return true; }, nullptr);
#ifdef __x86_64__
const InstructionSet avx2 = set_of<Avx2>(has_avx2, "the processor lacks AVX2 or FMA");
const InstructionSet avx512 = set_of<Avx512>(has_avx512, "the processor lacks AVX-512 F, BW, DQ or VL");
const InstructionSet avx512_bf16 =
    pair_set(has_avx512_bf16, "the processor lacks AVX-512 BF16", kVectors * 16, multiply_pairs, nullptr, 8);
const InstructionSet amx_bf16 =
    pair_set(has_amx_bf16, "the processor lacks AMX BF16, or the system does not grant it", 64,
             multiply_amx_bf16, multiply_tokens_amx, 0);
const InstructionSet avx_vnni =
    group_set<Avx2>(has_avx_vnni, "the processor lacks AVX-VNNI", vnni_steps<Avx2, true>());
const InstructionSet avx512_vnni =
    group_set<Avx512>(has_avx512_vnni, "the processor lacks AVX-512 VNNI", vnni_steps<Avx512, false>());
const InstructionSet amx_int8 = group_set<Avx512>(
    has_amx_int8, "the processor lacks AMX INT8, or the system does not grant it", kAmxInt8);
#endif

const InstructionSet& widest() {
#ifdef __x86_64__
    for (const InstructionSet* set : {&avx512, &avx2})
        if (set->available()) return *set;
#endif
    return portable;
}

}  // namespace ts::cpu
