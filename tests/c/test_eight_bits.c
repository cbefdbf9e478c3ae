/* Products of x in 8 bits. */
#include <stdlib.h>
#include <string.h>

#include "stored.h"

static _Alignas(16) unsigned char x_bytes[TOKENS * (IN + 3)];
static float x_scales[TOKENS + 1], scales[OUT + 1]; /* with one to move on */

/* Sets numbers and scales with which sums and results are exact in float32. */
static void give_eight_bits(operands* o, stored* s, int32_t dtype) {
    init_stored(s, dtype);
    for (int i = 0; i < TOKENS * (IN + 3); ++i)
        x_bytes[i] = (unsigned char)(dtype == TS_INT8 ? i * 29 % 17 - 8 : i % 3 << 7 | 7 << 3 | i % 8);
    for (int t = 0; t <= TOKENS; ++t) x_scales[t] = 1 / (float)(1 << t);
    for (int n = 0; n <= OUT; ++n) scales[n] = (float)(n % 3 + 1) / 4;
    o->desc.x.dtype = dtype;
    o->desc.y.dtype = TS_FLOAT32;
    o->desc.x.data = x_bytes;
    o->desc.values.data = s->values;
    o->desc.values.granularity = TS_SCALES_PER_FEATURE;
    o->desc.values.scales = scales;
    o->desc.x.scales = x_scales;
    o->desc.x.granularity = TS_SCALES_PER_TOKEN;
}

/* Puts what x and values stand for, scales included, where check_forward looks for them. */
static void show(const operands* o, const stored* s, operands* shown) {
    *shown = *o;
    for (int t = 0; t < TOKENS; ++t)
        for (int k = 0; k < IN; ++k) {
            const int64_t i = at(&o->desc.x, t, k);
            put(shown, 0, i, number_at(x_bytes, o->desc.x.dtype, (int)i) * x_scales[t]);
        }
    for (int row = 0; row < ROWS; ++row)
        for (int32_t e = row_ptr[row]; e < row_ptr[row + 1]; ++e)
            for (int i = 0; i < BN * BK; ++i) {
                const int at_value = row_slot[e] * BN * BK + i;
                put(shown, 2, at_value,
                    number_at(s->values, o->desc.x.dtype, at_value) * scales[row * BN + i / BK]);
            }
}

static void test_forward(int32_t dtype, int32_t y_layout, int32_t kernel) {
    static operands o, shown;
    static stored s;
    for (int option = 0; option < 4; ++option) {
        init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, y_layout);
        give_eight_bits(&o, &s, dtype);
        o.desc.kernel = kernel;
        if (option & 1) o.desc.bias.data = o.memory[3];
        if (option & 2) give_residual(&o);
        if (option == 3) o.desc.activation = TS_RELU;
        SUCCEEDS(run(&o));
        show(&o, &s, &shown);
        check_forward(&shown);
    }
}

/* The product of int8 is refused after a change. */
#define REFUSES_EIGHT_BITS(change, mention)                                        \
    do {                                                                           \
        static stored s;                                                           \
        REFUSES(TS_DDS_NT, (give_eight_bits(&o, &s, TS_INT8), change), (mention)); \
    } while (0)

