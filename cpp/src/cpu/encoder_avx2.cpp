// The steps of encoders for AVX2, and for AVX-VNNI beside it.
#include "cpu/encoder_set.h"

#ifdef __x86_64__

namespace ts::cpu {
namespace {

TS_ENCODER_SET(Avx2, __attribute__((target("avx2,fma"))), 32, 4);

}  // namespace

const EncoderSteps encoder_avx2 = widened_encoder<Avx2>();
const EncoderSteps encoder_avx_vnni = group_encoder<Avx2, true>();

}  // namespace ts::cpu

#endif
