// The steps between the products of an encoder, for vectors of any length.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/activation.h"
#include "cpu/encoder_layers.h"
#include "cpu/memory.h"
#include "cpu/multiply.h"
#include "cpu/pack.h"
#include "cpu/quantize_steps.h"
#include "cpu/vectors.h"
#include "elementwise/quantize.h"

namespace ts::cpu {

template <class V>
TS_INLINE V larger(const V& a, const V& b) {
    const V result = b > a ? b : a;
    return result;
}

template <class V>
TS_INLINE float sum_across(const V& v) {
    return combined(v, [](const V& a, const V& b) __attribute__((always_inline)) { return a + b; })[0];
}

template <class V>
TS_INLINE element_t<V> max_across(const V& v) {
    return combined(v, larger<V>)[0];
}

// Numbers as bytes, or as 16 bits: lanes are integers already, as encode_int8 leaves them.
template <class Integer, class U>
TS_INLINE void store_integers(Integer* to, const U& bits) {
    using Halves = Vector<uint16_t, sizeof(U) / 2>;
    using Bytes = Vector<uint8_t, sizeof(U) / 4>;
#ifdef __x86_64__
    if constexpr (sizeof(Integer) == 1 && sizeof(U) == 64) {
        Bytes bytes;
        asm("vpmovdb %1, %0" : "=v"(bytes) : "v"(bits));
        return store(to, bytes);
    }
#endif
    if constexpr (sizeof(Integer) == 1)
        store(to, __builtin_convertvector(__builtin_convertvector(bits & 0xff, Halves), Bytes));
    else
        store(to, __builtin_convertvector(bits & 0xffff, Halves));
}

// Scales of numbers of which the largest have these bits, NaN for an infinity or a NaN; their inverses.
template <class V>
struct Scale {
    using I = Vector<int32_t, sizeof(V)>;
    V scale, inverse;

    TS_INLINE explicit Scale(const I& most) {
        const V finite = larger(bit_cast_vector<V>(most) / 127.0f, V{} + quantize::kLeastScale);
        scale = most < 0x7f800000 ? finite : V{} + __builtin_nanf("");
        inverse = most < 0x7f800000 ? 1.0f / finite : V{};
    }
};

constexpr int kAccumulators = 4;  // of a sum or a maximum, which else would wait for itself

// Calls body(i, accumulator) for the vectors of a row.
template <int lanes, class Body>
TS_INLINE void each_vector(int64_t features, const Body& body) {
    int64_t i = 0;
    for (; i + kAccumulators * lanes <= features; i += kAccumulators * lanes) {
        TS_UNROLL
        for (int a = 0; a < kAccumulators; ++a) body(i + a * lanes, a);
    }
    for (; i < features; i += lanes) body(i, 0);
}

template <class V>
TS_INLINE V total_of(const V (&parts)[kAccumulators]) {
    const V total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    return total;
}

// The largest magnitude of numbers, as its bits.
template <class V>
struct Magnitude {
    using I = Vector<int32_t, sizeof(V)>;
    I parts[kAccumulators] = {};