static void test_refusals(void) {
    REFUSES_EIGHT_BITS(o.desc.x.scales = NULL, "x.scales must not be null");
    REFUSES_EIGHT_BITS(o.desc.x.scales = (float*)((char*)x_scales + 1),
                       "x.scales must be aligned to 4 bytes");
    REFUSES_EIGHT_BITS(o.desc.x.scales = (float*)o.memory[1], "y and x.scales must not overlap in memory");
    REFUSES_EIGHT_BITS(o.desc.values.scales = NULL, "values.scales must not be null for values of int8");
    REFUSES_EIGHT_BITS((o.desc.x.layout = TS_COLUMN_MAJOR, o.desc.x.ld = TOKENS),
                       "x.layout must be 0 for x of int8, got 1");
    REFUSES_EIGHT_BITS(o.desc.values.granularity = TS_SCALES_PER_ROW,
                       "values.granularity must be 3 for values of int8 where x has 8 bits, got 2");
    REFUSES_EIGHT_BITS(o.desc.x.granularity = TS_SCALES_NONE,
                       "x.granularity must be 4 or 5 for x of int8, got 0");
    REFUSES_EIGHT_BITS(o.desc.values.dtype = TS_FLOAT8_E4M3FN,
                       "values.dtype must be that of x, int8, got float8_e4m3fn");
    REFUSES_EIGHT_BITS(o.desc.values.storage = TS_STORAGE_2_4, "values.metadata must not be null");
    REFUSES_EIGHT_BITS(o.desc.y.dtype = 0, "y.dtype must be 2 to 4 for x of int8, got 0");
    REFUSES_EIGHT_BITS(o.desc.y.dtype = TS_FLOAT64, "y.dtype must be 2 to 4 for x of int8, got 1");
    REFUSES_EIGHT_BITS((o.pattern.in_features = 1 << 17, o.desc.x.ld = 1 << 17),
                       "pattern.in_features must be below 131072 for x of int8, got 131072");
    REFUSES_EIGHT_BITS((o.desc.op = TS_DDS_NN, o.desc.y.dtype = TS_INT8), "y.dtype must be 1 to 4, got 5");
    REFUSES_EIGHT_BITS(o.desc.op = TS_SDD_TN, "x.dtype must be 1 to 4, got 5");
    REFUSES(TS_DDS_NT, o.desc.x.scales = x_scales, "x.scales must be null for x of float32");
}

/* Scales inside of the sums: four blocks of 128 x 128, one of which is not kept. */
enum { SIDE = 128, GROUPS = 2, KEPT = 3, LINE = TOKENS + 2 };

typedef struct inside {
    ts_pattern pattern;
    ts_matmul_desc desc;
    _Alignas(16) unsigned char x[TOKENS * GROUPS * SIDE], values[KEPT * SIDE * SIDE];
    _Alignas(16) float of_x[GROUPS * LINE + 1], of_blocks[KEPT], y[TOKENS * GROUPS * SIDE];
} inside;

static const int32_t block_ptr[] = {0, 2, 3}, block_col[] = {0, 1, 1}, block_slot[] = {2, 0, 1};

static void init_inside(inside* p) {
    memset(p, 0, sizeof *p);
    p->pattern = (ts_pattern){.struct_size = sizeof p->pattern,
                              .block_rows = SIDE,
                              .block_cols = SIDE,
                              .out_features = GROUPS * SIDE,
                              .in_features = GROUPS * SIDE,
                              .nnz = KEPT,
                              .row_ptr = block_ptr,
                              .col_idx = block_col,
                              .row_slot = block_slot};
    p->desc = (ts_matmul_desc){
        .struct_size = sizeof p->desc,
        .op = TS_DDS_NT,
        .tokens = TOKENS,
        .pattern = &p->pattern,
        .x = {.data = p->x,
              .ld = GROUPS * SIDE,
              .dtype = TS_FLOAT8_E4M3FN,
              .granularity = TS_SCALES_PER_GROUP,
              .scales = p->of_x,
              .scales_ld = LINE},
        .y = {.data = p->y, .ld = GROUPS * SIDE, .dtype = TS_FLOAT32},
        .values = {.data = p->values, .granularity = TS_SCALES_PER_BLOCK, .scales = p->of_blocks}};
    for (int i = 0; i < TOKENS * GROUPS * SIDE; ++i) p->x[i] = (unsigned char)(i % 3 << 7 | 7 << 3 | i % 7);
    for (int i = 0; i < KEPT * SIDE * SIDE; ++i) p->values[i] = (unsigned char)(i % 5 << 7 | 7 << 3 | i % 8);
    for (int i = 0; i < GROUPS * LINE; ++i) p->of_x[i] = (float)(1 << i % 5) / 8;
    for (int i = 0; i < KEPT; ++i) p->of_blocks[i] = (float)(1 << i) / 4;
}

