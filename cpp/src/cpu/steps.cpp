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

template <class Set, DType T>
constexpr Steps steps_of() {
    using C = Codec<T, Set::kBytes>;
    using V = typename C::V;
    return {Set::kVectors * lanes_of<V>,
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

// Vectors of BYTES bytes; ROWS x VECTORS of them hold sums and have to leave registers for operands.
#define TS_INSTRUCTION_SET(NAME, TARGET, BYTES, ROWS, VECTORS)   \
    struct NAME {                                                \
        static constexpr int kBytes = BYTES, kVectors = VECTORS; \
        template <class Reader>                                  \
        TARGET static void pack_with(const Pack& p) {            \
            pack<Reader>(p);                                     \
        }                                                        \
        template <class V>                                       \
        TARGET static void multiply_with(const Strip& s) {       \
            multiply<V, ROWS, VECTORS>(s);                       \
        }                                                        \
        template <class C>                                       \
        TARGET static void finish_with(const Output& o) {        \
            finish<C>(o);                                        \
        }                                                        \
    }

TS_INSTRUCTION_SET(Portable, , 16, 4, 2);

}  // namespace

const InstructionSet portable = set_of<Portable>([] { return true; }, nullptr);

}  // namespace ts::cpu
