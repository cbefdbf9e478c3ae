// The shared memory of a CTA of compute capability 9.0, which bounds the stages of its rings.
#pragma once

namespace ts::sm90 {

constexpr int kSharedCapacity = 227 << 10;                     // that a CTA can have
constexpr int kControlBytes = 3 << 10;                         // for barriers and the schedule
constexpr int kStagedBytes = kSharedCapacity - kControlBytes;  // for operands and results

}  // namespace ts::sm90
