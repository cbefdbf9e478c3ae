// The multiplication of a small batch that skips weights, for vectors of any length. See SkipLines
// and SkipTile.
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

constexpr int kSkipRows = 4;  // multiplied together

// The tokens from `token` on, of Lines lines from the i-th that is on.
template <class Codec, int Tokens, int Lines>
TS_INLINE void skip_inputs(const SkipLines& s, int64_t token, int64_t i) {
    using V = typename Codec::V;
    using Stored = typename Codec::Stored;
    constexpr int lanes = lanes_of<V>;
    const Stored* line[Lines];
    float x[Lines][Tokens];
    TS_UNROLL
    for (int l = 0; l < Lines; ++l) {
        line[l] = static_cast<const Stored*>(s.values) + s.on[i + l] * s.length;
        TS_UNROLL
        for (int t = 0; t < Tokens; ++t) x[l][t] = s.x[(i + l) * s.tokens + token + t];
    }
    float* const to = s.sums + token * s.sums_ld;
    for (int64_t f = 0; f < s.length; f += lanes) {
        V sums[Tokens];
        TS_UNROLL
        for (int t = 0; t < Tokens; ++t) sums[t] = load<V>(to + t * s.sums_ld + f);
        TS_UNROLL
        for (int l = 0; l < Lines; ++l) {
            const V weights = Codec::decode(load<typename Codec::S>(line[l] + f));
            TS_UNROLL
            for (int t = 0; t < Tokens; ++t) sums[t] += weights * x[l][t];
        }
        TS_UNROLL
        for (int t = 0; t < Tokens; ++t) store(to + t * s.sums_ld + f, sums[t]);
    }
}

template <class Codec, int Lines>
TS_INLINE void skip_inputs_of(const SkipLines& s, int64_t i) {
    int64_t token = 0;
    for (; token + 4 <= s.tokens; token += 4) skip_inputs<Codec, 4, Lines>(s, token, i);
    if (token + 2 <= s.tokens) skip_inputs<Codec, 2, Lines>(s, token, i), token += 2;
    if (token < s.tokens) skip_inputs<Codec, 1, Lines>(s, token, i);
}

template <class Codec>
TS_INLINE void skip_inputs(const SkipLines& s) {
    int64_t i = 0;
    for (; i + kSkipRows <= s.count; i += kSkipRows) skip_inputs_of<Codec, kSkipRows>(s, i);
    for (; i < s.count; ++i) skip_inputs_of<Codec, 1>(s, i);
}

template <class Codec, int Tokens>
TS_INLINE void skip_outputs(const SkipTile& s, int64_t token, int64_t group) {
    using V = typename Codec::V;
    using Stored = typename Codec::Stored;
    constexpr int lanes = lanes_of<V>;
    const int64_t count = s.count;
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
    for (int64_t group = 0; group < s.count; group += kSkipRows) {
        int64_t token = 0;
        for (; token + 4 <= s.tokens; token += 4) skip_outputs<Codec, 4>(s, token, group);
        if (token + 2 <= s.tokens) skip_outputs<Codec, 2>(s, token, group), token += 2;
        if (token < s.tokens) skip_outputs<Codec, 1>(s, token, group);
    }
}

}  // namespace ts::cpu
