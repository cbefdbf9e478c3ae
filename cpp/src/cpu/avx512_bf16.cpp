// The steps for AVX-512 BF16, and for AMX BF16 beside it.
#include "cpu/instruction_set.h"

#include "cpu/amx.h"

#ifdef __x86_64__

namespace ts::cpu {
namespace {

TS_INSTRUCTION_SET(Avx512, TS_AVX512, 64, 8);

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

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

bool has_amx_bf16() {
    static const bool available = has_avx512_bf16() && request_amx_bf16();
    return available;
}

}  // namespace

const InstructionSet avx512_bf16 =
    pair_set(has_avx512_bf16, "the processor lacks AVX-512 BF16", kVectors * 16, multiply_pairs, nullptr, 8);
const InstructionSet amx_bf16 =
    pair_set(has_amx_bf16, "the processor lacks AMX BF16, or the system does not grant it", 64,
             multiply_amx_bf16, multiply_tokens_amx, 0);

}  // namespace ts::cpu

#endif
