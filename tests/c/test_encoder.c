/* Encoders: results that are known, and what is refused. */
#include <math.h>

#include "layer.h"

enum { HIDDEN = 16 };

/* A layer without blocks: norms are all that it computes. */
typedef struct encoder {
    ts_pattern square, wide;
    int32_t row_ptr[4];
    float scales[48], ones[HIDDEN], x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    int32_t offsets[4];
    ts_encoder_layer layer;
    const ts_encoder_layer* layers[1];
    ts_encoder_desc desc;
    _Alignas(64) char workspace[1 << 20];
} encoder;

static void init_encoder(encoder* e) {
    memset(e, 0, sizeof *e);
    const ts_pattern square = {.struct_size = sizeof square,
                               .block_rows = 16,
                               .block_cols = 16,
                               .out_features = HIDDEN,
                               .in_features = HIDDEN,
                               .row_ptr = e->row_ptr};
    e->square = e->wide = square;
    e->wide.out_features = 3 * HIDDEN;
    const ts_encoder_weight weight = {
        .pattern = &e->square,
        .values = {.dtype = TS_INT8, .granularity = TS_SCALES_PER_FEATURE, .scales = e->scales}};
    ts_encoder_weight wide = weight;
    wide.pattern = &e->wide;
    const ts_encoder_norm norm = {e->ones, NULL, 1e-12f, 0};
    const ts_encoder_layer layer = {.struct_size = sizeof layer,
                                    .heads = 1,
                                    .head_features = HIDDEN,
                                    .activation = TS_GELU,
                                    .scale = 0.25f,
                                    .qkv = wide,
                                    .output = weight,
                                    .up = weight,
                                    .down = weight,
                                    .attention_norm = norm,
                                    .mlp_norm = norm};
    e->layer = layer;
    e->layers[0] = &e->layer;
    for (int i = 0; i < HIDDEN; ++i) e->ones[i] = 1;
    for (int i = 0; i < TOKENS * HIDDEN; ++i) e->x[i] = i % 2 ? 3 : 1;
    e->offsets[1] = e->offsets[2] = 2;
    e->offsets[3] = TOKENS;
    const ts_encoder_desc desc = {.struct_size = sizeof desc,
                                  .device = TS_CPU,
                                  .dtype = TS_FLOAT32,
                                  .tokens = TOKENS,
                                  .sentences = 3,
                                  .offsets = e->offsets,
                                  .layer_count = 1,
                                  .layers = e->layers,
                                  .x = {e->x, HIDDEN, TS_ROW_MAJOR, 0},
                                  .y = {e->y, HIDDEN, TS_ROW_MAJOR, 0}};
    e->desc = desc;
}

/* After `change` of the encoder e it fails with that status, its text mentions a word, and y is untouched. */
#define REFUSES_ENCODER(change, mention) REFUSES_ENCODER_WITH(TS_INVALID_ARGUMENT, change, mention)
#define REFUSES_ENCODER_WITH(expected, change, mention)                                       \
    do {                                                                                      \
        static encoder e;                                                                     \
        init_encoder(&e);                                                                     \
        change;                                                                               \
        FAILS(ts_encoder(&e.desc, e.workspace, sizeof e.workspace, NULL), expected, mention); \
        for (int i = 0; i < TOKENS * HIDDEN; ++i) CHECK(e.y[i] == 0, "%d", i);                \
    } while (0)

