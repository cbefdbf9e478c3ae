// The steps of encoders for any processor.
#include "cpu/encoder_set.h"

namespace ts::cpu {
namespace {

TS_ENCODER_SET(Portable, , 16, 4);

}  // namespace

const EncoderSteps encoder_portable = widened_encoder<Portable>();

}  // namespace ts::cpu
