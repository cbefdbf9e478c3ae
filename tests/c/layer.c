#include "layer.h"

#include <stdlib.h>
#include <string.h>

int failures = 0;

int32_t row_ptr[ROWS + 1] = {0, 2, 2, 3};
int32_t col_idx[NNZ] = {0, 1, 1};
int32_t row_slot[NNZ] = {2, 0, 1};
int32_t col_ptr[COLS + 1] = {0, 1, 3};
int32_t row_idx[NNZ] = {0, 0, 2};
int32_t col_slot[NNZ] = {2, 0, 1};

ts_pattern layer_pattern(void) {
    return (ts_pattern){.struct_size = sizeof(ts_pattern),
                        .block_rows = BN,
                        .block_cols = BK,
                        .out_features = OUT,
                        .in_features = IN,
                        .nnz = NNZ,
                        .row_ptr = row_ptr,
                        .col_idx = col_idx,
                        .row_slot = row_slot,
                        .col_ptr = col_ptr,
                        .row_idx = row_idx,
                        .col_slot = col_slot};
}

double get(const operands* o, int which, int64_t i) {
    const void* memory = o->memory[which];
    return o->desc.x.dtype == TS_FLOAT64 ? ((const double*)memory)[i] : ((const float*)memory)[i];
}

void put(operands* o, int which, int64_t i, double value) {
    void* memory = o->memory[which];
    if (o->desc.x.dtype == TS_FLOAT64)
        ((double*)memory)[i] = value;
    else
        ((float*)memory)[i] = (float)value;
}

/* Multiples of 1/8 in [-1, 1): all sums below are exact in float32. */
static double some_value(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (double)(state >> 28) / 8 - 1;
}

const double kUntouched = 77;

void init_operands(operands* o, int32_t op, int32_t dtype, int32_t x_layout, int32_t y_layout) {
    memset(o, 0, sizeof *o);
    o->pattern = layer_pattern();
    o->desc = (ts_matmul_desc){.struct_size = sizeof(ts_matmul_desc), .op = op, .tokens = TOKENS};
    o->desc.pattern = &o->pattern;
    o->desc.x = (ts_operand){
        o->memory[0], (x_layout == TS_ROW_MAJOR ? IN : TOKENS) + 3, x_layout, dtype, 0, 0, NULL, 0, NULL};
    o->desc.y = (ts_operand){
        o->memory[1], (y_layout == TS_ROW_MAJOR ? OUT : TOKENS) + 3, y_layout, dtype, 0, 0, NULL, 0, NULL};
    o->desc.values.data = o->memory[2];
    const int written = op == TS_DDS_NT ? 1 : op == TS_DDS_NN ? 0 : 2;
    for (int which = 0; which < 5; ++which)
        for (int i = 0; i < 2048; ++i) put(o, which, i, which == written ? kUntouched : some_value());
}

void give_residual(operands* o) {
    o->desc.residual = o->desc.y;
    o->desc.residual.data = o->memory[4];
    o->desc.residual.ld += 5;
}

void give_gate(operands* o) {
    o->desc.gate = o->desc.y;
    o->desc.gate.data = o->memory[4];
    o->desc.gate.ld += 5;
}

void give_bias_gradient(operands* o, int32_t accumulate) {
    for (int i = 0; i <= OUT; ++i) put(o, 3, i, kUntouched);
    o->desc.bias.data = o->memory[3];
    o->desc.accumulate |= accumulate ? TS_ACCUMULATE_BIAS : 0;
}

static double relu(double value) { return value > 0 ? value : 0; }

int64_t at(const ts_operand* m, int64_t token, int64_t feature) {
    return m->layout == TS_ROW_MAJOR ? token * m->ld + feature : feature * m->ld + token;
}

double x_at(const operands* o, int64_t t, int64_t f) { return get(o, 0, at(&o->desc.x, t, f)); }
double y_at(const operands* o, int64_t t, int64_t f) { return get(o, 1, at(&o->desc.y, t, f)); }

/* Position in values of W[n, k], or -1 where the block is not kept. */
static int64_t weight_at(int64_t n, int64_t k) {
    for (int32_t e = row_ptr[n / BN]; e < row_ptr[n / BN + 1]; ++e)
        if (col_idx[e] == k / BK) return ((int64_t)row_slot[e] * BN + n % BN) * BK + k % BK;
    return -1;
}

