// Compiles the steps once for every instruction set.

// A multiplication and the addition of its result are one instruction where the processor has it, in
// every language mode.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=fast")
// Vectors wider than the baseline's are only passed to functions that are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#include "cpu/steps.h"

namespace ts::cpu {
namespace {

constexpr int kVectors = 3;  // of a tile; with them ROWS sums each and an element stay in registers

template <class Set, DType T>
constexpr Steps steps_of() {
    using C = Codec<T, Set::kBytes>;
    using V = typename C::V;
    return {kVectors * lanes_of<V>,
            lanes_of<V>,
            1,
            sizeof(element_t<V>),
            T == DType::float64 || T == DType::float32,
            &Set::template pack_with<Single<C>>,
            &Set::template multiply_with<V>,
            &Set::template finish_with<C>};
}

template <class Set>
constexpr InstructionSet set_of(bool (*available)(), const char* missing) {
    return {available,
            missing,
            {steps_of<Set, DType::float64>(), steps_of<Set, DType::float32>(),
             steps_of<Set, DType::float16>(), steps_of<Set, DType::bfloat16>()}};
}

// Vectors of BYTES bytes; ROWS rows are multiplied at once.
#define TS_INSTRUCTION_SET(NAME, TARGET, BYTES, ROWS)      \
    struct NAME {                                          \
        static constexpr int kBytes = BYTES;               \
        template <class Reader>                            \
        TARGET static void pack_with(const Pack& p) {      \
            pack<Reader>(p);                               \
        }                                                  \
        template <class V>                                 \
        TARGET static void multiply_with(const Strip& s) { \
            multiply<V, ROWS>(s);                          \
        }                                                  \
        template <class C>                                 \
        TARGET static void finish_with(const Output& o) {  \
            finish<C>(o);                                  \
        }                                                  \
    }

TS_INSTRUCTION_SET(Portable, , 16, 4);
#ifdef __x86_64__
TS_INSTRUCTION_SET(Avx2, __attribute__((target("avx2,fma"))), 32, 4);
TS_INSTRUCTION_SET(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), 64, 8);

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

const InstructionSet portable = set_of<Portable>([] { return true; }, nullptr);
#ifdef __x86_64__
const InstructionSet avx2 = set_of<Avx2>(has_avx2, "the processor lacks AVX2 or FMA");
const InstructionSet avx512 = set_of<Avx512>(has_avx512, "the processor lacks AVX-512 F, BW, DQ or VL");
#endif

}  // namespace ts::cpu
