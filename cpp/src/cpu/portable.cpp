// The steps for any processor.
#include "cpu/instruction_set.h"

namespace ts::cpu {
namespace {

TS_INSTRUCTION_SET(Portable, , 16, 4);

}  // namespace

const InstructionSet portable = set_of<Portable>([] { return true; }, nullptr, encoder_portable,
                                                 double_blocks_portable, float_blocks_portable);

const InstructionSet& widest() {
#ifdef __x86_64__
    for (const InstructionSet* set : {&avx512, &avx2})
        if (set->available()) return *set;
#endif
    return portable;
}

}  // namespace ts::cpu
