// The tile registers of AMX: eight, of 16 rows of 64 bytes at most.
#pragma once

#include <cstdint>

#include "cpu/vectors.h"

namespace ts::cpu {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

template <int Tile>
TS_INLINE void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
TS_INLINE void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
TS_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
inline void tile_release() { asm volatile("tilerelease"); }
template <bool Int8, int Sum, int A, int B>
TS_INLINE void tile_multiply() {
    if constexpr (Int8)
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
    else
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
// A of int8 times B of bytes without a sign.
template <int Sum, int A, int B>
TS_INLINE void tile_multiply_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

}  // namespace ts::cpu
