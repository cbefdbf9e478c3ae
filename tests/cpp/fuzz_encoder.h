// Hostile calls of encoders.
#ifndef TILESPARSE_TESTS_FUZZ_ENCODER_H_
#define TILESPARSE_TESTS_FUZZ_ENCODER_H_

#include <tilesparse/tilesparse.h>

#include <cstdint>
#include <vector>

#include "fuzz_arguments.h"
#include "fuzz_memory.h"
#include "fuzz_rules.h"
#include "fuzz_values.h"

namespace fuzz {

constexpr Field kLayerFields[] = {
    NARROW(ts_encoder_layer, norm_first),      NARROW(ts_encoder_layer, heads),
    NARROW(ts_encoder_layer, head_features),   NARROW(ts_encoder_layer, activation),
    NARROW(ts_encoder_layer, gated),           NARROW(ts_encoder_layer, window),
    NARROW(ts_encoder_layer, positions),       NARROW(ts_encoder_layer, scale),
    NARROW(ts_encoder_layer, reserved),        NARROW(ts_encoder_layer, up.values.dtype),
    NARROW(ts_encoder_layer, mlp_norm.epsilon)};

constexpr Field kEncoderFields[] = {NARROW(ts_encoder_desc, device),  NARROW(ts_encoder_desc, dtype),
                                    NARROW(ts_encoder_desc, kernel),  WIDE(ts_encoder_desc, tokens),
                                    WIDE(ts_encoder_desc, sentences), WIDE(ts_encoder_desc, layer_count)};

inline float* some_floats(wide count) { return reinterpret_cast<float*>(take_some(count * 4)); }

inline ts_encoder_weight some_weight(int64_t out, int64_t in, int64_t* claimed_in = nullptr) {
    ts_pattern pattern{};
    pattern.block_rows = pattern.block_cols = 16;
    pattern = pattern_of(pattern, out / 16, in / 16);
    if (claimed_in != nullptr) *claimed_in = pattern.in_features;
    ts_encoder_weight weight{};
    weight.pattern = as_caller_has_it(pattern);
    weight.values.data = take_some(wide(pattern.nnz) * pattern.block_rows * pattern.block_cols);
    weight.values.dtype = TS_INT8;
    weight.values.granularity = TS_SCALES_PER_FEATURE;
    weight.values.scales = some_floats(pattern.out_features);
    weight.bias = chance(50) ? nullptr : some_floats(pattern.out_features);
    return weight;
}

inline const ts_encoder_layer* some_layer(int64_t hidden, int64_t* claimed_hidden) {
    ts_encoder_layer layer{};
    layer.norm_first = static_cast<int32_t>(draw(0, 1));
    layer.gated = static_cast<int32_t>(draw(0, 1));
    layer.heads = static_cast<int32_t>(draw(1, 3));
    layer.head_features = static_cast<int32_t>(16 * draw(1, 3));
    layer.activation = some_activation();
    layer.window = static_cast<int32_t>(chance(50) ? 0 : draw(1, 20));
    layer.positions = static_cast<int32_t>(chance(80) ? 64 : draw(0, 40));
    layer.scale = 0.25f;
    layer.mlp_norm.epsilon = layer.attention_norm.epsilon = 1e-5f;
    const int64_t attended = layer.heads * layer.head_features, inner = 16 * draw(1, 4);
    int64_t claimed = 0;
    layer.qkv = some_weight(3 * attended, hidden, &claimed);
    if (*claimed_hidden < 0) *claimed_hidden = claimed;
    layer.output = some_weight(hidden, attended);
    layer.up = some_weight(layer.gated ? 2 * inner : inner, hidden);
    layer.down = some_weight(hidden, inner);
    while (chance(10)) spoil(layer, kLayerFields);
    for (ts_encoder_norm* norm : {&layer.attention_norm, &layer.mlp_norm}) {
        norm->weight = some_floats(*claimed_hidden);
        norm->bias = chance(50) ? nullptr : some_floats(*claimed_hidden);
    }
    if (layer.norm_first == 1 && chance(30)) layer.attention_norm = {};
    if (chance(30) && (layer.head_features % 32 == 0 || chance(10)))
        layer.rotary = some_floats(wide(layer.positions) * layer.head_features);
    if (chance(30)) layer.position_bias = some_floats(wide(layer.heads) * (2 * wide(layer.positions) - 1));
    return as_caller_has_it(layer);
}

inline void call_encoder() {
    ts_encoder_desc desc{};
    const int64_t hidden = 16 * draw(1, 4);
    int64_t claimed_hidden = -1;
    desc.dtype = chance(50) ? TS_FLOAT32 : TS_BFLOAT16;
    desc.kernel = chance(70) ? 0 : static_cast<int32_t>(draw(1, ts_kernel_count()));
    desc.tokens = draw(0, 60);
    desc.sentences = draw(0, 5);
    desc.layer_count = draw(1, 2);
    std::vector<const ts_encoder_layer*> given;
    for (int64_t i = 0; i < desc.layer_count; ++i) given.push_back(some_layer(hidden, &claimed_hidden));
    if (chance(10)) spoil(desc, kEncoderFields);
    desc.offsets = some_offsets(desc.sentences, desc.tokens);
    auto** const layers = reinterpret_cast<const ts_encoder_layer**>(take(wide(desc.layer_count) * 8));
    for (int64_t i = 0; layers != nullptr && i < desc.layer_count; ++i)
        layers[i] = i < static_cast<int64_t>(given.size()) ? given[i] : nullptr;
    desc.layers = layers;
    desc.x = some_matrix(desc.dtype, desc.tokens, claimed_hidden);
    desc.y = chance(10) ? desc.x : some_matrix(desc.dtype, desc.tokens, claimed_hidden);
    const bool in_place = desc.x.data == desc.y.data;
    const ts_encoder_desc* const caller = as_caller_has_it(desc);
    size_t bytes = 0;
    check_status("ts_encoder_workspace_size",
                 ts_encoder_workspace_size(caller, chance(2) ? nullptr : &bytes));
    if (chance(5)) bytes = static_cast<size_t>(draw(0, 4096));
    const Result workspace(bytes);
    const bool done = check_status("ts_encoder", ts_encoder(caller, workspace.data, bytes, nullptr));
    workspace.check_untouched("ts_encoder", done);
    check("ts_encoder", !done || desc.device == TS_CPU);
    check("ts_encoder", done || is_untouched(desc.y.data));
    check("ts_encoder", in_place || is_untouched(desc.x.data));
}

}  // namespace fuzz

#endif  // TILESPARSE_TESTS_FUZZ_ENCODER_H_
