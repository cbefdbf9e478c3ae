// Shared by the files of encoders for instruction sets: each compiles the steps for its own. Include this
// first.
#pragma once

#include "cpu/instruction_set.h"

#include "cpu/encoder_steps.h"

namespace ts::cpu {
namespace {

// Vectors of BYTES bytes; ROWS rows are multiplied at once. Multiplications are not inlined: there, their
// sums would not stay in registers.
#define TS_ENCODER_SET(NAME, TARGET, BYTES, ROWS)                                                  \
    struct NAME {                                                                                  \
        static constexpr int kBytes = BYTES;                                                       \
        template <class P>                                                                         \
        TARGET __attribute__((noinline)) static void multiply_with(const RowTile& s) {             \
            multiply<P, ROWS>(s);                                                                  \
        }                                                                                          \
        template <DType From, DType To>                                                            \
        TARGET static void row_with(const RowStep& s) {                                            \
            row_step<Codec<From, BYTES>, Codec<To, BYTES>>(s);                                     \
        }                                                                                          \
        TARGET static void finish_with(const Output& o) {                                          \
            using C = Codec<DType::float32, BYTES>;                                                \
            finish<C, Codec<DType::float32, std::min(BYTES, kSquareBytes)>, kNearGelu>(o);         \
        }                                                                                          \
        TARGET static void gate_with(const GateStep& s) { gate_step<Vector<float, BYTES>>(s); }    \
        template <class Reader, class Q, class Scores, class Sums>                                 \
        TARGET static void attention_with(const AttentionStep& s) {                                \
            attention_step<Reader, Q, multiply_with<Scores>, multiply_with<Sums>, ROWS, BYTES>(s); \
        }                                                                                          \
    }

// Reader, Q and Scores: of products of q and k; Sums: of those of probabilities and v.
template <class Set, class Reader, class Q, class Scores, class Sums>
constexpr EncoderSteps encoder_steps() {
    return {{{&Set::template row_with<DType::float32, DType::float32>,
              &Set::template row_with<DType::float32, DType::bfloat16>},
             {&Set::template row_with<DType::bfloat16, DType::float32>,
              &Set::template row_with<DType::bfloat16, DType::bfloat16>}},
            &Set::finish_with,
            &Set::gate_with,
            &Set::template attention_with<Reader, Q, Scores, Sums>,
            [](int64_t tokens, int64_t features) {
                using Memory = AttentionMemory<Q, Reader::col_step, Set::kBytes>;
                return static_cast<int64_t>(Memory(nullptr, tokens, features).workspace.size());
            }};
}

// Sums of int8 in pairs that are widened.
template <class Set>
constexpr EncoderSteps widened_encoder() {
    using Products = WidenedProducts<Set::kBytes>;
    return encoder_steps<Set, WidenedPairs<Set::kBytes>, int16_t, Products, Products>();
}

// Sums of int8 in groups of four. Avx: in the encoding of AVX-VNNI.
template <class Set, bool Avx>
constexpr EncoderSteps group_encoder() {
    constexpr int bytes = Set::kBytes;
    return encoder_steps<Set, ColumnGroups<bytes, kByteOffset>, int8_t, GroupProducts<bytes, Avx>,
                         FusedProducts<bytes, Avx>>();
}

}  // namespace
}  // namespace ts::cpu
