// The steps for AVX2, and for AVX-VNNI beside it.
#include "cpu/instruction_set.h"

#ifdef __x86_64__

namespace ts::cpu {
namespace {

TS_INSTRUCTION_SET(Avx2, __attribute__((target("avx2,fma"))), 32, 4);

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }

}  // namespace

const InstructionSet avx2 = set_of<Avx2>(has_avx2, "the processor lacks AVX2 or FMA", encoder_avx2,
                                         double_blocks_avx2, float_blocks_avx2);
const InstructionSet avx_vnni =
    group_set<Avx2>(has_avx_vnni, "the processor lacks AVX-VNNI", vnni_steps<Avx2, true>(), encoder_avx_vnni);

}  // namespace ts::cpu

#endif
