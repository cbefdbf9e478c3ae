// The steps for AVX-512, and for VNNI and AMX INT8 beside it.
#include "cpu/instruction_set.h"

#include "cpu/amx.h"

#ifdef __x86_64__

namespace ts::cpu {
namespace {

TS_INSTRUCTION_SET(Avx512, TS_AVX512, 64, 8);

constexpr Steps kAmxInt8{64, 16, 4, 4, true, Avx512::pack_with<ColumnGroups<64, 0>>, multiply_amx_int8};

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_amx_int8() {
    static const bool available = has_avx512() && request_amx_int8();
    return available;
}

}  // namespace

const InstructionSet avx512 = set_of<Avx512>(has_avx512, "the processor lacks AVX-512 F, BW, DQ or VL",
                                             encoder_avx512, double_blocks_avx512, float_blocks_avx512);
const InstructionSet avx512_vnni = group_set<Avx512>(has_avx512_vnni, "the processor lacks AVX-512 VNNI",
                                                     vnni_steps<Avx512, false>(), encoder_avx512_vnni);
const InstructionSet amx_int8 =
    group_set<Avx512>(has_amx_int8, "the processor lacks AMX INT8, or the system does not grant it", kAmxInt8,
                      encoder_amx_int8);

}  // namespace ts::cpu

#endif