    TS_INLINE void add(const V& value, int accumulator) {
        const I bits = bit_cast_vector<I>(value) & 0x7fffffff;
        parts[accumulator] = larger(parts[accumulator], bits);
    }
    TS_INLINE I most() const {
        return combined(larger(larger(parts[0], parts[1]), larger(parts[2], parts[3])), larger<I>);
    }
};

// Norms a row whose sum is that of `sums`; calls visit(i, accumulator, result) for each vector.
template <class V, class Visit>
TS_INLINE void norm_row(const float* row, int64_t features, const EncoderNorm& norm,
                        const V (&sums)[kAccumulators], const Visit& visit) {
    constexpr int lanes = lanes_of<V>;
    const float mean = sum_across(total_of(sums)) / static_cast<float>(features);
    V squares[kAccumulators] = {};
    each_vector<lanes>(features, [&](int64_t i, int a) __attribute__((always_inline)) {
        const V difference = load<V>(row + i) - mean;
        squares[a] += difference * difference;
    });
    const float variance = sum_across(total_of(squares)) / static_cast<float>(features);
    const float factor = 1 / std::sqrt(variance + norm.epsilon);
    each_vector<lanes>(features, [&](int64_t i, int a) __attribute__((always_inline)) {
        V value = (load<V>(row + i) - mean) * factor * load<V>(norm.weight + i);
        if (norm.bias != nullptr) value += load<V>(norm.bias + i);
        visit(i, a, value);
    });
}

template <class V>
TS_INLINE void quantize_row(const float* row, int64_t features, const Magnitude<V>& magnitude, int8_t* to,
                            float* scale) {
    using U = Vector<uint32_t, sizeof(V)>;
    const Scale<V> found(magnitude.most());
    *scale = found.scale[0];
    if (*scale != *scale) return static_cast<void>(std::fill_n(to, features, int8_t{0}));
    each_vector<lanes_of<V>>(features, [&](int64_t i, int) __attribute__((always_inline)) {
        store_integers(to + i, encode_int8<U>(settled(load<V>(row + i) * found.inverse)));
    });
}

// Features are a multiple of 16, as those of blocks.
template <class From, class To>
TS_INLINE void row_step(const RowStep& s) {
    using V = typename From::V;
    constexpr int lanes = lanes_of<V>;
    const auto* const x = static_cast<const typename From::Stored*>(s.x);
    auto* const result = static_cast<typename To::Stored*>(s.result);
    Magnitude<V> magnitude;
    if constexpr (sizeof(typename From::Stored) == sizeof(float))
        if (s.row == nullptr) {
            each_vector<lanes>(s.features, [&](int64_t i, int a) __attribute__((always_inline)) {
                magnitude.add(load<V>(x + i), a);
            });
            return quantize_row<V>(x, s.features, magnitude, s.quantized, s.scale);
        }
    V sums[kAccumulators] = {};
    const auto keep = [&](int64_t i, int a, const V& value) __attribute__((always_inline)) {
        store(s.row + i, value);
        sums[a] += value;
        magnitude.add(value, a);
        if (result != nullptr) store(result + i, To::encode(value));
    };
    if (s.norm.weight == nullptr) {
        each_vector<lanes>(s.features, [&](int64_t i, int a) __attribute__((always_inline)) {
            V value = From::decode(load<typename From::S>(x + i));
            if (s.added != nullptr) value += load<V>(s.added + i);
            keep(i, a, value);
        });
    } else {
        V before[kAccumulators] = {};
        each_vector<lanes>(s.features, [&](int64_t i, int a) __attribute__((always_inline)) {
            V value = From::decode(load<typename From::S>(x + i));
            if (s.added != nullptr) value += load<V>(s.added + i);
            store(s.row + i, value);
            before[a] += value;
        });
        norm_row<V>(s.row, s.features, s.norm, before, keep);
    }
    if (s.quantized == nullptr) return;
    if (s.next_norm.weight != nullptr) {
        magnitude = {};
        norm_row<V>(s.row, s.features, s.next_norm, sums,
                    [&](int64_t i, int a, const V& value) __attribute__((always_inline)) {
                        store(s.row + i, value);
                        magnitude.add(value, a);
                    });
    }
    quantize_row<V>(s.row, s.features, magnitude, s.quantized, s.scale);
}

template <Activation activation, class V>
TS_INLINE void gate_row(const GateStep& s) {
    for (int64_t i = 0; i < s.features; i += lanes_of<V>)
        store(s.result + i, activate<activation>(load<V>(s.row + i)) * load<V>(s.row + s.features + i));
}

template <class V>
TS_INLINE void gate_step(const GateStep& s) {
    switch (s.activation) {
        case Activation::none:
            return gate_row<Activation::none, V>(s);
        case Activation::relu:
            return gate_row<Activation::relu, V>(s);
        case Activation::gelu:
            return gate_row<kNearGelu, V>(s);
        case Activation::silu:
            return gate_row<Activation::silu, V>(s);
    }
}

// ---- attention ----

constexpr int64_t kQueryRows = 16;          // whose scores are computed together
constexpr float kProbabilityUnits = 16383;  // 14 bits of a probability
constexpr int64_t kExactKeys = 1024;        // of which products of probabilities and int8 add up below 2^31

// exp(x) of x <= 0 to 4e-6, of NaN NaN. Numbers less than -60 count as -60.
template <class V>
TS_INLINE V exp_of_difference(const V& x) {
    using U = Vector<uint32_t, sizeof(V)>;
    const V low = V{} - 60.0f;
    const V clamped = x < low ? low : x;
    const V shifted = clamped * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;
    const V r = clamped - n * 0.693147181f;
    V series = r * 0.0415071733f + 0.167922497f;
    series = series * r + 0.500032663f;
    series = series * r + 0.999964237f;
    series = series * r + 1.0f;
    const V result = bit_cast_vector<V>(bit_cast_vector<U>(series) + (bit_cast_vector<U>(shifted) << 23));
    return result;
}

// How the numbers of one head of a sentence lie in scratch memory. Q: integers of q in memory. Pair: of k
// that are multiplied at once.
template <class Q, int Pair, int Bytes>
struct AttentionMemory {
    static constexpr int lanes = Bytes / 4, tile = 3 * lanes;