static void test_bad_encoders(void) {
    REFUSES_ENCODER_WITH(TS_UNSUPPORTED, e.desc.device = TS_CUDA,
                         "device must be 0 (TS_CPU) for an encoder, got 1");
    REFUSES_ENCODER(e.desc.device = 2, "device");
    REFUSES_ENCODER(e.desc.dtype = TS_FLOAT16, "dtype must be 2 or 4, got 3");
    REFUSES_ENCODER(e.desc.kernel = -2, "kernel");
    REFUSES_ENCODER(e.desc.tokens = -1, "tokens");
    REFUSES_ENCODER(e.desc.sentences = -1, "sentences");
    REFUSES_ENCODER(e.desc.offsets = NULL, "offsets must not be null");
    REFUSES_ENCODER(e.offsets[0] = 1, "offsets[0] must be 0, got 1");
    REFUSES_ENCODER(e.offsets[2] = 1, "offsets must ascend, got 1 after 2 at 2");
    REFUSES_ENCODER(e.offsets[3] = 6, "offsets[3] must be tokens, 5, got 6");
    REFUSES_ENCODER(e.desc.layer_count = 0, "layer_count must be 1 to 1024, got 0");
    REFUSES_ENCODER(e.layers[0] = NULL, "layers[0] must not be null");
    REFUSES_ENCODER(e.layer.struct_size = 8, "layers[0].struct_size must be");
    REFUSES_ENCODER(e.layer.norm_first = 2, "layers[0].norm_first must be 0 or 1, got 2");
    REFUSES_ENCODER(e.layer.gated = -1, "layers[0].gated");
    REFUSES_ENCODER(e.layer.gated = 1, "layers[0].up.pattern.out_features must be 32, got 16");
    REFUSES_ENCODER(e.layer.heads = 0, "layers[0].heads must be 1 to 65536, got 0");
    REFUSES_ENCODER(e.layer.head_features = 24, "head_features must be a multiple of 16");
    REFUSES_ENCODER(e.layer.activation = 4, "layers[0].activation");
    REFUSES_ENCODER(e.layer.window = -1, "layers[0].window");
    REFUSES_ENCODER(e.layer.scale = NAN, "layers[0].scale must be finite");
    REFUSES_ENCODER(e.layer.reserved = 1, "layers[0].reserved");
    REFUSES_ENCODER(e.layer.position_bias = e.ones, "layers[0].positions must be 3 to 16777216, got 0");
    REFUSES_ENCODER(e.layer.rotary = e.ones,
                    "head_features must be a multiple of 32 where rotary is given, got 16");
    REFUSES_ENCODER(e.layer.qkv.pattern = NULL, "layers[0].qkv.pattern must not be null");
    REFUSES_ENCODER(e.layer.qkv.pattern = &e.square, "layers[0].qkv.pattern.out_features must be 48, got 16");
    REFUSES_ENCODER(e.layer.down.values.dtype = TS_FLOAT8_E4M3FN,
                    "layers[0].down.values.dtype must be that of x");
    REFUSES_ENCODER(e.layer.up.values.storage = TS_STORAGE_2_4,
                    "layers[0].up.values.storage must be 0, got 1");
    REFUSES_ENCODER(e.layer.up.values.scales = NULL, "layers[0].up.values.scales must not be null");
    REFUSES_ENCODER(e.layer.output.bias = (const float*)((const char*)e.ones + 1),
                    "layers[0].output.bias.data must be aligned");
    REFUSES_ENCODER_WITH(TS_INVALID_PATTERN, e.row_ptr[1] = 1, "layers[0].qkv.row_ptr must ascend");
    REFUSES_ENCODER(e.layer.attention_norm.weight = NULL, "layers[0].attention_norm.weight must not be null");
    REFUSES_ENCODER(e.layer.mlp_norm.epsilon = 0, "layers[0].mlp_norm.epsilon");
    REFUSES_ENCODER(e.desc.x.data = NULL, "x.data must not be null");
    REFUSES_ENCODER(e.desc.y.ld = 15, "y.ld must be at least 16, got 15");
    REFUSES_ENCODER(e.desc.x.data = e.y + 1, "x and y must not overlap");
    REFUSES_ENCODER(e.layer.mlp_norm.bias = e.y, "mlp_norm.bias");
    REFUSES_ENCODER(e.layer.up.bias = e.y, "layers[0].up.bias and y must not overlap");
    static encoder e;
    init_encoder(&e);
    size_t bytes = 0;
    INVALID(ts_encoder_workspace_size(&e.desc, NULL), "bytes");
    INVALID(ts_encoder_workspace_size(NULL, &bytes), "desc");
    SUCCEEDS(ts_encoder_workspace_size(&e.desc, &bytes));
    FAILS(ts_encoder(&e.desc, e.workspace, bytes - 1, NULL), TS_WORKSPACE_TOO_SMALL, "workspace_bytes");
    INVALID(ts_encoder(&e.desc, NULL, bytes, NULL), "workspace must not be null");
    INVALID(ts_encoder(&e.desc, e.workspace + 4, bytes, NULL), "workspace must be aligned");
}

static void test_norms(void) {
    static encoder e;
    init_encoder(&e);
    SUCCEEDS(ts_encoder(&e.desc, e.workspace, sizeof e.workspace, NULL));
    for (int i = 0; i < TOKENS * HIDDEN; ++i)
        CHECK(fabsf(e.y[i] - (i % 2 ? 1.0f : -1.0f)) < 1e-5f, "%d: %g", i, e.y[i]);
    e.desc.y = e.desc.x; /* in place */
    SUCCEEDS(ts_encoder(&e.desc, e.workspace, sizeof e.workspace, NULL));
    CHECK(memcmp(e.x, e.y, sizeof e.x) == 0, "in place");
    init_encoder(&e);
    e.layer.norm_first = 1;
    SUCCEEDS(ts_encoder(&e.desc, e.workspace, sizeof e.workspace, NULL));
    CHECK(memcmp(e.x, e.y, sizeof e.x) == 0, "nothing is added");
    e.desc.tokens = e.desc.sentences = 0;
    SUCCEEDS(ts_encoder(&e.desc, e.workspace, sizeof e.workspace, NULL));
}

void test_encoder(void) {
    test_norms();
    test_bad_encoders();
}
