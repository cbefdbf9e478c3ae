// The steps of blocks of any size for AVX-512.
#include "cpu/instruction_set.h"

#include "cpu/blocks.h"

#ifdef __x86_64__

namespace ts::cpu {
namespace {

TS_INSTRUCTION_SET(Avx512, TS_AVX512, 64, 8);

}  // namespace

const BlockSteps double_blocks_avx512 = block_steps_of<Avx512, double>();
const BlockSteps float_blocks_avx512 = block_steps_of<Avx512, float>();

}  // namespace ts::cpu

#endif
