// The steps of every CPU product: what one instruction set does for one dtype, as functions.
//
//   pack      copies an operand into panels that the multiplication reads front to back,
//   multiply  sums one row tile, 16 or 32 features x some columns, over the kept blocks,
//   finish    adds the bias, applies the activation, adds the residual or multiplies by the gate, rounds and
//             writes the output's layout.
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace ts::cpu {

constexpr int kMinRows = 16, kMaxRows = 32;  // features of a row tile; 16 is also the shortest row of a block
constexpr int kTaskFeatures = 64;            // features written at once: whole lines of memory
constexpr int64_t kFirstCacheBytes = 24 << 10;  // of panels that all rows of a row tile reuse
constexpr int64_t kDecodeBytes = 8 << 10;       // of values that all tokens of a decode reuse
constexpr int64_t kDecodeAheadBytes = 8 << 10;  // of values, between those multiplied and those fetched
constexpr int kMostDecodeTokens = 12;
constexpr int kMostSkipTokens = 8;
// Position of the value at k of a block in packed x for int4, of whose bytes the low halves are multiplied,
// then the high ones: the even k of every so many come first.
constexpr int64_t int4_position(int64_t k, int64_t together) {
    return k / together * together + k % together / 2 + k % 2 * (together / 2);
}

constexpr int32_t kByteOffset = 128;     // makes int8 bytes without a sign
constexpr int64_t kAheadRowBytes = 256;  // of a row of values, between those multiplied and those fetched

// A copy of a row-major matrix [rows, cols], or its transpose, zero-filled up to the padded size.
// Elements that are multiplied in pairs are copied as pairs (or groups of four), which lie along the rows or
// the columns of the source; `cols`, `padded_cols` (or rows) then still count single elements.
struct Pack {
    const void* source;
    int64_t ld;
    int64_t rows, cols;
    int64_t padded_rows, padded_cols;
    void* target;
    int64_t target_ld;
    bool transpose;
    bool pair_rows;
};

// sums[i][c] = sum over entries e and depths d of A(e, i, d) * B(e, d, c), where
//   A(e, i, d) = a[slot[e] * a_entry + i * a_row + d * a_step], where a_row is 1, or else a_step is 1
//                and a_row is depth
//   B(e, d, c) = b[(idx[e] * depth + d) * columns + c]
// Elements are pairs where the kernel multiplies pairs, or groups of four. Where slot or idx is null it is e
// itself.
struct RowTile {
    const void* a;
    const int32_t* slot;
    int64_t a_entry, a_row, a_step;
    const void* b;
    const int32_t* idx;
    int64_t entries, depth;
    int64_t rows, columns;  // 16 or 32; whole vectors, at most a tile
    void* sums;             // [rows, columns]
    int64_t first = 0;      // entry, of steps without pairs: sums are there of those before it
};

// A row tile of 32 features for row-major x, transposed: sums[t][f] = sum over entries e
// and depths d of the products of the pairs x[t, idx[e] * depth + d] and w[e, d, f], with x read where it
// lies.
struct TokenTile {
    const void* x;
    int64_t x_ld;   // bytes
    const void* w;  // pairs [entries, depth, 32]
    const int32_t* idx;
    int64_t entries, depth;
    int64_t tokens;  // at most a tile
    float* sums;
    int64_t sums_ld;
};

// A row tile of a small batch, for row-major x. Blocks lie along k and are read in place:
// sums[t][f] = sum over entries e and depths d of
//   x[t * x_ld + idx[e] * depth + d] * values[slot[e] * entry + f * depth + d].
struct DecodeTile {
    const void* x;  // packed, as [tokens, k]; where an element is packed as it is stored it need not be
    int64_t x_ld;
    const void* values;
    const int32_t* slot;
    int64_t entry;
    const int32_t* idx;
    int64_t entries, depth;
    int64_t rows, tokens;  // features: 16 or 32; at most decode_tokens
    void* sums;
    int64_t sums_ld;
    // Next reads: rows of these blocks below the tile's first one, the rows above it, and entries of this
    // block row and all below.
    int64_t block_rows, within, entries_left;
    // For int4, of which a byte holds two values: row f of the block at a slot lies at
    // scales[slot * scale_entry + f * scale_row].
    const float* scales = nullptr;
    int64_t scale_entry = 0, scale_row = 0;
};

// Lines of weights for a small batch, those of neurons that are on: for the first `count` numbers i,
//   sums[t * sums_ld + f] += x[i * tokens + t] * values[on[i] * length + f].
struct SkipLines {
    const void* values;
    int64_t length;  // weights of a line, a multiple of 16
    const uint8_t* on;
    int64_t count;
    const float* x;
    int64_t tokens;  // at most kMostSkipTokens
    float* sums;
    int64_t sums_ld;
};

// Features of a block row for a small batch, of which those that are off are not read: of the features f that
// are the first `count` numbers `on`,
//   sums[t][f] = sum over entries e and d below columns of
//   x[t * x_ld + idx[e] * columns + d] * values[slot[e] * rows * columns + f * columns + d].
// Values of 8 bits are multiplied by scales[slot[e] * scale_step], with row_scales by the f-th from there on.
struct SkipTile {
    const void* values;
    const int32_t* slot;
    const int32_t* idx;
    int64_t entries, rows, columns;
    const float* x;
    int64_t x_ld;
    const uint8_t* on;
    int64_t count;
    int64_t tokens;       // at most kMostSkipTokens
    const float* scales;  // null for values of the dtype of x
    int64_t scale_step;
    bool row_scales;
    float* sums;  // [tokens, kTaskFeatures]
};

// Turns sums of products of 8 bits into results: sums less the offset of their feature, times the scale of
// their token, times the scale of their feature.
struct Rescale {
    const float* token_scales;  // null where sums are results
    const float* feature_scales;
    const int32_t* offsets;  // of sums in int32; null where sums are float32
};

// Element (i, c) of a row tile goes to data[i * ld + c], or to data[c * ld + i] if transposed.
struct Output {
    void* sums;  // changed in place
    int64_t sums_ld;
    int64_t rows, columns;  // rows at most kTaskFeatures; columns without padding
    void* data;
    int64_t ld;
    bool transposed;
    const void* bias;  // of each feature, or null
    bool columns_are_features;
    Activation activation;
    const void* added;  // after the activation, or null: lies as data does, and may be data itself
    int64_t added_ld;
    bool gated;  // added is a gate, which is activated and multiplied by
    Activation gate_activation;
    Rescale rescale;
};

// Values of int8, float8_e4m3fn or int4 times a scale, rounded to the dtype of the target.
struct Scaling {
    const uint8_t* values;
    DType dtype;
    float scale;
    int64_t count;  // a multiple of 16
    void* target;
};

// Activations times the inverse of their scale, rounded to 8 bits: int8 or float8_e4m3fn. All become zero
// where the inverse is zero, whatever they are.
struct Quantizing {
    const void* x;
    int64_t count;
    bool to_float8;
    float inverse;
    uint8_t* target;
};

// Values as they are summed: target[i] = values[i].
struct DecodedValues {
    const void* values;
    int64_t count;
    void* target;
};

struct BlockSteps;

// The steps of one instruction set for one dtype.
struct Steps {
    int32_t tile;         // columns multiplied at once, a multiple of `lanes`
    int32_t lanes;        // columns of one vector
    int32_t pair;         // elements multiplied at once: 2 for pairs, 4 for groups of four, otherwise 1
    int32_t packed_size;  // bytes of a packed element, pair or group
    bool values_direct;   // values are multiplied as they are stored
    void (*pack)(const Pack&);
    void (*multiply)(const RowTile&);
    void (*finish)(const Output&) = nullptr;              // to the dtype: not of 8 bits
    void (*multiply_tokens)(const TokenTile&) = nullptr;  // or null
    void (*multiply_decode)(const DecodeTile&) = nullptr;
    int32_t decode_tokens = 0;                // most tokens for which multiply_decode is faster; 0: never
    void (*scale)(const Scaling&) = nullptr;  // to the dtype: not of 8 bits
    // The bits of the largest magnitude in float32, in which a NaN is above infinity. Not of float64.
    uint32_t (*largest_magnitude)(const void* x, int64_t count) = nullptr;
    void (*quantize)(const Quantizing&) = nullptr;  // not of float64
    // Packing adds this to x, so that its bytes have no sign. It adds to sums what `multiply_decode` gives
    // for a token of which every byte is this.
    int32_t x_offset = 0;
    // multiply_decode of values of int4, for packed x in the order that int4_position says. Not of 8 bits and
    // float64.
    void (*multiply_decode_int4)(const DecodeTile&) = nullptr;
    const BlockSteps* blocks = nullptr;                     // of float64 and float32
    void (*decode_values)(const DecodedValues&) = nullptr;  // of 16 bits
    // For values of the dtype; not of float64 and float8.
    void (*skip_inputs)(const SkipLines&) = nullptr;
    void (*skip_outputs)(const SkipTile&) = nullptr;
};

// See blocks.h.
extern const BlockSteps double_blocks_portable, float_blocks_portable;
#ifdef __x86_64__
extern const BlockSteps double_blocks_avx2, float_blocks_avx2, double_blocks_avx512, float_blocks_avx512;
#endif

// See encoder.h.
struct EncoderSteps;
extern const EncoderSteps encoder_portable;
#ifdef __x86_64__
extern const EncoderSteps encoder_avx2, encoder_avx_vnni, encoder_avx512, encoder_avx512_vnni,
    encoder_amx_int8;
#endif

struct InstructionSet {
    bool (*available)();  // on this machine
    const char* missing;  // the reason to give where it is not
    // By DType: those of what is multiplied, and of float results `finish`.
    Steps steps[6];
    const EncoderSteps* encoder = nullptr;  // those with steps of int8 have it
};

extern const InstructionSet portable;
#ifdef __x86_64__
extern const InstructionSet avx2, avx512, avx512_bf16, amx_bf16, avx_vnni, avx512_vnni, amx_int8;
#endif

// The widest instruction set of this machine that has steps for every dtype.
const InstructionSet& widest();

}  // namespace ts::cpu