    AttentionMemory(std::byte* scratch, int64_t tokens, int64_t features)
        : keys(round_up(tokens, tile)), workspace(scratch) {
        q = take<Q>(round_up(tokens, kQueryRows) * features);
        rows = take<int8_t>(round_up(tokens + 1, lanes) * features);
        panels = take<uint32_t>(keys * features / Pair);
        values = take<uint32_t>(ceil_div(tokens, 2) * features);
        q_scales = take<float>(round_up(tokens, kQueryRows));
        q_offsets = take<int32_t>(round_up(tokens, kQueryRows));
        k_scales = take<float>(keys);
        v_scales = take<float>(keys);
        scores = take<float>(kQueryRows * keys);
        probabilities = take<uint16_t>(kQueryRows * keys);
        sums = take<int32_t>(kQueryRows * tile);
    }

    template <class T>
    T* take(int64_t count) {
        return reinterpret_cast<T*>(workspace.take(count * static_cast<int64_t>(sizeof(T))));
    }

    int64_t keys;  // padded to whole tiles
    Workspace workspace;
    Q* q;
    int8_t* rows;  // of k or v, before they are packed
    uint32_t* panels;
    uint32_t* values;
    float *q_scales, *k_scales, *v_scales;
    int32_t* q_offsets;
    float* scores;
    uint16_t* probabilities;
    int32_t* sums;
};

// Numbers of a head of a token, turned by the angles of its place.
template <class V>
TS_INLINE V turned(const float* from, const float* rotary, int64_t i, int64_t features) {
    const V value = load<V>(from + i);
    if (rotary == nullptr) return value;
    const int64_t half = features / 2;
    const V cosine = load<V>(rotary + i % half), sine = load<V>(rotary + half + i % half);
    if (i < half) return value * cosine - load<V>(from + i + half) * sine;
    return value * cosine + load<V>(from + i - half) * sine;
}

// Quantizes the numbers of a head of each token. `sums`: their sums times an offset, or null. Rows and scales
// have room for whole vectors of tokens.
template <class V, class Integer>
TS_INLINE void quantize_head(const AttentionStep& s, const float* from, bool turns, Integer* to,
                             float* scales, int32_t* sums) {
    using I = Vector<int32_t, sizeof(V)>;
    using U = Vector<uint32_t, sizeof(V)>;
    constexpr int lanes = lanes_of<V>;
    const float* const rotary = turns ? s.rotary : nullptr;
    for (int64_t first = 0; first < s.tokens; first += lanes) {
        const int64_t last = s.tokens - 1;
        I most[lanes] = {}, totals[lanes] = {};
        const auto values = [&](int64_t token, int64_t i) __attribute__((always_inline)) {
            return turned<V>(from + token * s.ld, rotary ? rotary + token * s.features : nullptr, i,
                             s.features);
        };
        TS_UNROLL
        for (int t = 0; t < lanes; ++t)
            for (int64_t i = 0; i < s.features; i += lanes) {
                const I bits = bit_cast_vector<I>(values(std::min(first + t, last), i)) & 0x7fffffff;
                most[t] = larger(most[t], bits);
            }
        const Scale<V> found(combined_lanes(most, larger<I>));
        store(scales + first, found.scale);
        float inverses[lanes];
        store(inverses, found.inverse);
        TS_UNROLL
        for (int t = 0; t < lanes; ++t)
            for (int64_t i = 0; i < s.features; i += lanes) {
                const U bits = encode_int8<U>(settled(values(std::min(first + t, last), i) * inverses[t]));
                store_integers(to + (first + t) * s.features + i, bits);
                if (sums != nullptr) totals[t] += bit_cast_vector<I>(bits << 24) >> 24;
            }
        if (sums != nullptr)
            store(sums + first, combined_lanes(totals, [](const I& a, const I& b)
                                                           __attribute__((always_inline)) { return a + b; }) *
                                    kByteOffset);
    }
}

// Vectors of features that are multiplied by probabilities at once.
constexpr int64_t value_vectors(int64_t left) { return left > 3 ? 2 : left; }

// Packs v as pairs of tokens: [columns of vectors][pairs][vectors]. A token without a partner has zeros.
template <class V>
TS_INLINE void pack_values(const int8_t* rows, int64_t tokens, int64_t features, uint32_t* to) {
    using S = Vector<int8_t, sizeof(V) / 4>;
    using H = Vector<int16_t, sizeof(V) / 2>;
    using U = Vector<uint32_t, sizeof(V)>;
    constexpr int lanes = lanes_of<V>;
    const auto wide = [](const int8_t* from) __attribute__((always_inline)) {
        const auto halves = __builtin_convertvector(load<S>(from), H);
        return __builtin_convertvector(bit_cast_vector<Vector<uint16_t, sizeof(V) / 2>>(halves), U);
    };
    const int64_t pairs = ceil_div(tokens, 2);
    for (int64_t first = 0; first < features;) {
        const int64_t width = value_vectors((features - first) / lanes) * lanes;
        for (int64_t pair = 0; pair < pairs; ++pair)
            for (int64_t i = 0; i < width; i += lanes) {
                const int8_t* const from = rows + 2 * pair * features + first + i;
                store(to + pair * width + i, wide(from) | wide(from + features) << 16);
            }
        to += pairs * width;
        first += width;
    }
}

// One row of scores of neighbouring tiles [rows, keys], of which the last may have fewer keys.
struct ScoreRow {
    float* scores;       // integers, of the first tile
    int64_t row, tile;   // keys of a tile
    int64_t first, end;  // keys, of which the first is that of a tile
    int64_t padded;      // keys of all tiles
    int64_t low, high;   // keys that are attended to
    float scale;
    uint32_t offset;
    const float *k_scales, *v_scales;
    const float* bias;  // of key 0, or null
    uint16_t* probabilities;