static ts_status_t run_inside(const inside* p) {
    size_t bytes = 0;
    const ts_status_t status = ts_matmul_workspace_size(&p->desc, &bytes);
    if (status != TS_SUCCESS) return status;
    void* workspace = aligned_alloc(64, (bytes / 64 + 1) * 64);
    memset(workspace, 0xff, (bytes / 64 + 1) * 64);
    const ts_status_t result = ts_matmul(&p->desc, workspace, bytes, NULL);
    free(workspace);
    return result;
}

/* All operands are exact in float32, and so are all sums. */
static double inside_at(const inside* p, int t, int n) {
    double sum = 0;
    for (int32_t e = block_ptr[n / SIDE]; e < block_ptr[n / SIDE + 1]; ++e) {
        const int group = block_col[e], slot = block_slot[e];
        double of_group = 0;
        for (int k = 0; k < SIDE; ++k)
            of_group += number_at(p->x, TS_FLOAT8_E4M3FN, (t * GROUPS + group) * SIDE + k) *
                        number_at(p->values, TS_FLOAT8_E4M3FN, (slot * SIDE + n % SIDE) * SIDE + k);
        sum += of_group * p->of_x[group * LINE + t] * p->of_blocks[slot];
    }
    return sum;
}

static void test_scales_inside(void) {
    static inside p;
    for (int32_t kernel = 0; kernel < 2; ++kernel) {
        init_inside(&p);
        p.desc.kernel = kernel * portable_kernel();
        SUCCEEDS(run_inside(&p));
        int differing = 0;
        for (int t = 0; t < TOKENS; ++t)
            for (int n = 0; n < GROUPS * SIDE; ++n)
                differing += p.y[t * GROUPS * SIDE + n] != inside_at(&p, t, n);
        CHECK(differing == 0, "%d results differ", differing);
    }
#define REFUSES_INSIDE(change, mention) \
    (init_inside(&p), change);          \
    INVALID(run_inside(&p), mention)
    REFUSES_INSIDE(p.desc.x.scales_ld = TOKENS - 1, "x.scales_ld must be 5 to 2147483647, got 4");
    REFUSES_INSIDE(p.desc.x.scales_ld = -1, "x.scales_ld must be 5 to 2147483647, got -1");
    REFUSES_INSIDE(p.desc.x.granularity = TS_SCALES_PER_TOKEN, "x.scales_ld must be 0, got 7");
    REFUSES_INSIDE(p.desc.x.scales = NULL, "x.scales must not be null");
    REFUSES_INSIDE(p.desc.x.scales = (float*)p.y, "y and x.scales must not overlap in memory");
    REFUSES_INSIDE(p.desc.values.scales = NULL, "values.scales must not be null for values of float8_e4m3fn");
    REFUSES_INSIDE(p.desc.values.granularity = TS_SCALES_PER_FEATURE,
                   "values.granularity must be 1 for values of float8_e4m3fn where x.granularity is "
                   "TS_SCALES_PER_GROUP, "
                   "got 3");
    REFUSES_INSIDE(p.desc.x.dtype = TS_INT8, "x.granularity must be 4 for x of int8, got 5");
    REFUSES_INSIDE(p.desc.x.dtype = TS_FLOAT32, "x.granularity must be 0 for x of float32, got 5");
    REFUSES_INSIDE(p.desc.device = TS_CUDA, "x.scales_ld must be a multiple of 16 bytes, got 7 elements");
    REFUSES_INSIDE(p.pattern.block_rows = SIDE / 2,
                   "x.granularity must be 4 unless blocks are 128 x 128, got 5 for blocks of 64 x 128");
#undef REFUSES_INSIDE
}

void test_eight_bits(void) {
    for (int32_t dtype = TS_INT8; dtype <= TS_FLOAT8_E4M3FN; ++dtype)
        for (int32_t layout = TS_ROW_MAJOR; layout <= TS_COLUMN_MAJOR; ++layout) {
            test_forward(dtype, layout, 0);
            test_forward(dtype, layout, portable_kernel());
        }
    test_scales_inside();
    test_refusals();
}
