// The steps of blocks of any size for AVX2.
#include "cpu/instruction_set.h"

#include "cpu/blocks.h"

#ifdef __x86_64__

namespace ts::cpu {
namespace {

TS_INSTRUCTION_SET(Avx2, __attribute__((target("avx2,fma"))), 32, 4);

}  // namespace

const BlockSteps double_blocks_avx2 = block_steps_of<Avx2, double>();
const BlockSteps float_blocks_avx2 = block_steps_of<Avx2, float>();

}  // namespace ts::cpu

#endif