    // Calls visit(key, scores of this row) for each vector.
    template <int lanes, class Visit>
    TS_INLINE void visit(const Visit& visit) const {
        for (int64_t begin = first; begin < end; begin += tile) {
            const int64_t width = std::min(tile, padded - begin), stop = std::min(tile, end - begin);
            float* const from = scores + (begin - first) * kQueryRows + row * width;
            for (int64_t i = 0; i < stop; i += lanes) visit(begin + i, from + i);
        }
    }
};

// Writes probabilities times the scales of v, and returns what their sums with v are divided by.
template <class V>
TS_INLINE float softmax_row(const ScoreRow& s) {
    using I = Vector<int32_t, sizeof(V)>;
    using U = Vector<uint32_t, sizeof(V)>;
    constexpr int lanes = lanes_of<V>;
    I numbers;
    for (int i = 0; i < lanes; ++i) numbers[i] = i;
    const V never = V{} - __builtin_inff();
    V most = never;
    s.visit<lanes>([&](int64_t key, float* at) __attribute__((always_inline)) {
        const U difference = load<U>(at) - s.offset;
        V score =
            __builtin_convertvector(bit_cast_vector<I>(difference), V) * s.scale * load<V>(s.k_scales + key);
        if (s.bias != nullptr) score += load<V>(s.bias + key, s.high - key);
        if (key < s.low || key + lanes > s.high) {
            const I places = numbers + static_cast<int32_t>(key);
            const I outside =
                (places < static_cast<int32_t>(s.low)) | (places >= static_cast<int32_t>(s.high));
            score = outside != 0 ? never : score;
        }
        store(at, score);
        most = score > most ? score : most;
    });
    const float largest = max_across(most);
    V total{};
    s.visit<lanes>([&](int64_t key, const float* at) __attribute__((always_inline)) {
        const V power = exp_of_difference<V>(load<V>(at) - largest);
        total += power;
        const V units = settled(power * load<V>(s.v_scales + key));
        store_integers(s.probabilities + key - s.first, bit_cast_vector<U>(units + 0x1.8p23f));
    });
    const float sum = sum_across(total);
    if (sum != sum) std::fill_n(s.probabilities, s.end - s.first, uint16_t{0});  // NaN became anything
    return sum;
}

// Turns scales of v into units of probabilities; returns the largest. Keys of which k or v is not finite have
// NaN for k, which spoils what attends to them. Beyond the tokens there are zeros, up to `keys`.
template <class V>
TS_INLINE float merge_scales(float* k_scales, float* v_scales, int64_t tokens, int64_t keys) {
    std::fill(k_scales + tokens, k_scales + keys, 0.0f);
    std::fill(v_scales + tokens, v_scales + keys, 0.0f);
    V most = V{} + quantize::kLeastScale;
    for (int64_t key = 0; key < tokens; key += lanes_of<V>) most = larger(most, load<V>(v_scales + key));
    const float largest = max_across(most), factor = kProbabilityUnits / largest;
    for (int64_t key = 0; key < tokens; key += lanes_of<V>) {
        const V scale = load<V>(v_scales + key);
        store(k_scales + key, load<V>(k_scales + key) + scale * 0.0f);
        store(v_scales + key, scale == scale ? scale * factor : V{});
    }
    return largest;
}

// scores, sums: the multiplication of q and k, and of probabilities and v, of which so many rows are
// multiplied at once. Not inlined, where their sums would not stay in registers.
template <class Reader, class Q, void (*scores)(const RowTile&), void (*sums)(const RowTile&), int Rows,
          int Bytes>
TS_INLINE void attention_step(const AttentionStep& s) {
    using V = Vector<float, Bytes>;
    using I = Vector<int32_t, Bytes>;
    constexpr int pair = Reader::col_step, lanes = Bytes / 4;
    constexpr bool has_offset = pair == 4;
    using Memory = AttentionMemory<Q, pair, Bytes>;
    constexpr int64_t tile = Memory::tile;
    const Memory m(s.scratch, s.tokens, s.features);
    const int64_t tokens = s.tokens, features = s.features, depth = features / pair;
    const int64_t padded = round_up(tokens, lanes);

    quantize_head<V>(s, s.q, true, m.q, m.q_scales, m.q_offsets);
    const int64_t query_end = round_up(tokens, Rows);
    std::fill(m.q + tokens * features, m.q + query_end * features, Q{0});
    quantize_head<V>(s, s.k, true, m.rows, m.k_scales, nullptr);
    for (int64_t key = 0; key < tokens; key += tile) {
        const int64_t count = std::min(tile, tokens - key), width = round_up(count, lanes);
        pack<Reader>({m.rows + key * features, features, count, features, width, features,
                      m.panels + key * depth, width, true, false});
    }
    quantize_head<V>(s, s.v, false, m.rows, m.v_scales, nullptr);
    std::fill_n(m.rows + tokens * features, features, int8_t{0});
    pack_values<V>(m.rows, tokens, features, m.values);
    const float v_scale = merge_scales<V>(m.k_scales, m.v_scales, tokens, m.keys);

    for (int64_t query = 0; query < tokens; query += kQueryRows) {
        const int64_t queries = std::min(kQueryRows, tokens - query), rows = round_up(queries, Rows);
        const int64_t first = s.window > 0 ? std::max<int64_t>(query - s.window, 0) / tile * tile : 0;
        const int64_t last =
            s.window > 0 ? std::min(query + queries + s.window, tokens) : tokens;  // not attended to
        const int64_t end = round_up(last, lanes);
        for (int64_t key = first; key < last; key += tile) {
            const int64_t width = std::min(tile, padded - key);
            scores({m.q + query * features, nullptr, 0, depth, 1, m.panels + key * depth, nullptr, 1, depth,
                    rows, width, m.scores + (key - first) * kQueryRows});
        }
        float divisors[kQueryRows];
        const int64_t ld = end - first;
        for (int64_t row = 0; row < queries; ++row) {
            const int64_t at = query + row;
            divisors[row] = softmax_row<V>(
                {m.scores, row, tile, first, end, padded,
                 s.window > 0 ? std::max<int64_t>(at - s.window, 0) : 0,
                 s.window > 0 ? std::min(at + s.window + 1, tokens) : tokens, m.q_scales[at] * s.scale,
                 has_offset ? static_cast<uint32_t>(m.q_offsets[at]) : 0, m.k_scales, m.v_scales,
                 s.position_bias != nullptr ? s.position_bias + s.positions - 1 - at : nullptr,
                 m.probabilities + row * ld});
        }
        for (int64_t row = queries; row < rows; ++row)
            std::fill_n(m.probabilities + row * ld, ld, uint16_t{0});
        const uint32_t* values = m.values;
        const int64_t pairs = ceil_div(tokens, 2);
        for (int64_t feature = 0; feature < features;) {
            const int64_t width = value_vectors((features - feature) / lanes) * lanes;
            for (int64_t key = first; key < last; key += kExactKeys) {
                const int64_t count = ceil_div(std::min(last - key, kExactKeys), 2);
                sums({m.probabilities + (key - first), nullptr, 0, ld / 2, 1, values + key / 2 * width,
                      nullptr, 1, count, rows, width, m.sums});
                for (int64_t row = 0; row < queries; ++row) {
                    const float factor = v_scale / kProbabilityUnits / divisors[row];
                    float* const to = s.result + (query + row) * s.result_ld + feature;
                    for (int64_t i = 0; i < width; i += lanes) {
                        V value = __builtin_convertvector(load<I>(m.sums + row * width + i), V) * factor;
                        if (key > first) value += load<V>(to + i);
                        store(to + i, value);
                    }
                }
            }
            values += pairs * width;
            feature += width;
        }
    }
}

}  // namespace ts::cpu
