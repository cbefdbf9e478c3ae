// The multiplication of decode (a small batch), for vectors of any length.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

// Vectors lie along k: a tile of tokens would leave most lanes idle. Every lane keeps its own sum, and the
// lanes are added at the end.
template <class V>
constexpr int kDecodeSums = sizeof(V) == 64 ? 16 : 8;  // in registers

// Products of values without a scale for each row of a block.
struct Unscaled {
    static constexpr int kPerValue = 1;  // weights to a stored value
    struct Row {};
};

// Operations on vectors of values stored as Codec has them and x packed as XCodec has it.
template <class Codec, class XCodec>
struct DecodeProducts : Unscaled {
    using Value = typename Codec::Stored;
    using X = typename XCodec::Stored;
    using Sum = typename Codec::V;
    static constexpr int kStep = lanes_of<Sum>;  // of k, for a vector
    static constexpr int kRows = 1;              // of a block, in a vector of values
    static TS_INLINE Sum values(const Value* from, Row) {
        return Codec::decode(load<typename Codec::S>(from));
    }
    static TS_INLINE Sum x(const X* from) { return XCodec::decode(load<typename XCodec::S>(from)); }
    static TS_INLINE void add(Sum& sum, const Sum& x, const Sum& values) { sum += values * x; }
};

// Vectors of values of kMinRows rows, and of their sums.
template <class P>
constexpr int kRowVectors = kMinRows / P::kRows;

// As many as there are registers for, of so many tokens.
template <class P, int Tokens>
constexpr int kVectorsAtOnce = std::min(kDecodeSums<typename P::Sum> / Tokens, kRowVectors<P>);

// Adds entries [first, last) to sums [Tokens][kRowVectors] of vectors; entry 0 starts from zero.
template <class P, int Tokens>
TS_INLINE void multiply_decode_rows(const DecodeTile& s, int64_t row, int64_t token, int64_t first,
                                    int64_t last, typename P::Sum* to) {
    using V = typename P::Sum;
    using Value = typename P::Value;
    constexpr int vectors = kVectorsAtOnce<P, Tokens>;
    V sums[Tokens][vectors];
    TS_UNROLL
    for (int t = 0; t < Tokens; ++t) {
        TS_UNROLL
        for (int i = 0; i < vectors; ++i) sums[t][i] = first ? to[t * kRowVectors<P> + i] : V{};
    }
    const auto values_of = [&](int64_t e, int64_t row_of_tile) {
        return static_cast<const Value*>(s.values) +
               (s.slot[e] * s.entry + row_of_tile * s.depth) / P::kPerValue;
    };
    const int64_t row_values = s.depth / P::kPerValue;
    const int64_t ahead = std::max<int64_t>(
        1, kDecodeAheadBytes / (kMinRows * row_values * static_cast<int64_t>(sizeof(Value))));
    // Prefetches the operands of that many entries later: of this row, the next rows of these blocks, or the
    // next block row.
    const auto fetched_of = [&](int64_t e) {
        const int64_t next = e + ahead, over = next - s.entries;
        if (over < 0) return values_of(next, row);
        if (row + kMinRows < s.block_rows) return values_of(std::min(over, s.entries - 1), row + kMinRows);
        return values_of(std::min(next, s.entries_left - 1), row % kMinRows - s.within);
    };
    for (int64_t e = first; e < last; ++e) {
        const auto* const w = values_of(e, row);
        const auto* const fetched = fetched_of(e);
        const auto* const x = static_cast<const typename P::X*>(s.x) + token * s.x_ld + s.idx[e] * s.depth;
        [[maybe_unused]] typename P::Row of_rows[vectors];
        if constexpr (P::kPerValue > 1) {
            const float* const scales = s.scales + s.slot[e] * s.scale_entry + row * s.scale_row;
            TS_UNROLL
            for (int i = 0; i < vectors; ++i) {
                of_rows[i] = P::row(scales[i * s.scale_row]);
                __builtin_prefetch(fetched + i * row_values);
            }
        }
        for (int64_t d = 0; d < s.depth; d += P::kStep) {
            decltype(P::x(x)) of_tokens[Tokens];
            TS_UNROLL
            for (int t = 0; t < Tokens; ++t) of_tokens[t] = P::x(x + t * s.x_ld + d);
            TS_UNROLL
            for (int i = 0; i < vectors; ++i) {
                const auto values = P::values(w + i * P::kRows * row_values + d / P::kPerValue, of_rows[i]);
                if constexpr (P::kPerValue == 1) __builtin_prefetch(fetched + i * P::kRows * s.depth + d);
                TS_UNROLL
                for (int t = 0; t < Tokens; ++t) P::add(sums[t][i], of_tokens[t], values);
            }
        }
    }
    TS_UNROLL
    for (int t = 0; t < Tokens; ++t) {
        TS_UNROLL
        for (int i = 0; i < vectors; ++i) to[t * kRowVectors<P> + i] = sums[t][i];
    }
}

// Does so for kMinRows rows and the remaining tokens, Tokens at a time. Returns the first token left over.
template <class P, int Tokens>
TS_INLINE int64_t multiply_decode_tokens(const DecodeTile& s, int64_t row, int64_t token, int64_t first,
                                         int64_t last, typename P::Sum* sums) {
    for (; token + Tokens <= s.tokens; token += Tokens)
        for (int i = 0; i < kRowVectors<P>; i += kVectorsAtOnce<P, Tokens>)
            multiply_decode_rows<P, Tokens>(s, row + i * P::kRows, token, first, last,
                                            sums + token * kRowVectors<P> + i);
    return token;
}

// All tokens pass over as many entries as the first-level cache holds, then over the next.
template <class P>
TS_INLINE void multiply_decode(const DecodeTile& s) {
    if constexpr (P::kStep > kMinRows)
        if (s.depth < P::kStep) return multiply_decode<typename P::Narrower>(s);
    using V = typename P::Sum;
    const int64_t entry_bytes =
        kMinRows * s.depth / P::kPerValue * static_cast<int64_t>(sizeof(typename P::Value));
    const int64_t batch = std::max<int64_t>(1, kDecodeBytes / entry_bytes);
    V sums[kMostDecodeTokens * kRowVectors<P>];
    for (int64_t row = 0; row < s.rows; row += kMinRows) {
        int64_t first = 0;
        do {
            const int64_t last = std::min(first + batch, s.entries);
            int64_t token = multiply_decode_tokens<P, 4>(s, row, 0, first, last, sums);
            token = multiply_decode_tokens<P, 2>(s, row, token, first, last, sums);
            multiply_decode_tokens<P, 1>(s, row, token, first, last, sums);
            first = last;
        } while (first < s.entries);
        for (int64_t token = 0; token < s.tokens; ++token)
            for (int i = 0; i < kMinRows; i += lanes_of<V>)
                store(static_cast<element_t<V>*>(s.sums) + token * s.sums_ld + row + i,
                      sum_of_lanes<P::kRows>(sums + token * kRowVectors<P> + i / P::kRows));
    }
}

}  // namespace ts::cpu
