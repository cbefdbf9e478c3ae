// Layers of encoders of texts: products of int8 with attention and norms between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/problem.h"
#include "cpu/packed_values.h"
#include "cpu/steps.h"

namespace ts::cpu {

struct EncoderNorm {
    const float* weight;  // null where there is no norm
    const float* bias;    // or null
    float epsilon;
};

// A layer whose descriptor has been checked, see ts_encoder_layer. The products lack tokens, x and y.
struct EncoderLayer {
    bool norm_first, gated;
    int64_t heads, head_features, window, positions;
    float scale;
    Activation activation;
    EncoderNorm attention_norm, mlp_norm;
    const float* rotary;
    const float* position_bias;
    Problem qkv, output, up, down;

    int64_t attended() const { return heads * head_features; }
    int64_t inner() const { return down.pattern.in_features; }
};

struct Encoder {
    DType dtype;
    int64_t tokens, sentences, hidden;
    const int32_t* offsets;
    Matrix x, y;
    std::vector<EncoderLayer> layers;
};

size_t encoder_workspace_size(const InstructionSet& set, const Encoder& encoder, const Device& device);
void run_encoder(const InstructionSet& set, const Encoder& encoder, const Device& device, void* workspace);

// ---- the steps between products ----

// A row of activations: x + added, normed, is written as `result`; normed by the other norm it is quantized.
// Norms without a weight change nothing.
struct RowStep {
    const void* x;
    const float* added;  // or null
    void* result;        // or null
    EncoderNorm norm, next_norm;
    int8_t* quantized;  // or null
    float* scale;
    float* row;  // [features]: scratch; not used where x of float32 is only quantized
    int64_t features;
};

// activation(first half) * second half of a row.
struct GateStep {
    const float* row;
    float* result;
    int64_t features;  // of a half
    Activation activation;
};

// Attention of a head to the tokens of a sentence.
struct AttentionStep {
    const float *q, *k, *v;  // of the first token
    int64_t ld;
    int64_t tokens, features;
    int64_t window, positions;
    float scale;
    const float* rotary;         // see ts_encoder_layer
    const float* position_bias;  // of this head
    float* result;
    int64_t result_ld;
    std::byte* scratch;
};

// Rows of int8 times panels [first, last) of packed values. Of x all rows up to a multiple of 32 are read,
// and a line more.
struct PanelProduct {
    PackedValues values;
    int64_t first, last;
    const int8_t* x;  // [tokens, ld]
    int64_t ld, tokens;
    const float* token_scales;
    const float* feature_scales;  // of all features, as bias and result
    const float* bias;            // or null
    Activation activation;
    float* result;
    int64_t result_ld;
};

struct EncoderSteps {
    // From x of float32 or bfloat16, to a result of either.
    void (*row[2][2])(const RowStep&);
    void (*finish)(const Output&);  // to float32, with a gelu that is quantized next
    void (*gate)(const GateStep&);
    void (*attention)(const AttentionStep&);
    int64_t (*attention_bytes)(int64_t tokens, int64_t features);  // of scratch
    void (*multiply_panels)(const PanelProduct&) = nullptr;        // or null
};

}  // namespace ts::cpu