double weight(const operands* o, int64_t n, int64_t k) {
    const int64_t i = weight_at(n, k);
    return i < 0 ? 0 : get(o, 2, i);
}

ts_status_t run(operands* o) {
    size_t bytes = 0;
    const ts_status_t status = ts_matmul_workspace_size(&o->desc, &bytes);
    if (status != TS_SUCCESS) return status;
    void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
    memset(workspace, 0xff, (bytes / 256 + 1) * 256);
    const ts_status_t result = ts_matmul(&o->desc, workspace, bytes, NULL);
    free(workspace);
    return result;
}

/* The elements of x or y that belong to no line must not be written. */
static void check_gaps(const operands* o, int which, int64_t features) {
    const ts_operand* m = which == 0 ? &o->desc.x : &o->desc.y;
    const int64_t length = m->layout == TS_ROW_MAJOR ? features : TOKENS;
    const int64_t lines = m->layout == TS_ROW_MAJOR ? TOKENS : features;
    for (int64_t line = 0; line < lines; ++line)
        for (int64_t i = length; i < m->ld; ++i)
            CHECK(get(o, which, line * m->ld + i) == kUntouched, "operand %d, line %d, gap %d", which,
                  (int)line, (int)i);
}

void check_forward(const operands* o) {
    for (int64_t t = 0; t < TOKENS; ++t)
        for (int64_t n = 0; n < OUT; ++n) {
            double sum = o->desc.bias.data != NULL ? get(o, 3, n) : 0;
            for (int64_t k = 0; k < IN; ++k) sum += x_at(o, t, k) * weight(o, n, k);
            if (o->desc.gate.data != NULL) {
                const double gate = get(o, 4, at(&o->desc.gate, t, n));
                sum *= o->desc.activation == TS_RELU ? relu(gate) : gate;
            } else if (o->desc.activation == TS_RELU) {
                sum = relu(sum);
            }
            if (o->desc.residual.data != NULL) sum += get(o, 4, at(&o->desc.residual, t, n));
            CHECK(y_at(o, t, n) == sum, "y[%d, %d] is %g, not %g", (int)t, (int)n, y_at(o, t, n), sum);
        }
    check_gaps(o, 1, OUT);
}

void check_gradient_of_x(const operands* o) {
    for (int64_t t = 0; t < TOKENS; ++t)
        for (int64_t k = 0; k < IN; ++k) {
            double sum = 0;
            for (int64_t n = 0; n < OUT; ++n) sum += y_at(o, t, n) * weight(o, n, k);
            CHECK(x_at(o, t, k) == sum, "x[%d, %d] is %g, not %g", (int)t, (int)k, x_at(o, t, k), sum);
        }
    check_gaps(o, 0, IN);
}

void check_gradient_of_values(const operands* o) {
    for (int64_t n = 0; n < OUT; ++n)
        for (int64_t k = 0; k < IN; ++k) {
            const int64_t i = weight_at(n, k);
            if (i < 0) continue;
            double sum = o->desc.accumulate & TS_ACCUMULATE_VALUES ? kUntouched : 0;
            for (int64_t t = 0; t < TOKENS; ++t) sum += y_at(o, t, n) * x_at(o, t, k);
            CHECK(get(o, 2, i) == sum, "values[%d] is %g, not %g", (int)i, get(o, 2, i), sum);
        }
    CHECK(get(o, 2, NNZ * BN * BK) == kUntouched, "written behind values");
    if (o->desc.bias.data == NULL) return;
    for (int64_t n = 0; n < OUT; ++n) {
        double sum = o->desc.accumulate & TS_ACCUMULATE_BIAS ? kUntouched : 0;
        for (int64_t t = 0; t < TOKENS; ++t) sum += y_at(o, t, n);
        CHECK(get(o, 3, n) == sum, "bias_gradient[%d] is %g, not %g", (int)n, get(o, 3, n), sum);
    }
    CHECK(get(o, 3, OUT) == kUntouched, "written behind bias_gradient");
}
