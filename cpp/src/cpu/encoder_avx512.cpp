// The steps of encoders for AVX-512, and for VNNI beside it.
#include "cpu/encoder_set.h"

#ifdef __x86_64__

namespace ts::cpu {
namespace {

TS_ENCODER_SET(Avx512, TS_AVX512, 64, 8);

}  // namespace

const EncoderSteps encoder_avx512 = widened_encoder<Avx512>();
const EncoderSteps encoder_avx512_vnni = group_encoder<Avx512, false>();

}  // namespace ts::cpu

#endif
