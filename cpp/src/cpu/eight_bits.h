// Operands of 8 bits: how they are packed and multiplied, for vectors of any length.
//
//   float8  each element becomes a float32
//   int8    four neighbours of k make a group, multiplied by one instruction that takes x without a sign:
//           x is packed with 128 added. Or two neighbours, widened to 16 bits, make a pair.
//
// Sums of int8 are exact modulo 2^32, and so are the results, which are below 2^31.
#pragma once

#include <cstdint>

#include "cpu/multiply_decode.h"
#include "cpu/scale.h"
#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

template <int Bytes>
struct Codec<DType::float8_e4m3fn, Bytes> {
    using Stored = uint8_t;
    using V = Vector<float, Bytes>;
    using S = Vector<uint8_t, Bytes / 4>;
    static TS_INLINE V decode(const S& s) { return decode_float8<V>(widened<lanes_of<V>>(s)); }
};

// ---- readers of pack ----

// Vectors of groups of four neighbours in a row, plus an offset that changes their highest bits alone.
template <int Bytes, int32_t Offset>
struct ColumnGroups {
    using V = Vector<uint32_t, Bytes>;
    static_assert(Offset == 0 || Offset == kByteOffset);
    static constexpr int row_step = 1, col_step = 4;
    template <bool Full>
    static TS_INLINE V read(const Pack& p, int64_t row, int64_t col) {
        using S = Vector<uint8_t, Bytes>;
        const auto* from = static_cast<const uint8_t*>(p.source) + row * p.ld + col;
        const int64_t count = Full ? lanes_of<S> : row < p.rows ? p.cols - col : 0;
        return bit_cast_vector<V>(load<S>(from, count)) ^ 0x01010101u * Offset;
    }
};

// int8 in 16 bits.
template <int Bytes>
TS_INLINE Vector<uint32_t, Bytes> widened_pairs(const int8_t* from, int64_t count = Bytes / 2) {
    return bit_cast_vector<Vector<uint32_t, Bytes>>(
        __builtin_convertvector(load<Vector<int8_t, Bytes / 2>>(from, count), Vector<int16_t, Bytes>));
}

// Vectors of pairs of neighbours in a row.
template <int Bytes>
struct WidenedPairs {
    using V = Vector<uint32_t, Bytes>;
    static constexpr int row_step = 1, col_step = 2;
    template <bool Full>
    static TS_INLINE V read(const Pack& p, int64_t row, int64_t col) {
        const auto* from = static_cast<const int8_t*>(p.source) + row * p.ld + col;
        return widened_pairs<Bytes>(from, Full ? Bytes / 2 : row < p.rows ? p.cols - col : 0);
    }
};

// ---- products ----

// Adds the products of the four bytes of each group, of x without a sign. In assembly, because intrinsics
// could not be inlined into code that is written for every instruction set. Avx: in the encoding of AVX-VNNI.
template <int Bytes, bool Avx>
struct GroupProducts {
    using Operand = Vector<uint32_t, Bytes>;
    using Sum = Vector<int32_t, Bytes>;
    static TS_INLINE void add(Sum& sum, const Operand& x, uint32_t w) { add(sum, x, Operand{} + w); }
    static TS_INLINE void add(Sum& sum, const Operand& x, const Operand& w) {
        if constexpr (Avx)
            asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
        else
            asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    }
};

// Adds the products of both 16-bit numbers of each pair.
template <int Bytes>
struct WidenedProducts {
    using Operand = Vector<uint32_t, Bytes>;
    using Sum = Vector<int32_t, Bytes>;
    static TS_INLINE void add(Sum& sum, const Operand& x, uint32_t w) { add(sum, x, Operand{} + w); }
    static TS_INLINE void add(Sum& sum, const Operand& x, const Operand& w) {
        if constexpr (Bytes > 16) {
            Sum products;
            asm("vpmaddwd %2, %1, %0" : "=v"(products) : "v"(x), "v"(w));
            sum += products;
        } else {
            const Sum a = bit_cast_vector<Sum>(x), b = bit_cast_vector<Sum>(w);
            sum += (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
        }
    }
};

// The same in one instruction.
template <int Bytes, bool Avx>
struct FusedProducts {
    using Operand = Vector<uint32_t, Bytes>;
    using Sum = Vector<int32_t, Bytes>;
    static TS_INLINE void add(Sum& sum, const Operand& x, uint32_t w) {
        const Operand both = Operand{} + w;
        if constexpr (Avx)
            asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(both));
        else
            asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(both));
    }
};

// ---- decode: values as they are stored, and x packed in rows ----
//
// Narrower: for blocks whose rows are shorter than a vector.

// `from` as often as there are Copies of it in a vector.
template <int Copies, class V>
TS_INLINE V repeated(const void* from) {
    using Once = char[sizeof(V) / Copies];
    const Once& once = *static_cast<const Once*>(from);
    V v;
    if constexpr (Copies == 1)
        v = load<V>(from);
    else if constexpr (sizeof(V) == 32)
        asm("vbroadcasti128 %1, %0" : "=x"(v) : "m"(once));
    else if constexpr (Copies == 2)
        asm("vbroadcasti64x4 %1, %0" : "=v"(v) : "m"(once));
    else
        asm("vbroadcasti32x4 %1, %0" : "=v"(v) : "m"(once));
    return v;
}

// A vector holds so many rows of a block.
template <int Bytes, bool Avx, int kRows_ = 1>
struct DecodeGroups : GroupProducts<Bytes, Avx>, Unscaled {
    using Value = int8_t;
    using X = uint8_t;
    using Operand = typename GroupProducts<Bytes, Avx>::Operand;
    using Narrower = DecodeGroups<Bytes, Avx, 2 * kRows_>;
    static constexpr int kStep = Bytes / kRows_, kRows = kRows_;
    static TS_INLINE Operand values(const Value* from, Row) { return load<Operand>(from); }
    static TS_INLINE Operand x(const X* from) { return repeated<kRows_, Operand>(from); }
};

template <int Bytes>
struct DecodePairs : WidenedProducts<Bytes>, Unscaled {
    using Value = int8_t;
    using X = int16_t;
    using Operand = typename WidenedProducts<Bytes>::Operand;
    using Narrower = DecodePairs<Bytes / 2>;
    static constexpr int kStep = Bytes / 2, kRows = 1;
    static TS_INLINE Operand values(const Value* from, Row) { return widened_pairs<Bytes>(from); }
    static TS_INLINE Operand x(const X* from) { return load<Operand>(from); }
};

}  // namespace ts::cpu
