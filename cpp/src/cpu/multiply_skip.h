// The multiplication of a small batch that skips weights, for vectors of any length. See SkipTile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/steps.h"
#include "cpu/vectors.h"

namespace ts::cpu {

template <int Bytes>
struct Codec<DType::int8, Bytes> {
    using Stored = int8_t;
    using V = Vector<float, Bytes>;
    using S = Vector<int8_t, Bytes / 4>;
    static TS_INLINE V decode(const S& s) {
        return __builtin_convertvector(__builtin_convertvector(s, Vector<int32_t, Bytes>), V);
    }
};

constexpr int64_t kSkipAhead = 8;  // lines between those that are multiplied and those that are fetched

// Features of Count vectors from `first` on, and the tokens from `token` on.
template <class Codec, int Tokens, int Count>
TS_INLINE void skip_inputs(const SkipTile& s, int64_t token, int64_t first) {
    using V = typename Codec::V;
    using Stored = typename Codec::Stored;
    constexpr int lanes = lanes_of<V>;
    V sums[Tokens][Count] = {};
    for (int64_t e = 0; e < s.entries; ++e) {
        const int64_t k = s.idx[e] * s.columns;
        const auto* const block =
            static_cast<const Stored*>(s.values) + s.slot[e] * s.rows * s.columns + first;
        const float* x = s.x + k * s.tokens + token;
        const uint8_t* const on = s.on + k;
        const int64_t count = s.counts[k / kMinRows];
        V own[Tokens][Count] = {};
        for (int64_t i = 0; i < count; ++i, x += s.tokens) {
            const Stored* const line = block + on[i] * s.rows;
            if (i + kSkipAhead < count) {
                const auto* const later = reinterpret_cast<const char*>(block + on[i + kSkipAhead] * s.rows);
                TS_UNROLL
                for (int byte = 0; byte < Count * lanes * static_cast<int>(sizeof(Stored)); byte += 64)
                    __builtin_prefetch(later + byte);
            }
            TS_UNROLL
            for (int j = 0; j < Count; ++j) {
                const V weights = Codec::decode(load<typename Codec::S>(line + j * lanes));
                TS_UNROLL
                for (int t = 0; t < Tokens; ++t) own[t][j] += weights * x[t];
            }
        }
        TS_UNROLL
        for (int j = 0; j < Count; ++j) {
            V scale = V{} + 1.0f;
            if (s.scales != nullptr) {
                const float* const scales = s.scales + s.slot[e] * s.scale_step;
                scale = s.row_scales ? load<V>(scales + first + j * lanes) : V{} + *scales;
            }
            TS_UNROLL
            for (int t = 0; t < Tokens; ++t) sums[t][j] += own[t][j] * scale;
        }
    }
    TS_UNROLL
    for (int t = 0; t < Tokens; ++t) {
        TS_UNROLL
        for (int j = 0; j < Count; ++j)
            store(s.sums + (token + t) * kTaskFeatures + first + j * lanes, sums[t][j]);
    }
}

template <class Codec, int Count>
TS_INLINE void skip_inputs_of(const SkipTile& s, int64_t first) {
    int64_t token = 0;
    for (; token + 4 <= s.tokens; token += 4) skip_inputs<Codec, 4, Count>(s, token, first);
    if (token + 2 <= s.tokens) skip_inputs<Codec, 2, Count>(s, token, first), token += 2;
    if (token < s.tokens) skip_inputs<Codec, 1, Count>(s, token, first);
}

template <class Codec>
TS_INLINE void skip_inputs(const SkipTile& s) {
    constexpr int lanes = lanes_of<typename Codec::V>;
    int64_t first = 0;
    for (; first + 4 * lanes <= s.width; first += 4 * lanes) skip_inputs_of<Codec, 4>(s, first);
    for (; first + 2 * lanes <= s.width; first += 2 * lanes) skip_inputs_of<Codec, 2>(s, first);
    for (; first < s.width; first += lanes) skip_inputs_of<Codec, 1>(s, first);
}

constexpr int kSkipRows = 4;  // multiplied together

template <class Codec, int Tokens>
TS_INLINE void skip_outputs(const SkipTile& s, int64_t token, int64_t group) {
    using V = typename Codec::V;
    using Stored = typename Codec::Stored;
    constexpr int lanes = lanes_of<V>;
    const int64_t count = s.counts[0];
    int64_t row[kSkipRows];
    TS_UNROLL
    for (int r = 0; r < kSkipRows; ++r) row[r] = s.on[std::min(group + r, count - 1)];
    V sums[Tokens][kSkipRows] = {};
    for (int64_t e = 0; e < s.entries; ++e) {
        const auto* const block = static_cast<const Stored*>(s.values) + s.slot[e] * s.rows * s.columns;
        const float* const x = s.x + token * s.x_ld + s.idx[e] * s.columns;
        V own[Tokens][kSkipRows] = {};
        for (int64_t d = 0; d < s.columns; d += lanes) {
            V of_tokens[Tokens];
            TS_UNROLL
            for (int t = 0; t < Tokens; ++t) of_tokens[t] = load<V>(x + t * s.x_ld + d);
            TS_UNROLL
            for (int r = 0; r < kSkipRows; ++r) {
                const V weights = Codec::decode(load<typename Codec::S>(block + row[r] * s.columns + d));
                TS_UNROLL
                for (int t = 0; t < Tokens; ++t) own[t][r] += weights * of_tokens[t];
            }
        }
        TS_UNROLL
        for (int r = 0; r < kSkipRows; ++r) {
            float scale = 1.0f;
            if (s.scales != nullptr) scale = s.scales[s.slot[e] * s.scale_step + (s.row_scales ? row[r] : 0)];
            TS_UNROLL
            for (int t = 0; t < Tokens; ++t) sums[t][r] += own[t][r] * scale;
        }
    }
    TS_UNROLL
    for (int t = 0; t < Tokens; ++t) {
        TS_UNROLL
        for (int r = 0; r < kSkipRows; ++r)
            s.sums[(token + t) * kTaskFeatures + row[r]] = combined(
                sums[t][r], [](const V& a, const V& b) __attribute__((always_inline)) { return a + b; })[0];
    }
}

template <class Codec>
TS_INLINE void skip_outputs(const SkipTile& s) {
    for (int64_t group = 0; group < s.counts[0]; group += kSkipRows) {
        int64_t token = 0;
        for (; token + 4 <= s.tokens; token += 4) skip_outputs<Codec, 4>(s, token, group);
        if (token + 2 <= s.tokens) skip_outputs<Codec, 2>(s, token, group), token += 2;
        if (token < s.tokens) skip_outputs<Codec, 1>(s, token, group);
    }
}

}  // namespace ts::cpu
