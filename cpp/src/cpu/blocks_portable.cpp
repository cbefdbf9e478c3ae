// The steps of blocks of any size for any processor.
#include "cpu/instruction_set.h"

#include "cpu/blocks.h"

namespace ts::cpu {
namespace {

TS_INSTRUCTION_SET(Portable, , 16, 4);

}  // namespace

const BlockSteps double_blocks_portable = block_steps_of<Portable, double>();
const BlockSteps float_blocks_portable = block_steps_of<Portable, float>();

}  // namespace ts::cpu
