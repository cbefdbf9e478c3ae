/* Every public function, called from plain C: what it returns, what it refuses and what it writes. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tilesparse/tilesparse.h>

static int failures = 0;

#define CHECK(condition, ...)                                      \
    do {                                                           \
        if (!(condition)) {                                        \
            ++failures;                                            \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            printf(" (last error: %s)\n", ts_last_error());        \
        }                                                          \
    } while (0)

#define SUCCEEDS(call)                                                          \
    do {                                                                        \
        const ts_status_t status = (call);                                      \
        CHECK(status == TS_SUCCESS, "%s: %s", #call, ts_status_string(status)); \
    } while (0)

/* The call returns the status, and the sentence about it mentions a word. */
#define FAILS(call, expected, mention)                                                        \
    do {                                                                                      \
        const ts_status_t status = (call);                                                    \
        CHECK(status == (expected), "%s: %s", #call, ts_status_string(status));               \
        CHECK(strstr(ts_last_error(), (mention)) != NULL, "no mention of \"%s\"", (mention)); \
    } while (0)

/* Bytes of the structures in the first version of the header, which test_first.c compares with it. */
enum { FIRST_MATMUL_DESC = 160, FIRST_KERNEL_INFO = 104 };

/* --- One small layer: block row 1 is empty, slots are out of order ---------------------------- */

enum { BN = 16, BK = 32, ROWS = 3, COLS = 2, NNZ = 3, OUT = ROWS * BN, IN = COLS * BK, TOKENS = 5 };

static int32_t row_ptr[ROWS + 1] = {0, 2, 2, 3};
static int32_t col_idx[NNZ] = {0, 1, 1};
static int32_t row_slot[NNZ] = {2, 0, 1};
static int32_t col_ptr[COLS + 1] = {0, 1, 3};
static int32_t row_idx[NNZ] = {0, 0, 2};
static int32_t col_slot[NNZ] = {2, 0, 1};

static ts_pattern layer_pattern(void) {
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

/* Operands of a product in float32 or float64, with gaps between their lines. */
typedef struct operands {
    ts_pattern pattern;
    ts_matmul_desc desc;
    _Alignas(16) double memory[5][4096]; /* x, y, values, bias, residual; aligned as for CUDA */
} operands;

static double get(const operands* o, int which, int64_t i) {
    const void* memory = o->memory[which];
    return o->desc.dtype == TS_FLOAT64 ? ((const double*)memory)[i] : ((const float*)memory)[i];
}

static void put(operands* o, int which, int64_t i, double value) {
    void* memory = o->memory[which];
    if (o->desc.dtype == TS_FLOAT64)
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

static const double kUntouched = 77;

static void init_operands(operands* o, int32_t op, int32_t dtype, int32_t x_layout, int32_t y_layout) {
    memset(o, 0, sizeof *o);
    o->pattern = layer_pattern();
    o->desc =
        (ts_matmul_desc){.struct_size = sizeof(ts_matmul_desc), .op = op, .dtype = dtype, .tokens = TOKENS};
    o->desc.pattern = &o->pattern;
    o->desc.x = (ts_matrix){o->memory[0], (x_layout == TS_ROW_MAJOR ? IN : TOKENS) + 3, x_layout, 0};
    o->desc.y = (ts_matrix){o->memory[1], (y_layout == TS_ROW_MAJOR ? OUT : TOKENS) + 3, y_layout, 0};
    o->desc.values = o->memory[2];
    const int written = op == TS_DDS_NT ? 1 : op == TS_DDS_NN ? 0 : 2;
    for (int which = 0; which < 5; ++which)
        for (int i = 0; i < 2048; ++i) put(o, which, i, which == written ? kUntouched : some_value());
}

static void give_residual(operands* o) {
    o->desc.residual = (ts_matrix){o->memory[4], o->desc.y.ld + 5, o->desc.y.layout, 0};
}

/* Of multiples of 1/8 as well: relu of them is exact. */
static void give_gate(operands* o) {
    o->desc.gate = (ts_matrix){o->memory[4], o->desc.y.ld + 5, o->desc.y.layout, 0};
}

/* Of what init_operands left untouched. */
static void give_bias_gradient(operands* o, int32_t accumulate) {
    for (int i = 0; i <= OUT; ++i) put(o, 3, i, kUntouched);
    o->desc.bias_gradient = o->memory[3];
    o->desc.accumulate_bias = accumulate;
}

static double relu(double value) { return value > 0 ? value : 0; }

static int64_t at(const ts_matrix* m, int64_t token, int64_t feature) {
    return m->layout == TS_ROW_MAJOR ? token * m->ld + feature : feature * m->ld + token;
}

static double x_at(const operands* o, int64_t t, int64_t f) { return get(o, 0, at(&o->desc.x, t, f)); }
static double y_at(const operands* o, int64_t t, int64_t f) { return get(o, 1, at(&o->desc.y, t, f)); }

/* Position in values of W[n, k], or -1 where the block is not kept. */
static int64_t weight_at(int64_t n, int64_t k) {
    for (int32_t e = row_ptr[n / BN]; e < row_ptr[n / BN + 1]; ++e)
        if (col_idx[e] == k / BK) return ((int64_t)row_slot[e] * BN + n % BN) * BK + k % BK;
    return -1;
}

static double weight(const operands* o, int64_t n, int64_t k) {
    const int64_t i = weight_at(n, k);
    return i < 0 ? 0 : get(o, 2, i);
}

/* Runs the product with the workspace it asks for. */
static ts_status_t run(operands* o) {
    size_t bytes = 0;
    const ts_status_t status = ts_matmul_workspace_size(&o->desc, &bytes);
    if (status != TS_SUCCESS) return status;
    void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
    memset(workspace, 0xff, (bytes / 256 + 1) * 256);
    const ts_status_t result = ts_matmul(&o->desc, workspace, bytes, NULL);
    free(workspace);
    return result;
}

/* --- Products ------------------------------------------------------------------------------------ */

/* The elements of x or y that belong to no line must not be written. */
static void check_gaps(const operands* o, int which, int64_t features) {
    const ts_matrix* m = which == 0 ? &o->desc.x : &o->desc.y;
    const int64_t length = m->layout == TS_ROW_MAJOR ? features : TOKENS;
    const int64_t lines = m->layout == TS_ROW_MAJOR ? TOKENS : features;
    for (int64_t line = 0; line < lines; ++line)
        for (int64_t i = length; i < m->ld; ++i)
            CHECK(get(o, which, line * m->ld + i) == kUntouched, "operand %d, line %d, gap %d", which,
                  (int)line, (int)i);
}

static void check_forward(const operands* o) {
    for (int64_t t = 0; t < TOKENS; ++t)
        for (int64_t n = 0; n < OUT; ++n) {
            double sum = o->desc.bias != NULL ? get(o, 3, n) : 0;
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

static void check_gradient_of_x(const operands* o) {
    for (int64_t t = 0; t < TOKENS; ++t)
        for (int64_t k = 0; k < IN; ++k) {
            double sum = 0;
            for (int64_t n = 0; n < OUT; ++n) sum += y_at(o, t, n) * weight(o, n, k);
            CHECK(x_at(o, t, k) == sum, "x[%d, %d] is %g, not %g", (int)t, (int)k, x_at(o, t, k), sum);
        }
    check_gaps(o, 0, IN);
}

static void check_gradient_of_values(const operands* o) {
    for (int64_t n = 0; n < OUT; ++n)
        for (int64_t k = 0; k < IN; ++k) {
            const int64_t i = weight_at(n, k);
            if (i < 0) continue;
            double sum = o->desc.accumulate ? kUntouched : 0;
            for (int64_t t = 0; t < TOKENS; ++t) sum += y_at(o, t, n) * x_at(o, t, k);
            CHECK(get(o, 2, i) == sum, "values[%d] is %g, not %g", (int)i, get(o, 2, i), sum);
        }
    CHECK(get(o, 2, NNZ * BN * BK) == kUntouched, "written behind values");
    if (o->desc.bias_gradient == NULL) return;
    for (int64_t n = 0; n < OUT; ++n) {
        double sum = o->desc.accumulate_bias ? kUntouched : 0;
        for (int64_t t = 0; t < TOKENS; ++t) sum += y_at(o, t, n);
        CHECK(get(o, 3, n) == sum, "bias_gradient[%d] is %g, not %g", (int)n, get(o, 3, n), sum);
    }
    CHECK(get(o, 3, OUT) == kUntouched, "written behind bias_gradient");
}

static void test_products(int32_t dtype, int32_t x_layout, int32_t y_layout) {
    static operands o;
    for (int options = 0; options < 6; ++options) {
        init_operands(&o, TS_DDS_NT, dtype, x_layout, y_layout);
        o.desc.bias = options & 1 ? o.memory[3] : NULL;
        o.desc.activation = options & 1 ? TS_RELU : TS_NO_ACTIVATION;
        if (options & 2) give_residual(&o);
        if (options & 4) give_gate(&o);
        SUCCEEDS(run(&o));
        check_forward(&o);
    }
    init_operands(&o, TS_DDS_NN, dtype, x_layout, y_layout);
    SUCCEEDS(run(&o));
    check_gradient_of_x(&o);
    for (int options = 0; options < 6; ++options) {
        init_operands(&o, TS_SDD_TN, dtype, x_layout, y_layout);
        o.desc.accumulate = options % 2;
        if (options >= 2) give_bias_gradient(&o, options / 4);
        SUCCEEDS(run(&o));
        check_gradient_of_values(&o);
    }
}

/* Each CPU kernel by its number; those this processor cannot run refuse. */
static void test_forced_kernels(void) {
    static operands o;
    int ran = 0;
    for (int32_t kernel = 0; kernel < ts_kernel_count(); ++kernel) {
        init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
        o.desc.kernel = kernel + 1;
        const ts_status_t status = run(&o);
        CHECK(status == TS_SUCCESS || status == TS_UNSUPPORTED, "kernel %d: %s", (int)kernel,
              ts_status_string(status));
        if (status != TS_SUCCESS) continue;
        check_forward(&o);
        ++ran;
    }
    CHECK(ran > 0, "no kernel ran");
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.desc.kernel = ts_kernel_count() + 1;
    FAILS(run(&o), TS_INVALID_ARGUMENT, "kernel");
}

/* No tokens: nothing is read or written. No blocks: the output is zero. */
static void test_empty_products(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.desc.tokens = 0;
    o.desc.x.data = o.desc.y.data = NULL;
    SUCCEEDS(run(&o));

    static int32_t no_blocks[ROWS + 1];
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.pattern.nnz = 0;
    o.pattern.row_ptr = o.pattern.col_ptr = no_blocks;
    o.pattern.col_idx = o.pattern.row_slot = o.pattern.row_idx = o.pattern.col_slot = NULL;
    o.desc.values = NULL;
    SUCCEEDS(run(&o));
    for (int64_t n = 0; n < OUT; ++n) CHECK(y_at(&o, 2, n) == 0, "y[2, %d] is %g", (int)n, y_at(&o, 2, n));
}

/* Without outputs there is nothing to do; without inputs y is activation(bias) + residual and x is 0. */
static void test_no_features(void) {
    static operands o, before;
    static int32_t no_blocks[ROWS + COLS + 1];
    for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op)
        for (int no_inputs = 0; no_inputs < 2; ++no_inputs) {
            init_operands(&o, op, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
            o.pattern.nnz = 0;
            o.pattern.row_ptr = o.pattern.col_ptr = no_blocks;
            *(no_inputs ? &o.pattern.in_features : &o.pattern.out_features) = 0;
            if (op == TS_DDS_NT) {
                o.desc.bias = o.memory[3];
                o.desc.activation = TS_RELU;
                give_residual(&o);
            }
            before = o;
            SUCCEEDS(run(&o));
            for (int64_t t = 0; t < TOKENS; ++t) {
                for (int64_t n = 0; op == TS_DDS_NT && no_inputs && n < OUT; ++n) {
                    const double bias = get(&o, 3, n), added = get(&o, 4, at(&o.desc.residual, t, n));
                    CHECK(y_at(&o, t, n) == (bias > 0 ? bias : 0) + added, "y[%d, %d] is %g", (int)t, (int)n,
                          y_at(&o, t, n));
                }
                for (int64_t k = 0; op == TS_DDS_NN && !no_inputs && k < IN; ++k)
                    CHECK(x_at(&o, t, k) == 0, "x[%d, %d] is %g", (int)t, (int)k, x_at(&o, t, k));
            }
            if (op == TS_SDD_TN || no_inputs == (op == TS_DDS_NN))
                CHECK(memcmp(before.memory, o.memory, sizeof o.memory) == 0, "op %d: written", (int)op);
        }
}

/* --- Bad descriptors ------------------------------------------------------------------------------- */

/* After `change` the product fails with that status, its text mentions a word, and nothing is written. */
#define REFUSES(op_, change, expected, mention)                                               \
    do {                                                                                      \
        static operands o, before;                                                            \
        init_operands(&o, (op_), TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);                     \
        change;                                                                               \
        before = o;                                                                           \
        static double workspace[1 << 16];                                                     \
        FAILS(ts_matmul(&o.desc, workspace, sizeof workspace, NULL), expected, mention);      \
        CHECK(memcmp(before.memory, o.memory, sizeof o.memory) == 0, "%s: written", #change); \
    } while (0)

static void test_bad_gradients_of_activations(void) {
    static float z[16 * 16], workspace[64];
    size_t bytes = 0;
    FAILS(ts_activation_gradient_workspace_size(TS_FLOAT32, 4, 16, NULL), TS_INVALID_ARGUMENT, "bytes");
    FAILS(ts_activation_gradient_workspace_size(TS_FLOAT64, 4, 16, &bytes), TS_UNSUPPORTED, "dtype is 0");
    FAILS(ts_activation_gradient_workspace_size(TS_INT8, 4, 16, &bytes), TS_INVALID_ARGUMENT, "dtype is 4");
    FAILS(ts_activation_gradient_workspace_size(TS_FLOAT32, -1, 16, &bytes), TS_INVALID_ARGUMENT, "tokens");
    FAILS(ts_activation_gradient_workspace_size(TS_FLOAT32, 4, 24, &bytes), TS_INVALID_ARGUMENT, "features");
    FAILS(ts_activation_gradient(TS_FLOAT32, TS_NO_ACTIVATION, 4, 16, z, z + 64, z + 64, z + 128, workspace,
                                 sizeof workspace, NULL),
          TS_INVALID_ARGUMENT, "activation is 0; allowed are 1 to 3");
    FAILS(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, NULL, z + 64, z + 64, z + 128, workspace,
                                 sizeof workspace, NULL),
          TS_INVALID_ARGUMENT, "z is null");
    FAILS(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, z, z + 64, z + 65, z + 128, workspace,
                                 sizeof workspace, NULL),
          TS_INVALID_ARGUMENT, "result is at address");
    FAILS(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, z, z + 64, z, z + 128, workspace,
                                 sizeof workspace, NULL),
          TS_INVALID_ARGUMENT, "z and result overlap");
    FAILS(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, z, z + 64, z + 64, NULL, workspace,
                                 sizeof workspace, NULL),
          TS_INVALID_ARGUMENT, "bias_gradient is null");
    FAILS(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, z, z + 64, z + 64, z + 100, workspace,
                                 sizeof workspace, NULL),
          TS_INVALID_ARGUMENT, "gradient and bias_gradient overlap");
    const int64_t most = (INT64_C(1) << 31) - (1 << 16), many = INT64_C(1) << 30;
    FAILS(ts_activation_gradient_workspace_size(TS_FLOAT32, most + 1, 16, &bytes), TS_INVALID_ARGUMENT,
          "tokens is 2147418113; allowed are 0 to 2147418112 on a CUDA device");
    FAILS(ts_activation_gradient_workspace_size(TS_FLOAT32, 4, most + 16, &bytes), TS_INVALID_ARGUMENT,
          "features is 2147418128");
    FAILS(ts_activation_gradient_workspace_size(TS_FLOAT32, most, most, &bytes), TS_INVALID_ARGUMENT,
          "z has 2147418112 tokens of 2147418112 features; at most 140737488355328 elements are allowed");
    FAILS(ts_activation_gradient(TS_FLOAT32, TS_GELU, most, most, z, z + 64, z + 64, z + 128, workspace,
                                 sizeof workspace, NULL),
          TS_INVALID_ARGUMENT, "elements");
    FAILS(ts_activation_gradient(TS_FLOAT32, TS_GELU, many, 4096, z, z, z, z + 128, workspace,
                                 sizeof workspace, NULL),
          TS_INVALID_ARGUMENT, "z has 17592186044416 bytes; at most 4398046511104");
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) != TS_SUCCESS) return;
    static _Alignas(256) float scratch[1 << 16]; /* refused before the device sees any of this */
    for (int operand = 0; operand < 4; ++operand) {
        float* operands[] = {z, z + 64, z + 128, z + 192};
        operands[operand] = scratch + 16;
        FAILS(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, operands[0], operands[1], operands[2],
                                     operands[3], scratch, sizeof scratch, NULL),
              TS_INVALID_ARGUMENT, "and workspace overlap");
    }
}

static void test_bad_gates(void) {
    static _Alignas(256) float memory[4][64];
    ts_matrix gate = {memory[0], 16, TS_ROW_MAJOR, 0}, factor = {memory[1], 16, TS_ROW_MAJOR, 0};
    ts_matrix of_result = {memory[2], 16, TS_ROW_MAJOR, 0}, of_gate = {memory[3], 32, TS_ROW_MAJOR, 0};
    ts_matrix of_factor = {memory[3] + 16, 32, TS_ROW_MAJOR, 0}, other;
#define GATE(dtype, activation, ...) ts_gate(dtype, activation, 2, 16, __VA_ARGS__, NULL)
#define GRADIENT(...) ts_gate_gradient(TS_FLOAT32, TS_SILU, 2, 16, __VA_ARGS__, NULL)
    FAILS(ts_gate(TS_FLOAT32, TS_SILU, -1, 16, &gate, &factor, &of_result, NULL), TS_INVALID_ARGUMENT,
          "tokens is -1");
    FAILS(ts_gate(TS_FLOAT32, TS_SILU, 2, 24, &gate, &factor, &of_result, NULL), TS_INVALID_ARGUMENT,
          "features is 24");
    FAILS(GATE(TS_FLOAT64, TS_SILU, &gate, &factor, &of_result), TS_UNSUPPORTED, "dtype is 0");
    FAILS(GATE(TS_INT8, TS_SILU, &gate, &factor, &of_result), TS_INVALID_ARGUMENT, "dtype is 4");
    FAILS(GATE(TS_FLOAT32, 4, &gate, &factor, &of_result), TS_INVALID_ARGUMENT, "activation is 4");
    FAILS(GATE(TS_FLOAT32, -1, &gate, &factor, &of_result), TS_INVALID_ARGUMENT, "activation is -1");
    FAILS(GATE(TS_FLOAT32, TS_SILU, NULL, &factor, &of_result), TS_INVALID_ARGUMENT, "gate is null");
    FAILS(GATE(TS_FLOAT32, TS_SILU, &gate, &factor, &factor), TS_INVALID_ARGUMENT,
          "factor and result overlap");
    other = gate, other.data = NULL;
    FAILS(GATE(TS_FLOAT32, TS_SILU, &gate, &other, &of_result), TS_INVALID_ARGUMENT, "factor.data is null");
    other = gate, other.ld = 8;
    FAILS(GATE(TS_FLOAT32, TS_SILU, &other, &factor, &of_result), TS_INVALID_ARGUMENT, "gate.ld is 8");
    other = gate, other.ld = 17;
    FAILS(GATE(TS_FLOAT32, TS_SILU, &other, &factor, &of_result), TS_INVALID_ARGUMENT, "gate.ld is 17");
    other = gate, other.layout = TS_FEATURE_MAJOR;
    FAILS(GATE(TS_FLOAT32, TS_SILU, &gate, &factor, &other), TS_INVALID_ARGUMENT, "result.layout is 1");
    other = gate, other.data = memory[0] + 1;
    FAILS(GATE(TS_FLOAT32, TS_SILU, &other, &factor, &of_result), TS_INVALID_ARGUMENT, "gate is at address");
    FAILS(GRADIENT(&gate, &factor, &of_result, &of_gate, NULL), TS_INVALID_ARGUMENT,
          "factor_gradient is null");
    FAILS(GRADIENT(&gate, &factor, &of_result, &gate, &of_factor), TS_INVALID_ARGUMENT,
          "gate and gate_gradient overlap");
    FAILS(GRADIENT(&gate, &factor, &of_result, &of_gate, &of_gate), TS_INVALID_ARGUMENT,
          "gate_gradient and factor_gradient overlap");
#undef GATE
#undef GRADIENT
}

static void test_bad_descriptors(void) {
    FAILS(ts_matmul(NULL, NULL, 0, NULL), TS_INVALID_ARGUMENT, "desc");
    REFUSES(TS_DDS_NT, o.desc.struct_size = 0, TS_INVALID_ARGUMENT, "struct_size");
    REFUSES(TS_DDS_NT, o.desc.struct_size = 8, TS_INVALID_ARGUMENT, "struct_size");
    REFUSES(TS_DDS_NT, o.desc.op = 3, TS_INVALID_ARGUMENT, "op");
    REFUSES(TS_DDS_NT, o.desc.op = -1, TS_INVALID_ARGUMENT, "op");
    REFUSES(TS_DDS_NT, o.desc.dtype = 4, TS_INVALID_ARGUMENT, "dtype");
    REFUSES(TS_DDS_NT, o.desc.device = 2, TS_INVALID_ARGUMENT, "device");
    REFUSES(TS_DDS_NT, o.desc.storage = 2, TS_INVALID_ARGUMENT, "storage is 2; allowed are 0 to 1");
    REFUSES(TS_DDS_NT, o.desc.activation = 4, TS_INVALID_ARGUMENT, "activation");
    REFUSES(TS_DDS_NT, o.desc.precision = 2, TS_INVALID_ARGUMENT, "precision");
    REFUSES(TS_DDS_NT, o.desc.accumulate = 2, TS_INVALID_ARGUMENT, "accumulate");
    REFUSES(TS_DDS_NT, o.desc.reserved = 1, TS_INVALID_ARGUMENT, "reserved");
    REFUSES(TS_DDS_NT, o.desc.kernel = -1, TS_INVALID_ARGUMENT, "kernel");
    REFUSES(TS_DDS_NT, o.desc.tokens = -1, TS_INVALID_ARGUMENT, "tokens");
    REFUSES(TS_DDS_NT, o.desc.tokens = INT64_MAX, TS_INVALID_ARGUMENT, "tokens");
    REFUSES(TS_DDS_NT, o.desc.accumulate = 1, TS_INVALID_ARGUMENT, "accumulate");
    REFUSES(TS_DDS_NN, o.desc.activation = TS_RELU, TS_INVALID_ARGUMENT, "activation");
    REFUSES(TS_SDD_TN, o.desc.bias = o.memory[3], TS_INVALID_ARGUMENT, "bias");
    REFUSES(TS_DDS_NT, o.desc.x.layout = 2, TS_INVALID_ARGUMENT, "x.layout");
    REFUSES(TS_DDS_NT, o.desc.y.layout = -1, TS_INVALID_ARGUMENT, "y.layout");
    REFUSES(TS_DDS_NT, o.desc.residual.layout = 2, TS_INVALID_ARGUMENT, "residual.layout");
    REFUSES(TS_DDS_NT, o.desc.residual.reserved = 1, TS_INVALID_ARGUMENT, "residual.reserved");
    REFUSES(TS_DDS_NN, o.desc.residual.data = o.memory[4], TS_INVALID_ARGUMENT, "residual");
    REFUSES(TS_SDD_TN, o.desc.residual.data = o.memory[4], TS_INVALID_ARGUMENT, "residual");
    REFUSES(TS_DDS_NT, (give_gate(&o), o.desc.gate.layout = TS_FEATURE_MAJOR), TS_INVALID_ARGUMENT,
            "gate.layout is 1; it must be y.layout, 0");
    REFUSES(TS_DDS_NT, o.desc.gate.reserved = 1, TS_INVALID_ARGUMENT, "gate.reserved");
    REFUSES(TS_DDS_NN, o.desc.gate.data = o.memory[4], TS_INVALID_ARGUMENT, "gate is given; only dds_nt");
    REFUSES(TS_SDD_TN, o.desc.gate.data = o.memory[4], TS_INVALID_ARGUMENT, "gate is given; only dds_nt");
    REFUSES(TS_DDS_NN, o.desc.bias_gradient = o.memory[3], TS_INVALID_ARGUMENT, "bias_gradient is given");
    REFUSES(TS_SDD_TN, o.desc.accumulate_bias = 1, TS_INVALID_ARGUMENT, "bias_gradient is null");
    REFUSES(TS_SDD_TN, o.desc.bias_gradient_dtype = 1, TS_INVALID_ARGUMENT, "bias_gradient is null");
    REFUSES(TS_SDD_TN, give_bias_gradient(&o, 2), TS_INVALID_ARGUMENT, "accumulate_bias is 2");
    REFUSES(TS_SDD_TN, (give_bias_gradient(&o, 0), o.desc.bias_gradient_dtype = TS_FLOAT64 + 1 + 2),
            TS_INVALID_ARGUMENT, "bias_gradient_dtype stands for float16");
    REFUSES(TS_SDD_TN, o.desc.bias_gradient = o.desc.values, TS_INVALID_ARGUMENT,
            "values and bias_gradient overlap");
    REFUSES(TS_SDD_TN, o.desc.bias_gradient = o.desc.y.data, TS_INVALID_ARGUMENT,
            "y and bias_gradient overlap");
    REFUSES(TS_DDS_NT, (give_gate(&o), give_residual(&o)), TS_INVALID_ARGUMENT,
            "gate is given beside residual");
    REFUSES(TS_DDS_NT, o.desc.values_dtype = 7, TS_INVALID_ARGUMENT, "values_dtype is 7; allowed are 0 to 6");
    REFUSES(TS_DDS_NT, o.desc.values_dtype = -1, TS_INVALID_ARGUMENT, "values_dtype");
    REFUSES(TS_DDS_NT, o.desc.result_dtype = 5, TS_INVALID_ARGUMENT, "result_dtype");
    REFUSES(TS_SDD_TN, o.desc.result_dtype = TS_FLOAT16 + 1, TS_INVALID_ARGUMENT, "result_dtype");
    REFUSES(TS_DDS_NT, o.desc.policy = 3, TS_INVALID_ARGUMENT, "policy");
}

/* The activations' dtype by its own number is what 0 stands for. */
static void test_own_dtypes(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.desc.values_dtype = o.desc.result_dtype = TS_FLOAT32 + 1;
    SUCCEEDS(run(&o));
    check_forward(&o);
}

/* --- Versions of the header: structures shorter and longer than the library's -------------------------- */

static void test_short_structures(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.desc.struct_size = FIRST_MATMUL_DESC; /* what lies behind belongs to something else */
    memset((char*)&o.desc + FIRST_MATMUL_DESC, 0xa5, sizeof o.desc - FIRST_MATMUL_DESC);
    SUCCEEDS(run(&o));
    o.desc.gate.data = NULL; /* there is none for the library */
    check_forward(&o);
    REFUSES(TS_DDS_NT, o.desc.struct_size = FIRST_MATMUL_DESC - 1, TS_INVALID_ARGUMENT,
            "desc.struct_size is 159; allowed are 160");

    ts_kernel_info info;
    memset(&info, 0xa5, sizeof info);
    info.struct_size = FIRST_KERNEL_INFO;
    SUCCEEDS(ts_kernel_get(0, &info));
    CHECK(info.struct_size == FIRST_KERNEL_INFO && strncmp(info.name, "cpu", 3) == 0, "%s", info.name);
    for (size_t i = FIRST_KERNEL_INFO; i < sizeof info; ++i)
        CHECK(((unsigned char*)&info)[i] == 0xa5, "byte %d, which the caller does not know, was written",
              (int)i);
}

static void test_long_structures(void) {
    static operands o;
    static struct {
        ts_matmul_desc known;
        unsigned char unknown[40];
    } desc;
    static struct {
        ts_pattern known;
        unsigned char unknown[24];
    } pattern;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    desc.known = o.desc;
    desc.known.struct_size = sizeof desc;
    pattern.known = o.pattern;
    pattern.known.struct_size = sizeof pattern;
    desc.known.pattern = &pattern.known;
    size_t bytes = 0;
    SUCCEEDS(ts_matmul_workspace_size(&desc.known, &bytes));
    void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
    SUCCEEDS(ts_matmul(&desc.known, workspace, bytes, NULL));
    free(workspace);
    check_forward(&o);
    pattern.unknown[23] = 1;
    FAILS(ts_matmul_workspace_size(&desc.known, &bytes), TS_INVALID_ARGUMENT, "byte 111 of pattern is not 0");
    pattern.unknown[23] = 0;
    desc.unknown[0] = 1;
    FAILS(ts_matmul_workspace_size(&desc.known, &bytes), TS_INVALID_ARGUMENT, "byte 328 of desc is not 0");
    desc.known.struct_size = UINT32_MAX;
    FAILS(ts_matmul_workspace_size(&desc.known, &bytes), TS_INVALID_ARGUMENT, "desc.struct_size");

    struct {
        ts_device_info known;
        unsigned char unknown[8];
    } device = {{.struct_size = sizeof device}, {1, 2, 3, 4, 5, 6, 7, 8}};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &device.known));
    CHECK(device.known.struct_size == sizeof device && device.known.multiprocessors > 0, "size or content");
    for (int i = 0; i < 8; ++i) CHECK(device.unknown[i] == 0, "byte %d behind the known ones", i);
}

static void test_bad_operands(void) {
    REFUSES(TS_DDS_NT, o.desc.x.data = NULL, TS_INVALID_ARGUMENT, "x");
    REFUSES(TS_DDS_NT, o.desc.y.data = NULL, TS_INVALID_ARGUMENT, "y");
    REFUSES(TS_DDS_NT, o.desc.values = NULL, TS_INVALID_ARGUMENT, "values");
    REFUSES(TS_DDS_NT, o.desc.x.ld = IN - 1, TS_INVALID_ARGUMENT, "x.ld");
    REFUSES(TS_DDS_NT, o.desc.y.ld = OUT - 1, TS_INVALID_ARGUMENT, "y.ld");
    REFUSES(TS_DDS_NT, o.desc.x.ld = INT64_MAX, TS_INVALID_ARGUMENT, "x.ld");
    REFUSES(TS_DDS_NT, o.desc.x.data = (char*)o.memory[0] + 1, TS_INVALID_ARGUMENT, "x");
    REFUSES(TS_DDS_NT, o.desc.x.data = o.desc.y.data, TS_INVALID_ARGUMENT, "overlap");
    REFUSES(TS_DDS_NN, o.desc.x.data = o.desc.values, TS_INVALID_ARGUMENT, "overlap");
    REFUSES(TS_SDD_TN, o.desc.values = o.desc.y.data, TS_INVALID_ARGUMENT, "overlap");
    REFUSES(TS_DDS_NT, o.desc.bias = o.desc.y.data, TS_INVALID_ARGUMENT, "overlap");
    REFUSES(TS_DDS_NT, (give_residual(&o), o.desc.residual.layout = TS_FEATURE_MAJOR), TS_INVALID_ARGUMENT,
            "residual.layout is 1; it must be y.layout, 0");
    REFUSES(TS_DDS_NT, (give_residual(&o), o.desc.residual.ld = OUT - 1), TS_INVALID_ARGUMENT, "residual.ld");
    REFUSES(TS_DDS_NT, (give_residual(&o), o.desc.residual.data = (char*)o.memory[4] + 1),
            TS_INVALID_ARGUMENT, "residual is at address");
    REFUSES(TS_DDS_NT, (give_residual(&o), o.desc.residual.data = o.desc.y.data), TS_INVALID_ARGUMENT,
            "y and residual overlap");
    REFUSES(TS_DDS_NT, (give_gate(&o), o.desc.gate.ld = OUT - 1), TS_INVALID_ARGUMENT, "gate.ld");
    REFUSES(TS_DDS_NT, (give_gate(&o), o.desc.gate.data = o.desc.y.data), TS_INVALID_ARGUMENT,
            "y and gate overlap");
    REFUSES(TS_DDS_NT, o.desc.bias = (char*)o.memory[3] + 2, TS_INVALID_ARGUMENT, "bias is at address");
    REFUSES(TS_DDS_NT, (o.desc.packed = o.desc.y.data, o.desc.packed_bytes = 4), TS_INVALID_ARGUMENT,
            "y and packed overlap");
    REFUSES(TS_DDS_NT, (o.desc.plan = o.desc.y.data, o.desc.plan_bytes = 4), TS_INVALID_ARGUMENT,
            "y and plan overlap");
    REFUSES(TS_DDS_NT, (o.desc.packed = o.memory[3], o.desc.packed_bytes = SIZE_MAX), TS_INVALID_ARGUMENT,
            "packed has");
    REFUSES(TS_DDS_NT,
            (o.desc.tokens = INT32_MAX, o.pattern.in_features = INT32_MAX / BK * BK, o.desc.x.ld = INT32_MAX),
            TS_INVALID_ARGUMENT, "x has 2147483647 tokens");
    REFUSES(TS_DDS_NT, (o.desc.tokens = INT32_MAX, o.desc.dtype = TS_FLOAT64, o.desc.x.ld = INT32_MAX),
            TS_INVALID_ARGUMENT, "x.ld");
    REFUSES(TS_DDS_NT, (o.desc.tokens = 1 << 24, o.desc.x.data = (void*)(UINTPTR_MAX - 15)),
            TS_INVALID_ARGUMENT, "x has");
    REFUSES(
        TS_DDS_NT,
        (o.desc.device = TS_CUDA, o.desc.plan = (char*)o.memory[3] + 8, o.desc.x.ld = IN, o.desc.y.ld = OUT),
        TS_INVALID_ARGUMENT, "plan is at address");
    REFUSES(TS_DDS_NT,
            (o.desc.device = TS_CUDA, o.desc.packed = (char*)0x1010, o.desc.x.ld = IN, o.desc.y.ld = OUT),
            TS_INVALID_ARGUMENT, "packed is at address");
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.desc.tokens = INT32_MAX), TS_INVALID_ARGUMENT,
            "tokens is 2147483647; allowed are 0 to 2147418112 on a CUDA device");
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.pattern.out_features = INT32_MAX / BN * BN),
            TS_INVALID_ARGUMENT, "pattern.out_features is");
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.desc.tokens = 1 << 20, o.desc.x.ld = 1 << 24),
            TS_INVALID_ARGUMENT, "bytes; at most 4398046511104 are allowed on a CUDA device");
    /* On CUDA 16 bytes of alignment are asked for; this is found before any device is looked for. */
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.desc.x.data = (char*)o.memory[0] + 4), TS_INVALID_ARGUMENT,
            "x");
}

static void test_bad_pattern_descriptors(void) {
    REFUSES(TS_DDS_NT, o.desc.pattern = NULL, TS_INVALID_ARGUMENT, "pattern");
    REFUSES(TS_DDS_NT, o.pattern.struct_size = 1, TS_INVALID_ARGUMENT, "struct_size");
    REFUSES(TS_DDS_NT, o.pattern.block_rows = 24, TS_INVALID_ARGUMENT, "block_rows");
    REFUSES(TS_DDS_NT, o.pattern.block_cols = 0, TS_INVALID_ARGUMENT, "block_cols");
    REFUSES(TS_DDS_NT, o.pattern.reserved = 1, TS_INVALID_ARGUMENT, "reserved");
    REFUSES(TS_DDS_NT, o.pattern.out_features = OUT + 1, TS_INVALID_ARGUMENT, "out_features");
    REFUSES(TS_DDS_NT, o.pattern.in_features = -BK, TS_INVALID_ARGUMENT, "in_features");
    REFUSES(TS_DDS_NT, o.pattern.nnz = ROWS * COLS + 1, TS_INVALID_ARGUMENT, "nnz");
    REFUSES(TS_DDS_NT, o.pattern.nnz = -1, TS_INVALID_ARGUMENT, "nnz");
    REFUSES(TS_DDS_NT, o.desc.pattern = (ts_pattern*)((char*)&o.pattern + 1), TS_INVALID_ARGUMENT,
            "pattern is at address");
}

/* Kernels of the CPU read the pattern's arrays, those by column for dds_nn. */
static void test_missing_arrays(void) {
    REFUSES(TS_DDS_NT, o.pattern.row_ptr = NULL, TS_INVALID_ARGUMENT, "pattern.row_ptr is null");
    REFUSES(TS_DDS_NT, o.pattern.col_idx = NULL, TS_INVALID_ARGUMENT, "pattern.col_idx is null");
    REFUSES(TS_DDS_NT, o.pattern.row_slot = NULL, TS_INVALID_ARGUMENT, "pattern.row_slot is null");
    REFUSES(TS_SDD_TN, o.pattern.row_ptr = NULL, TS_INVALID_ARGUMENT, "pattern.row_ptr is null");
    REFUSES(TS_SDD_TN, o.pattern.row_slot = NULL, TS_INVALID_ARGUMENT, "pattern.row_slot is null");
    REFUSES(TS_DDS_NN, o.pattern.col_ptr = NULL, TS_INVALID_ARGUMENT, "pattern.col_ptr is null");
    REFUSES(TS_DDS_NN, o.pattern.row_idx = NULL, TS_INVALID_ARGUMENT, "pattern.row_idx is null");
    REFUSES(TS_DDS_NN, o.pattern.col_slot = NULL, TS_INVALID_ARGUMENT, "pattern.col_slot is null");
    REFUSES(TS_DDS_NT, o.pattern.row_ptr = (int32_t*)((char*)row_ptr + 2), TS_INVALID_ARGUMENT,
            "pattern.row_ptr is at address");
}

/* Arrays that lead out of the weight or the values. */
static void test_wild_arrays(void) {
    static int32_t wild[4];
    for (int i = 0; i < 4; ++i) wild[i] = INT32_MAX - i;
    REFUSES(TS_DDS_NT, o.pattern.row_ptr = wild, TS_INVALID_PATTERN, "row_ptr");
    static int32_t crowded[ROWS + 1] = {0, NNZ, NNZ, NNZ}; /* a row with more blocks than columns */
    REFUSES(TS_DDS_NT, o.pattern.row_ptr = crowded, TS_INVALID_PATTERN, "row_ptr");
    REFUSES(TS_DDS_NT, o.pattern.col_idx = wild, TS_INVALID_PATTERN, "col_idx has the entry 2147483647");
    REFUSES(TS_SDD_TN, o.pattern.row_slot = wild, TS_INVALID_PATTERN, "row_slot");
    REFUSES(TS_DDS_NN, o.pattern.col_ptr = wild, TS_INVALID_PATTERN, "col_ptr");
    REFUSES(TS_DDS_NN, o.pattern.row_idx = wild, TS_INVALID_PATTERN, "row_idx");
    wild[0] = -1;
    REFUSES(TS_DDS_NN, o.pattern.col_slot = wild, TS_INVALID_PATTERN, "col_slot");
}

/* A workspace of one byte less than asked for. */
static void test_small_workspace(void) {
    static operands o, before;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    FAILS(ts_matmul_workspace_size(NULL, NULL), TS_INVALID_ARGUMENT, "desc");
    FAILS(ts_matmul_workspace_size(&o.desc, NULL), TS_INVALID_ARGUMENT, "bytes");
    for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op) {
        init_operands(&o, op, TS_FLOAT32, TS_FEATURE_MAJOR, TS_FEATURE_MAJOR);
        size_t bytes = 0;
        SUCCEEDS(ts_matmul_workspace_size(&o.desc, &bytes));
        if (bytes == 0) continue;
        before = o;
        void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
        FAILS(ts_matmul(&o.desc, workspace, bytes - 1, NULL), TS_WORKSPACE_TOO_SMALL, "workspace_bytes");
        FAILS(ts_matmul(&o.desc, NULL, bytes, NULL), TS_INVALID_ARGUMENT, "workspace");
        CHECK(memcmp(before.memory, o.memory, sizeof o.memory) == 0, "op %d: written", (int)op);
        free(workspace);
    }
}

/* Scratch memory is written, and so is nothing that is read. */
static void test_overlapping_workspace(void) {
    static _Alignas(256) char workspace[1 << 19];
    static operands o;
    for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op) {
        size_t bytes = 0;
        for (int which = 0; which < 4; ++which) {
            init_operands(&o, op, TS_FLOAT32, TS_FEATURE_MAJOR, TS_FEATURE_MAJOR);
            SUCCEEDS(ts_matmul_workspace_size(&o.desc, &bytes));
            if (which == 0) o.desc.x.data = workspace;
            if (which == 1) o.desc.y.data = workspace;
            if (which == 2) o.desc.values = workspace;
            if (which == 3)
                *(op == TS_DDS_NN ? &o.pattern.row_idx : &o.pattern.col_idx) =
                    memcpy(workspace, op == TS_DDS_NN ? o.pattern.row_idx : o.pattern.col_idx,
                           (size_t)o.pattern.nnz * sizeof(int32_t));
            if (bytes == 0)
                SUCCEEDS(ts_matmul(&o.desc, workspace, sizeof workspace, NULL));
            else
                FAILS(ts_matmul(&o.desc, workspace, sizeof workspace, NULL), TS_INVALID_ARGUMENT,
                      "and workspace overlap in memory");
        }
    }
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.pattern.row_ptr = memcpy(o.desc.y.data, o.pattern.row_ptr, (OUT / BN + 1) * sizeof(int32_t));
    FAILS(ts_matmul(&o.desc, workspace, sizeof workspace, NULL), TS_INVALID_ARGUMENT,
          "pattern.row_ptr and y overlap in memory");
}

/* --- Patterns --------------------------------------------------------------------------------------- */

static void test_pattern_validate(void) {
    ts_pattern pattern = layer_pattern();
    SUCCEEDS(ts_pattern_validate(&pattern));
    pattern.col_ptr = pattern.row_idx = pattern.col_slot = NULL;
    SUCCEEDS(ts_pattern_validate(&pattern));
    FAILS(ts_pattern_validate(NULL), TS_INVALID_ARGUMENT, "pattern");
    pattern.row_ptr = NULL;
    FAILS(ts_pattern_validate(&pattern), TS_INVALID_ARGUMENT, "row_ptr");
}

/* With one number of one array changed, the pattern breaks an invariant. */
static void check_broken(int32_t* array, int index, int32_t value, const char* mention) {
    const ts_pattern pattern = layer_pattern();
    const int32_t saved = array[index];
    array[index] = value;
    FAILS(ts_pattern_validate(&pattern), TS_INVALID_PATTERN, mention);
    array[index] = saved;
}

static void test_broken_patterns(void) {
    check_broken(row_ptr, 0, 1, "row_ptr");         /* does not begin at 0 */
    check_broken(row_ptr, 1, 3, "row_ptr");         /* descends */
    check_broken(row_ptr, 1, INT32_MAX, "row_ptr"); /* out of the arrays */
    check_broken(row_ptr, 1, -1, "row_ptr");
    check_broken(row_ptr, ROWS, NNZ - 1, "row_ptr"); /* does not end at nnz */
    check_broken(col_idx, 1, COLS, "col_idx");       /* out of range */
    check_broken(col_idx, 0, -1, "col_idx");
    check_broken(col_idx, 0, 1, "col_idx"); /* duplicate */
    check_broken(row_slot, 0, NNZ, "slot"); /* out of range */
    check_broken(row_slot, 0, -1, "slot");
    check_broken(row_slot, 0, 1, "slot");   /* used twice */
    check_broken(col_ptr, 1, 2, "col_ptr"); /* not the transpose */
    check_broken(row_idx, 1, 1, "row_idx");
    check_broken(col_slot, 1, 1, "col_slot");
}

static void test_pattern_transpose(void) {
    ts_pattern pattern = layer_pattern();
    pattern.col_ptr = pattern.row_idx = pattern.col_slot = NULL;
    int32_t made_ptr[COLS + 1], made_idx[NNZ], made_slot[NNZ];
    SUCCEEDS(ts_pattern_transpose(&pattern, made_ptr, made_idx, made_slot));
    CHECK(memcmp(made_ptr, col_ptr, sizeof col_ptr) == 0, "col_ptr differs");
    CHECK(memcmp(made_idx, row_idx, sizeof row_idx) == 0, "row_idx differs");
    CHECK(memcmp(made_slot, col_slot, sizeof col_slot) == 0, "col_slot differs");
    FAILS(ts_pattern_transpose(NULL, made_ptr, made_idx, made_slot), TS_INVALID_ARGUMENT, "pattern");
    FAILS(ts_pattern_transpose(&pattern, NULL, made_idx, made_slot), TS_INVALID_ARGUMENT, "col_ptr");
    FAILS(ts_pattern_transpose(&pattern, made_ptr, NULL, made_slot), TS_INVALID_ARGUMENT, "row_idx");
    FAILS(ts_pattern_transpose(&pattern, made_ptr, made_idx, NULL), TS_INVALID_ARGUMENT, "col_slot");
    FAILS(ts_pattern_transpose(&pattern, made_ptr, col_idx, made_slot), TS_INVALID_ARGUMENT,
          "row_idx and pattern.col_idx overlap");
    FAILS(ts_pattern_transpose(&pattern, made_ptr, made_idx, made_idx + 1), TS_INVALID_ARGUMENT, "overlap");
    FAILS(ts_pattern_transpose(&pattern, (int32_t*)((char*)made_ptr + 1), made_idx, made_slot),
          TS_INVALID_ARGUMENT, "col_ptr is at address");
    col_idx[1] = COLS;
    made_ptr[0] = -7;
    FAILS(ts_pattern_transpose(&pattern, made_ptr, made_idx, made_slot), TS_INVALID_PATTERN, "col_idx");
    CHECK(made_ptr[0] == -7, "col_ptr was written");
    col_idx[1] = 1;
}

/* --- The library, its kernels, devices and plans ------------------------------------------------------ */

static void test_identity(void) {
    CHECK(strcmp(ts_version(), TS_VERSION) == 0, "%s", ts_version());
    CHECK(ts_abi_version() == TS_ABI_VERSION, "%d", (int)ts_abi_version());
    CHECK(strncmp(ts_architectures(), "cpu", 3) == 0, "%s", ts_architectures());
    for (ts_status_t a = TS_SUCCESS; a <= TS_INTERNAL_ERROR + 1; ++a)
        for (ts_status_t b = TS_SUCCESS; b < a; ++b)
            CHECK(strcmp(ts_status_string(a), ts_status_string(b)) != 0, "%d and %d", (int)a, (int)b);
    CHECK(ts_status_string(-1) != NULL, "an unknown status has no text");
}

static void test_kernels(void) {
    ts_kernel_info info = {.struct_size = sizeof info}, other = {.struct_size = sizeof other};
    CHECK(ts_kernel_count() > 0, "the library has no kernel");
    for (int32_t i = 0; i < ts_kernel_count(); ++i) {
        SUCCEEDS(ts_kernel_get(i, &info));
        CHECK(info.name[0] != '\0' && info.ops != 0 && info.dtypes != 0 && info.storages != 0,
              "kernel %d computes nothing", (int)i);
        for (int32_t j = 0; j < i; ++j) {
            SUCCEEDS(ts_kernel_get(j, &other));
            CHECK(strcmp(info.name, other.name) != 0, "two kernels are named %s", info.name);
        }
    }
    FAILS(ts_kernel_get(0, NULL), TS_INVALID_ARGUMENT, "info");
    FAILS(ts_kernel_get(-1, &info), TS_INVALID_ARGUMENT, "kernel");
    FAILS(ts_kernel_get(ts_kernel_count(), &info), TS_INVALID_ARGUMENT, "kernel");
    info.struct_size = FIRST_KERNEL_INFO - 1;
    FAILS(ts_kernel_get(0, &info), TS_INVALID_ARGUMENT, "struct_size");
}

static void test_devices(void) {
    ts_device_info info = {.struct_size = sizeof info};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &info));
    CHECK(info.device == TS_CPU && info.multiprocessors > 0 && info.name[0] != '\0', "%s", info.name);
    CHECK(info.max_cluster == 0, "%d", (int)info.max_cluster);
    ts_device_info gpu = {.struct_size = sizeof gpu};
    if (strstr(ts_architectures(), "sm_90") != NULL && ts_device_get(TS_CUDA, -1, &gpu) == TS_SUCCESS) {
        const int has_clusters = gpu.compute_capability == 90;
        CHECK(has_clusters == (gpu.max_cluster > 0), "%s: %d", gpu.name, (int)gpu.max_cluster);
    }
    FAILS(ts_device_get(TS_CPU, -1, NULL), TS_INVALID_ARGUMENT, "info");
    FAILS(ts_device_get(2, -1, &info), TS_INVALID_ARGUMENT, "device");
    CHECK(ts_device_get(TS_CUDA, 1000, &info) != TS_SUCCESS, "there is a device 1000");
    info.struct_size = 0;
    FAILS(ts_device_get(TS_CPU, -1, &info), TS_INVALID_ARGUMENT, "struct_size");
}

/* Without a device, a product on it says so and the library stays usable. */
static void test_absent_device(void) {
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS) return;
    FAILS(ts_device_get(TS_CUDA, -1, &info), TS_NO_DEVICE, "CUDA");
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.desc.x.ld = IN, o.desc.y.ld = OUT), TS_NO_DEVICE, "CUDA");
}

static ts_device_info h100(void) {
    return (ts_device_info){.struct_size = sizeof(ts_device_info),
                            .device = TS_CUDA,
                            .compute_capability = 90,
                            .multiprocessors = 132,
                            .shared_memory = 232448};
}

/* Kernels are chosen from numbers alone: also for GPUs this machine does not have. */
static void test_select(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    int32_t kernel = -1;
    char reason[256] = "";
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, reason, sizeof reason));
    CHECK(kernel >= 0 && kernel < ts_kernel_count(), "kernel %d", (int)kernel);
    CHECK(reason[0] != '\0', "no reason is given");
    char shortened[5] = "~~~~";
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, shortened, 4));
    CHECK(strncmp(shortened, reason, 3) == 0 && shortened[3] == '\0', "%s", shortened);
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, NULL, 0));
    char whole[256]; /* no more is written than the text, whatever room there is said to be */
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, whole, SIZE_MAX));
    CHECK(strcmp(whole, reason) == 0, "%s", whole);
    FAILS(ts_matmul_select(NULL, &cpu, &kernel, NULL, 0), TS_INVALID_ARGUMENT, "desc");
    FAILS(ts_matmul_select(&o.desc, NULL, &kernel, NULL, 0), TS_INVALID_ARGUMENT, "device");
    FAILS(ts_matmul_select(&o.desc, &cpu, NULL, NULL, 0), TS_INVALID_ARGUMENT, "kernel");
    o.desc.device = TS_CUDA;
    FAILS(ts_matmul_select(&o.desc, &cpu, &kernel, NULL, 0), TS_INVALID_ARGUMENT, "device");

    ts_device_info gpu = h100();
    gpu.compute_capability = 10; /* older than any kernel */
    FAILS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0), TS_UNSUPPORTED, "CUDA");
    gpu.compute_capability = 90;
    const int has_cuda = strstr(ts_architectures(), "sm_") != NULL;
    for (o.desc.op = TS_DDS_NT; o.desc.op <= TS_SDD_TN; ++o.desc.op) {
        o.desc.dtype = TS_FLOAT16;
        const ts_status_t status = ts_matmul_select(&o.desc, &gpu, &kernel, reason, sizeof reason);
        CHECK(status == (has_cuda ? TS_SUCCESS : TS_UNSUPPORTED), "op %d: %s", (int)o.desc.op,
              ts_status_string(status));
    }
}

/* The name of the kernel with that index. */
static const char* kernel_name(int32_t index) {
    static ts_kernel_info info;
    info.struct_size = sizeof info;
    SUCCEEDS(ts_kernel_get(index, &info));
    return info.name;
}

/* cpu_portable is every processor's, and the best of none. */
static int32_t portable_kernel(void) {
    for (int32_t kernel = 0; kernel < ts_kernel_count(); ++kernel)
        if (strcmp(kernel_name(kernel), "cpu_portable") == 0) return kernel;
    return -1;
}

/* Some slices of a GPU have no room for clusters of thread blocks. */
static void test_select_without_clusters(void) {
    if (strstr(ts_architectures(), "sm_90") == NULL || strstr(ts_architectures(), "sm_80") == NULL) return;
    static operands o;
    for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op) {
        init_operands(&o, op, TS_BFLOAT16, TS_ROW_MAJOR, TS_ROW_MAJOR);
        o.desc.device = TS_CUDA;
        o.desc.tokens = 4096;
        ts_device_info gpu = h100();
        int32_t with = -1, without = -1;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &with, NULL, 0));
        gpu.max_cluster = 2;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &without, NULL, 0));
        CHECK(with == without, "op %d: %d and %d", (int)op, (int)with, (int)without);
        CHECK(strncmp(kernel_name(with), "sm90_", 5) == 0, "op %d: %s", (int)op, kernel_name(with));
        gpu.max_cluster = 1;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &without, NULL, 0));
        if (op == TS_SDD_TN) continue; /* which can do without */
        CHECK(strncmp(kernel_name(without), "sm80_", 5) == 0, "op %d: %s", (int)op, kernel_name(without));
        o.desc.kernel = with + 1;
        FAILS(ts_matmul_select(&o.desc, &gpu, &without, NULL, 0), TS_UNSUPPORTED,
              "the device has no room for clusters of thread blocks");
    }
}

static void test_preferences(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    int32_t best = -1, kernel = -1;
    char reason[256];
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &best, NULL, 0));
    strcpy(o.desc.prefer, "cpu_port");
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, reason, sizeof reason));
    CHECK(kernel == portable_kernel(), "kernel %d", (int)kernel);
    CHECK(strcmp(reason, "the caller prefers it") == 0, "%s", reason);
    SUCCEEDS(run(&o));
    check_forward(&o);
    o.desc.kernel = best + 1; /* comes first */
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, NULL, 0));
    CHECK(kernel == best, "kernel %d", (int)kernel);
    if (strstr(ts_architectures(), "sm_80") != NULL) { /* is not for the CPU */
        o.desc.kernel = 0;
        strcpy(o.desc.prefer, "sm80_");
        SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, NULL, 0));
        CHECK(kernel == best, "kernel %d", (int)kernel);
    }
    REFUSES(TS_DDS_NT, strcpy(o.desc.prefer, "sm70_"), TS_INVALID_ARGUMENT,
            "prefer is sm70_, with which no kernel's name begins; there are cpu_");
    REFUSES(TS_DDS_NT, memset(o.desc.prefer, 'c', sizeof o.desc.prefer), TS_INVALID_ARGUMENT,
            "prefer has 64");
}

static void test_estimates(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu}, gpu = h100();
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    double time = -1;
    SUCCEEDS(ts_matmul_estimate(&o.desc, &cpu, portable_kernel(), &time));
    CHECK(time == 0, "%g us on a CPU", time);
    SUCCEEDS(ts_matmul_estimate(&o.desc, &cpu, TS_EXPAND_AND_RUN_DENSE, &time));
    CHECK(time == 0, "%g us on a CPU", time);
    FAILS(ts_matmul_estimate(NULL, &cpu, 0, &time), TS_INVALID_ARGUMENT, "desc");
    FAILS(ts_matmul_estimate(&o.desc, NULL, 0, &time), TS_INVALID_ARGUMENT, "device");
    FAILS(ts_matmul_estimate(&o.desc, &cpu, 0, NULL), TS_INVALID_ARGUMENT, "microseconds");
    FAILS(ts_matmul_estimate(&o.desc, &gpu, 0, &time), TS_INVALID_ARGUMENT, "device.device is 1");
    FAILS(ts_matmul_estimate(&o.desc, &cpu, ts_kernel_count(), &time), TS_INVALID_ARGUMENT, "kernel");
    FAILS(ts_matmul_estimate(&o.desc, &cpu, -2, &time), TS_INVALID_ARGUMENT, "kernel");
    o.desc.device = TS_CUDA;
    time = -1;
    FAILS(ts_matmul_estimate(&o.desc, &gpu, 0, &time), TS_UNSUPPORTED, "it is for another kind of device");
    CHECK(time == -1, "%g was written", time);
    if (strstr(ts_architectures(), "sm_90") == NULL) return;
    o.desc.dtype = TS_BFLOAT16;
    int32_t best = -1;
    SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &best, NULL, 0));
    double least = 0;
    SUCCEEDS(ts_matmul_estimate(&o.desc, &gpu, best, &least));
    CHECK(least > 0, "%g us", least);
    for (int32_t kernel = 0; kernel < ts_kernel_count(); ++kernel)
        if (ts_matmul_estimate(&o.desc, &gpu, kernel, &time) == TS_SUCCESS)
            CHECK(time >= least, "%s: %g us, less than the %g of what was chosen", kernel_name(kernel), time,
                  least);
    SUCCEEDS(ts_matmul_estimate(&o.desc, &gpu, TS_EXPAND_AND_RUN_DENSE, &time));
    CHECK(time > 0, "%g us", time);
}

/* What is chosen on the CPU, and why. */
static int32_t chosen(const operands* o, const ts_device_info* cpu, char* reason) {
    int32_t kernel = -7;
    SUCCEEDS(ts_matmul_select(&o->desc, cpu, &kernel, reason, 256));
    return kernel;
}

static void test_measurements(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    char reason[256];
    const int32_t best = chosen(&o, &cpu, reason), portable = portable_kernel();
    FAILS(ts_measurement_add(NULL, &cpu, portable, 1, 0), TS_INVALID_ARGUMENT, "desc");
    FAILS(ts_measurement_add(&o.desc, NULL, portable, 1, 0), TS_INVALID_ARGUMENT, "device");
    FAILS(ts_measurement_add(&o.desc, &cpu, -1, 1, 0), TS_INVALID_ARGUMENT, "kernel is -1");
    FAILS(ts_measurement_add(&o.desc, &cpu, portable, 0, 0), TS_INVALID_ARGUMENT, "microseconds is 0");
    FAILS(ts_measurement_add(&o.desc, &cpu, portable, NAN, 0), TS_INVALID_ARGUMENT, "microseconds");
    FAILS(ts_measurement_add(&o.desc, &cpu, portable, 1, -1), TS_INVALID_ARGUMENT,
          "dense_microseconds is -1");
    FAILS(ts_measurement_add(&o.desc, &cpu, portable, 1, INFINITY), TS_INVALID_ARGUMENT, "dense_micro");
    if (strstr(ts_architectures(), "sm_80") != NULL)
        FAILS(ts_measurement_add(&o.desc, &cpu, ts_kernel_count() - 1, 1, 0), TS_UNSUPPORTED,
              "cannot compute");
    CHECK(chosen(&o, &cpu, reason) == best, "%s", reason);

    SUCCEEDS(ts_measurement_add(&o.desc, &cpu, portable, 12.25, 0));
    CHECK(chosen(&o, &cpu, reason) == portable, "%s", reason);
    CHECK(strcmp(reason, "the fastest when measured on this device; measured 12.2 us") == 0, "%s", reason);
    SUCCEEDS(run(&o));
    check_forward(&o);
    o.desc.policy = TS_POLICY_AUTO; /* dense was not measured */
    CHECK(chosen(&o, &cpu, reason) == portable, "%s", reason);
    SUCCEEDS(ts_measurement_add(&o.desc, &cpu, portable, 12, 11)); /* in place of the first */
    CHECK(chosen(&o, &cpu, reason) == TS_EXPAND_AND_RUN_DENSE, "%s", reason);
    CHECK(strstr(reason, "dense was measured to be faster; measured 12.0 us by cpu_portable, dense 11.0 us"),
          "%s", reason);
    o.desc.policy = TS_POLICY_SPARSE;

    const int64_t tokens = o.desc.tokens, nnz = o.pattern.nnz;
    int64_t most = 1;
    while (most < tokens) most *= 2;
    for (int64_t count = 1; count <= 2 * most; ++count) { /* those that round up to the same power of two */
        o.desc.tokens = count;
        const int counts = count <= most && 2 * count > most;
        CHECK((chosen(&o, &cpu, reason) == portable) == counts, "%d tokens", (int)count);
    }
    o.desc.tokens = tokens;
    for (int64_t other = 0; other <= nnz; ++other) {
        o.pattern.nnz = other;
        CHECK((chosen(&o, &cpu, reason) == portable) == (8 * (nnz - other) <= nnz), "%d blocks", (int)other);
    }
    o.pattern.nnz = nnz;
    ts_device_info other = cpu;
    other.multiprocessors = cpu.multiprocessors % 65536 + 1;
    CHECK(chosen(&o, &other, reason) == best, "%s", reason);
    other = cpu;
    strcpy(other.name, "another");
    CHECK(chosen(&o, &other, reason) == best, "%s", reason);
    o.desc.activation = TS_RELU; /* is no matter */
    CHECK(chosen(&o, &cpu, reason) == portable, "%s", reason);
    strcpy(o.desc.prefer, kernel_name(best)); /* comes first */
    CHECK(chosen(&o, &cpu, reason) == best, "%s", reason);
    o.desc.prefer[0] = 0;
    SUCCEEDS(ts_measurements_clear());
    CHECK(chosen(&o, &cpu, reason) == best, "%s", reason);
}

/* After `change` the device is none that a kernel could be chosen for. */
#define REFUSES_DEVICE(change, mention)                                                            \
    do {                                                                                           \
        static operands o;                                                                         \
        init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);                      \
        o.desc.device = TS_CUDA;                                                                   \
        ts_device_info device = h100();                                                            \
        int32_t kernel = -7;                                                                       \
        change;                                                                                    \
        FAILS(ts_matmul_select(&o.desc, &device, &kernel, NULL, 0), TS_INVALID_ARGUMENT, mention); \
        CHECK(kernel == -7, "%s: written", #change);                                               \
    } while (0)

static void test_bad_devices(void) {
    REFUSES_DEVICE(device.multiprocessors = 0, "device.multiprocessors is 0; allowed are 1 to");
    REFUSES_DEVICE(device.multiprocessors = -1, "device.multiprocessors");
    REFUSES_DEVICE(device.multiprocessors = INT32_MIN, "device.multiprocessors");
    REFUSES_DEVICE(device.multiprocessors = INT32_MAX, "device.multiprocessors");
    REFUSES_DEVICE(device.shared_memory = -1, "device.shared_memory");
    REFUSES_DEVICE(device.shared_memory = INT32_MAX, "device.shared_memory");
    REFUSES_DEVICE(device.compute_capability = -90, "device.compute_capability");
    REFUSES_DEVICE(device.compute_capability = INT32_MAX, "device.compute_capability");
    REFUSES_DEVICE(device.reserved = 1, "device.reserved");
    REFUSES_DEVICE(device.max_cluster = -1, "device.max_cluster is -1; allowed are 0 to 16");
    REFUSES_DEVICE(device.max_cluster = 17, "device.max_cluster");
    REFUSES_DEVICE(device.device = 2, "device.device");
    REFUSES_DEVICE((device.device = TS_CPU, o.desc.device = TS_CPU), "device.compute_capability");
    REFUSES_DEVICE((device = (ts_device_info){.struct_size = sizeof device}, o.desc.device = TS_CPU),
                   "device.multiprocessors");
}

/* Kernels for few tokens are chosen before the others, for values that they read, and refuse more tokens. */
static void test_select_few_tokens(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    const ts_device_info gpu = h100();
    ts_kernel_info few = {.struct_size = sizeof few}, chosen = {.struct_size = sizeof chosen};
    o.desc.device = TS_CUDA;
    /* Such that every one of these kernels takes it; no array is read. */
    o.pattern.block_rows = o.pattern.block_cols = 64;
    o.pattern.out_features = o.pattern.in_features = 8192;
    o.pattern.nnz = 4096;
    o.desc.x.ld = o.desc.y.ld = 8192;
    for (int32_t i = 0; i < ts_kernel_count(); ++i) {
        SUCCEEDS(ts_kernel_get(i, &few));
        if (few.max_tokens == 0) continue;
        int32_t kernel = -1;
        o.desc.dtype = few.dtypes >> TS_FLOAT16 & 1 ? TS_FLOAT16 : TS_BFLOAT16;
        o.desc.storage = few.storages >> TS_STORAGE_PLAIN & 1 ? TS_STORAGE_PLAIN : TS_STORAGE_2_4;
        o.desc.values_dtype = few.values_dtypes >> TS_INT8 & 1 ? TS_INT8 + 1 : 0;
        o.desc.tokens = 1;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0));
        SUCCEEDS(ts_kernel_get(kernel, &chosen));
        CHECK(chosen.max_tokens > 0 && chosen.storages == few.storages, "%s instead of %s", chosen.name,
              few.name);
        o.desc.tokens = few.max_tokens + 1;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0));
        SUCCEEDS(ts_kernel_get(kernel, &chosen));
        CHECK(chosen.max_tokens == 0 || chosen.max_tokens > few.max_tokens, "%s", chosen.name);
        o.desc.kernel = i + 1;
        FAILS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0), TS_UNSUPPORTED, "fewer tokens");
        o.desc.kernel = 0;
    }
}

/* Plans are built on the host, also those of GPU kernels. */
static void check_plan(const ts_pattern* pattern, int32_t kernel, int32_t op, int needed) {
    size_t bytes = 0;
    SUCCEEDS(ts_plan_size(pattern, kernel, op, &bytes));
    CHECK((bytes > 0) == needed, "kernel %d has a plan of %d bytes", (int)kernel, (int)bytes);
    unsigned char* plan = malloc(bytes + 1);
    memset(plan, 0xa5, bytes + 1);
    if (bytes > 0) {
        FAILS(ts_plan_build(pattern, kernel, op, plan, bytes - 1), TS_WORKSPACE_TOO_SMALL, "bytes");
        CHECK(plan[0] == 0xa5, "a plan that is too small was written");
        FAILS(ts_plan_build(pattern, kernel, op, NULL, bytes), TS_INVALID_ARGUMENT, "plan");
    }
    SUCCEEDS(ts_plan_build(pattern, kernel, op, plan, bytes));
    CHECK(plan[bytes] == 0xa5, "written behind the plan");
    free(plan);
}

static void test_plans(void) {
    ts_pattern pattern = layer_pattern();
    pattern.in_features = pattern.in_features / pattern.block_cols * pattern.block_rows;
    pattern.block_cols = pattern.block_rows; /* every kernel takes small square blocks */
    ts_kernel_info info = {.struct_size = sizeof info};
    for (int32_t kernel = 0; kernel < ts_kernel_count(); ++kernel) {
        SUCCEEDS(ts_kernel_get(kernel, &info));
        for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op)
            if (info.ops >> op & 1) check_plan(&pattern, kernel, op, info.plan != 0);
    }
    size_t bytes = 0;
    FAILS(ts_plan_size(NULL, 0, TS_DDS_NT, &bytes), TS_INVALID_ARGUMENT, "pattern");
    FAILS(ts_plan_size(&pattern, 0, TS_DDS_NT, NULL), TS_INVALID_ARGUMENT, "bytes");
    FAILS(ts_plan_size(&pattern, -1, TS_DDS_NT, &bytes), TS_INVALID_ARGUMENT, "kernel");
    FAILS(ts_plan_size(&pattern, 0, 3, &bytes), TS_INVALID_ARGUMENT, "op");
    pattern.col_ptr = NULL;
    FAILS(ts_plan_build(&pattern, 0, TS_DDS_NT, NULL, 0), TS_INVALID_ARGUMENT, "col_ptr");
}

/* Plans say for which kernels, product and sizes they were made. */
static void test_plan_keys(void) {
    ts_pattern pattern = layer_pattern();
    pattern.in_features = pattern.in_features / pattern.block_cols * pattern.block_rows;
    pattern.block_cols = pattern.block_rows;
    ts_pattern longer = pattern;
    longer.out_features += longer.block_rows;
    ts_kernel_info info = {.struct_size = sizeof info};
    int64_t key = 0, other = 0;
    for (int32_t kernel = 0; kernel < ts_kernel_count(); ++kernel) {
        SUCCEEDS(ts_kernel_get(kernel, &info));
        for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op) {
            if (!(info.ops >> op & 1)) continue;
            SUCCEEDS(ts_plan_key(&pattern, kernel, op, &key));
            CHECK((key != 0) == (info.plan != 0), "%s: %d", info.name, (int)key);
            if (key == 0) continue;
            SUCCEEDS(ts_plan_key(&longer, kernel, op, &other));
            CHECK(other != 0 && other != key, "%s: other sizes have the key %d, too", info.name, (int)key);
            size_t bytes = 0;
            SUCCEEDS(ts_plan_size(&pattern, kernel, op, &bytes));
            int32_t* plan = malloc(bytes);
            SUCCEEDS(ts_plan_build(&pattern, kernel, op, plan, bytes));
            CHECK(plan[11] == key, "%s: the plan has the key %d", info.name, (int)plan[11]);
            free(plan);
        }
    }
    FAILS(ts_plan_key(NULL, 0, TS_DDS_NT, &key), TS_INVALID_ARGUMENT, "pattern");
    FAILS(ts_plan_key(&pattern, 0, TS_DDS_NT, NULL), TS_INVALID_ARGUMENT, "key");
    FAILS(ts_plan_key(&pattern, -1, TS_DDS_NT, &key), TS_INVALID_ARGUMENT, "kernel");
    FAILS(ts_plan_key(&pattern, 0, -1, &key), TS_INVALID_ARGUMENT, "op");
}

/* A product takes no plan that was made for other kernels. No address is followed. */
static void test_foreign_plan(void) {
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) != TS_SUCCESS) return;
    REFUSES(TS_DDS_NT,
            (o.desc.device = TS_CUDA, o.desc.tokens = 1 << 20, o.desc.x.ld = IN, o.desc.y.ld = OUT,
             o.desc.x.data = (void*)(1ull << 40), o.desc.y.data = (void*)(2ull << 40),
             o.desc.plan = o.memory[3], o.desc.plan_bytes = 64, o.desc.plan_key = 1),
            TS_INVALID_ARGUMENT, "plan_key is 1, but kernel");
}

/* A weight of so many blocks, kept or not, that the host's sets would take the machine's memory. */
static void test_vast_plans(void) {
    enum { SIDE = 1 << 20 };
    int32_t* no_blocks = calloc(SIDE + 1, sizeof *no_blocks);
    ts_pattern pattern = {.struct_size = sizeof pattern,
                          .block_rows = 16,
                          .block_cols = 16,
                          .out_features = (int64_t)SIDE * 16,
                          .in_features = (int64_t)SIDE * 16,
                          .row_ptr = no_blocks,
                          .col_ptr = no_blocks};
    ts_kernel_info info = {.struct_size = sizeof info};
    for (int32_t kernel = 0; kernel < ts_kernel_count(); ++kernel) {
        SUCCEEDS(ts_kernel_get(kernel, &info));
        const int32_t op = info.ops >> TS_SDD_TN & 1 ? TS_SDD_TN : info.ops >> TS_DDS_NN & 1;
        size_t bytes = 0;
        if (info.plan != 0)
            FAILS(ts_plan_size(&pattern, kernel, op, &bytes), TS_UNSUPPORTED, "places for blocks");
        else
            SUCCEEDS(ts_plan_size(&pattern, kernel, op, &bytes));
    }
    free(no_blocks);
}

/* Kernels of the CPU read values as they are. */
static void test_packing(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    size_t bytes = 1;
    SUCCEEDS(ts_values_packed_size(&o.desc, &bytes));
    CHECK(bytes == 0, "%d bytes", (int)bytes);
    SUCCEEDS(ts_values_pack(&o.desc, NULL, 0, NULL));
    o.desc.packed = o.memory[4];
    o.desc.packed_key = 7; /* of whatever kernel: this one reads no packed values */
    SUCCEEDS(run(&o));
    check_forward(&o);
    FAILS(ts_values_packed_size(NULL, &bytes), TS_INVALID_ARGUMENT, "desc");
    FAILS(ts_values_packed_size(&o.desc, NULL), TS_INVALID_ARGUMENT, "bytes");
    FAILS(ts_values_pack(NULL, NULL, 0, NULL), TS_INVALID_ARGUMENT, "desc");
    o.desc.op = 3;
    FAILS(ts_values_pack(&o.desc, NULL, 0, NULL), TS_INVALID_ARGUMENT, "op");
}

/* On the GPU plans are made of patterns in its memory alone, and in a library with CUDA alone. */
static void test_plans_on_the_device(void) {
    const int has_cuda = strstr(ts_architectures(), "sm_") != NULL;
    ts_pattern pattern = layer_pattern();
    ts_kernel_info info = {.struct_size = sizeof info};
    size_t plan = 0, workspace = 0;
    char memory[16];
    FAILS(ts_plan_device_size(NULL, 0, TS_DDS_NT, &plan, &workspace), TS_INVALID_ARGUMENT, "pattern");
    FAILS(ts_plan_device_size(&pattern, -1, TS_DDS_NT, &plan, &workspace), TS_INVALID_ARGUMENT, "kernel");
    FAILS(ts_plan_device_size(&pattern, 0, 3, &plan, &workspace), TS_INVALID_ARGUMENT, "op");
    FAILS(ts_plan_device_size(&pattern, 0, TS_DDS_NT, NULL, &workspace), TS_INVALID_ARGUMENT, "plan_bytes");
    FAILS(ts_plan_device_size(&pattern, 0, TS_DDS_NT, &plan, NULL), TS_INVALID_ARGUMENT, "workspace_bytes");
    FAILS(ts_pattern_device_transpose_size(&pattern, NULL), TS_INVALID_ARGUMENT, "workspace_bytes");
    ts_array_pair pair = {.first = col_ptr, .second = row_idx, .count = 1};
    FAILS(ts_arrays_compare(NULL, 1, 1, NULL), TS_INVALID_ARGUMENT, "pairs is null");
    FAILS(ts_arrays_compare(&pair, -1, 1, NULL), TS_INVALID_ARGUMENT, "count is -1");
    FAILS(ts_arrays_compare(&pair, 1, 0, NULL), TS_INVALID_ARGUMENT, "mark is 0");
    FAILS(ts_arrays_compare(&pair, 1, 1, NULL), has_cuda ? TS_INVALID_ARGUMENT : TS_UNSUPPORTED,
          has_cuda ? "not in pinned memory" : "CUDA");
    CHECK(pair.differs == 0, "the pair has the mark %d", (int)pair.differs);
    if (!has_cuda) {
        FAILS(ts_plan_device_size(&pattern, 0, TS_DDS_NT, &plan, &workspace), TS_UNSUPPORTED, "CUDA");
        FAILS(ts_plan_device_build(&pattern, 0, TS_DDS_NT, memory, 16, memory, 16, NULL), TS_UNSUPPORTED,
              "CUDA");
        FAILS(ts_pattern_device_transpose_size(&pattern, &workspace), TS_UNSUPPORTED, "CUDA");
        FAILS(ts_pattern_device_transpose(&pattern, col_ptr, row_idx, col_slot, memory, 16, NULL),
              TS_UNSUPPORTED, "CUDA");
        return;
    }
    for (int32_t kernel = 0; kernel < ts_kernel_count(); ++kernel) {
        SUCCEEDS(ts_kernel_get(kernel, &info));
        const int32_t op = info.ops >> TS_SDD_TN & 1 ? TS_SDD_TN : info.ops >> TS_DDS_NN & 1;
        /* The blocks of this pattern are none for kernels that want square ones. */
        if (ts_plan_device_size(&pattern, kernel, op, &plan, &workspace) != TS_SUCCESS) continue;
        CHECK((plan > 0) == (info.plan != 0), "kernel %d has a plan of %d bytes", (int)kernel, (int)plan);
        if (plan > 0)
            FAILS(ts_plan_device_build(&pattern, kernel, op, memory, plan, memory, workspace, NULL),
                  TS_INVALID_ARGUMENT, "not in memory of a CUDA device");
    }
    SUCCEEDS(ts_pattern_device_transpose_size(&pattern, &workspace));
    FAILS(ts_pattern_device_transpose(&pattern, col_ptr, row_idx, col_slot, memory, workspace, NULL),
          TS_INVALID_ARGUMENT, "not in memory of a CUDA device");
}

/* --- Values in fewer bytes ------------------------------------------------------------------------------ */

enum { COUNT = NNZ * BN * BK }; /* of the values of all blocks */

/* Values of the layer with a mask, compressed, and with scales. What is written ends with 4 bytes more. */
typedef struct stored {
    int32_t dtype;
    _Alignas(16) unsigned char values[COUNT * sizeof(float)];
    _Alignas(16) unsigned char compressed[COUNT / 2 * sizeof(float) + 4];
    _Alignas(16) uint32_t metadata[COUNT / 32 + 1];
    _Alignas(16) uint8_t mask[COUNT];
    _Alignas(16) float scales[NNZ * BN];
} stored;

/* Masks of every kind, from none of four to all; scales that leave sums exact. */
static void init_stored(stored* s, int32_t dtype) {
    memset(s, 0xa5, sizeof *s);
    s->dtype = dtype;
    for (int i = 0; i < COUNT; ++i) {
        const float number = (float)(i % 15 + 1) / 8;
        if (dtype == TS_FLOAT32)
            memcpy(s->values + i * sizeof number, &number, sizeof number);
        else if (dtype == TS_INT8)
            s->values[i] = (uint8_t)(i * 37);
        else
            s->values[i] = (uint8_t)(i % 2 << 7 | (6 + i % 3) << 3 | i / 2 % 8);
        s->mask[i] = (uint8_t)(i / 4 * 7 >> i % 4 & 1 ? 1 + i % 255 : 0);
    }
    for (int i = 0; i < NNZ * BN; ++i) s->scales[i] = i % 3 == 0 ? 0.25f : i % 3 == 1 ? 1 : -2;
}

/* A number of that dtype; there are no subnormal ones of 8 bits and no NaN. */
static double number_at(const unsigned char* values, int32_t dtype, int i) {
    float number;
    if (dtype == TS_INT8) return (int8_t)values[i];
    if (dtype == TS_FLOAT32) {
        memcpy(&number, values + i * sizeof number, sizeof number);
        return number;
    }
    const double fraction = (8 + values[i] % 8) / 1024.0 * (1 << (values[i] >> 3 & 15));
    return values[i] & 0x80 ? -fraction : fraction;
}

/* Of four neighbours the first two in the mask. */
static int is_kept(const stored* s, int i) {
    int before = 0;
    for (int j = i / 4 * 4; j < i; ++j) before += s->mask[j] != 0;
    return s->mask[i] != 0 && before < 2;
}

/* The column of a kept value of a row, of all rows of all blocks, as the header says. */
static int kept_column(const uint32_t* metadata, int row, int index) {
    const int group = index / 2 * 4, r = row % BN;
    const int block = row / BN * (BK / 32) + group / 32;
    const uint32_t word = metadata[((block * (BN / 16) + r / 16) * 8 + r % 8) * 2 + group % 32 / 16];
    const uint32_t half = r % 16 < 8 ? word & 0xffff : word >> 16;
    return group + (int)(half >> (group % 16 + index % 2 * 2) & 3);
}

static ts_status_t compress(stored* s, const ts_pattern* pattern) {
    return ts_values_compress(pattern, TS_CPU, s->dtype, s->values, s->mask, 0, s->compressed, s->metadata,
                              NULL);
}

static void test_compression(int32_t dtype) {
    static stored s;
    static double expanded[COUNT];
    const ts_pattern pattern = layer_pattern();
    const size_t bytes = COUNT / 2 * (dtype == TS_FLOAT32 ? sizeof(float) : 1);
    init_stored(&s, dtype);
    SUCCEEDS(compress(&s, &pattern));
    CHECK(s.compressed[bytes] == 0xa5, "written behind compressed");
    CHECK(s.metadata[COUNT / 32] == 0xa5a5a5a5u, "written behind metadata");
    memset(expanded, 0, sizeof expanded);
    for (int row = 0; row < NNZ * BN; ++row)
        for (int i = 0; i < BK / 2; ++i) {
            const int column = kept_column(s.metadata, row, i), at = row * (BK / 2) + i;
            CHECK(i % 2 == 0 || column > kept_column(s.metadata, row, i - 1), "row %d: %d does not ascend",
                  row, i);
            if (is_kept(&s, row * BK + column))
                expanded[row * BK + column] = number_at(s.compressed, dtype, at);
            else
                for (size_t byte = 0; byte < bytes / (COUNT / 2); ++byte)
                    CHECK(s.compressed[at * (bytes / (COUNT / 2)) + byte] == 0, "%d of row %d is not 0", i,
                          row);
        }
    for (int i = 0; i < COUNT; ++i) {
        const double expected = is_kept(&s, i) ? number_at(s.values, dtype, i) : 0;
        CHECK(expanded[i] == expected, "value %d is %g, not %g", i, expanded[i], expected);
    }
}

/* What comes out of a transposed weight and its mask is the same as with `transposed` of the weight. */
static void test_transposed_compression(void) {
    enum { SIDE = 32, SIZE = SIDE * SIDE };
    static uint16_t values[2][SIZE], compressed[2][SIZE / 2];
    static uint8_t mask[2][SIZE];
    static uint32_t metadata[2][SIZE / 32];
    for (int i = 0; i < SIZE; ++i) {
        const int across = i % SIDE * SIDE + i / SIDE;
        values[0][i] = values[1][across] = (uint16_t)(i + 1);
        mask[0][i] = mask[1][across] = (uint8_t)(i * 2654435761u >> 13 & 1);
    }
    ts_pattern pattern = layer_pattern();
    pattern.block_rows = pattern.block_cols = SIDE;
    pattern.out_features = pattern.in_features = SIDE;
    pattern.nnz = 1;
    for (int i = 0; i < 2; ++i)
        SUCCEEDS(ts_values_compress(&pattern, TS_CPU, TS_BFLOAT16, values[i], mask[i], i, compressed[i],
                                    metadata[i], NULL));
    CHECK(memcmp(compressed[0], compressed[1], sizeof compressed[0]) == 0, "compressed values differ");
    CHECK(memcmp(metadata[0], metadata[1], sizeof metadata[0]) == 0, "metadata differs");
}

/* Lets a product multiply by stored values; operand 2 then holds what these stand for. */
static void give_stored(operands* o, stored* s, int32_t dtype, int32_t storage, int32_t row_scales) {
    init_stored(s, dtype);
    SUCCEEDS(compress(s, &o->pattern));
    o->desc.storage = storage;
    o->desc.values = storage == TS_STORAGE_PLAIN ? s->values : s->compressed;
    o->desc.metadata = storage == TS_STORAGE_PLAIN ? NULL : s->metadata;
    if (dtype != TS_FLOAT32) {
        o->desc.values_dtype = dtype + 1;
        o->desc.scales = s->scales;
        o->desc.row_scales = row_scales;
    }
    for (int i = 0; i < COUNT; ++i) {
        const double scale = dtype == TS_FLOAT32 ? 1 : s->scales[row_scales ? i / BK : i / (BN * BK)];
        const int is_there = storage == TS_STORAGE_PLAIN || is_kept(s, i);
        put(o, 2, i, is_there ? number_at(s->values, dtype, i) * scale : 0);
    }
}

static void test_stored_values(int32_t dtype, int32_t storage, int32_t row_scales) {
    static operands o;
    static stored s;
    static float plain[COUNT + 1];
    for (int32_t op = TS_DDS_NT; op <= TS_DDS_NN; ++op) {
        init_operands(&o, op, TS_FLOAT32, TS_ROW_MAJOR, TS_FEATURE_MAJOR);
        give_stored(&o, &s, dtype, storage, row_scales);
        SUCCEEDS(run(&o));
        if (op == TS_DDS_NT)
            check_forward(&o);
        else
            check_gradient_of_x(&o);
        plain[COUNT] = 77;
        SUCCEEDS(ts_values_expand(&o.desc, plain, COUNT * sizeof(float), NULL));
        for (int i = 0; i < COUNT; ++i)
            CHECK(plain[i] == get(&o, 2, i), "value %d is %g, not %g", i, plain[i], get(&o, 2, i));
        CHECK(plain[COUNT] == 77, "written behind the expansion");
    }
}

/* Kernels that are given the expansion have room for it in the workspace, say so and pack nothing. */
static void test_room_for_the_expansion(void) {
    static operands o;
    static stored s;
    const ts_device_info gpu = h100();
    char reason[256] = "";
    int32_t kernel = 0;
    size_t without = 0, with = 0, packed = 1;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    SUCCEEDS(ts_matmul_workspace_size(&o.desc, &without));
    give_stored(&o, &s, TS_INT8, TS_STORAGE_2_4, 1);
    SUCCEEDS(ts_matmul_workspace_size(&o.desc, &with));
    CHECK(with >= without + COUNT * sizeof(float), "%d bytes instead of %d", (int)with, (int)without);
    SUCCEEDS(ts_values_packed_size(&o.desc, &packed));
    CHECK(packed == 0, "%d bytes", (int)packed);
    void* workspace = aligned_alloc(256, (with / 256 + 1) * 256);
    FAILS(ts_matmul(&o.desc, workspace, with - 1, NULL), TS_WORKSPACE_TOO_SMALL, "workspace_bytes");
    free(workspace);
    ts_device_info cpu = {.struct_size = sizeof cpu};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, reason, sizeof reason));
    CHECK(strstr(reason, "it is given expanded values") != NULL, "%s", reason);
    if (strstr(ts_architectures(), "sm_") == NULL) return;
    o.desc.device = TS_CUDA;
    o.desc.dtype = TS_FLOAT16;
    SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0));
}

/* Nothing of x, y and values is written by products that are refused, nor of the expansion. */
#define REFUSES_STORED(op_, dtype, storage_, change, expected, mention)                           \
    do {                                                                                          \
        static stored s;                                                                          \
        REFUSES((op_), (give_stored(&o, &s, (dtype), (storage_), 1), change), expected, mention); \
    } while (0)

static void test_bad_storages(void) {
    enum { INT8 = TS_INT8 + 1 };
    REFUSES(TS_DDS_NT, o.desc.metadata = o.memory[3], TS_INVALID_ARGUMENT,
            "metadata is given; only TS_STORAGE_2_4 has any");
    REFUSES(TS_DDS_NT, o.desc.storage = TS_STORAGE_2_4, TS_INVALID_ARGUMENT, "metadata is null");
    REFUSES(TS_DDS_NT, o.desc.values_dtype = TS_FLOAT16 + 1, TS_INVALID_ARGUMENT,
            "values_dtype stands for float16 and dtype is float32");
    REFUSES(TS_DDS_NT, o.desc.values_dtype = INT8, TS_INVALID_ARGUMENT, "scales is null");
    REFUSES(TS_DDS_NT, o.desc.scales = (float*)o.memory[3], TS_INVALID_ARGUMENT,
            "scales is given; values of float32 have none");
    REFUSES(TS_DDS_NT, o.desc.row_scales = 1, TS_INVALID_ARGUMENT, "row_scales is 1; values of float32");
    REFUSES(TS_DDS_NT, o.desc.dtype = TS_INT8, TS_INVALID_ARGUMENT, "dtype is 4; allowed are 0 to 3");
    REFUSES(TS_DDS_NT, o.desc.result_dtype = INT8, TS_INVALID_ARGUMENT, "result_dtype is 5; allowed are 0");
    REFUSES(TS_SDD_TN, (o.desc.storage = TS_STORAGE_2_4, o.desc.metadata = o.memory[3]), TS_INVALID_ARGUMENT,
            "storage is 1; sdd_tn writes plain values");
    REFUSES(TS_SDD_TN, (o.desc.values_dtype = INT8, o.desc.scales = (float*)o.memory[3]), TS_INVALID_ARGUMENT,
            "values_dtype stands for int8 and result_dtype for float32");
    REFUSES_STORED(TS_DDS_NN, TS_INT8, 0, o.desc.row_scales = 2, TS_INVALID_ARGUMENT, "row_scales is 2");
    REFUSES_STORED(TS_DDS_NN, TS_INT8, 0, o.desc.scales = (float*)((char*)s.scales + 1), TS_INVALID_ARGUMENT,
                   "scales is at address");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.scales = (float*)o.memory[1], TS_INVALID_ARGUMENT,
                   "y and scales overlap");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.values = o.memory[1], TS_INVALID_ARGUMENT,
                   "y and values overlap");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.values = NULL, TS_INVALID_ARGUMENT, "values is null");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.desc.metadata = (char*)s.metadata + 2, TS_INVALID_ARGUMENT,
                   "metadata is at address");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.desc.metadata = o.memory[1], TS_INVALID_ARGUMENT,
                   "y and metadata overlap");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.pattern.block_cols = 16, TS_INVALID_ARGUMENT,
                   "pattern.block_cols is 16; TS_STORAGE_2_4 is for 32, 64 and 128");
    REFUSES_STORED(
        TS_DDS_NT, TS_FLOAT32, 1,
        (o.desc.device = TS_CUDA, o.desc.x.ld = IN, o.desc.y.ld = 8, o.desc.metadata = s.metadata + 1),
        TS_INVALID_ARGUMENT, "metadata is at address");
}

/* After `change` of a product with values of 8 bits in 2:4, their expansion is refused and not written. */
#define REFUSES_EXPANSION(change, expected, mention)                             \
    do {                                                                         \
        static operands o;                                                       \
        static stored s;                                                         \
        static float memory[COUNT];                                              \
        void* plain = memory;                                                    \
        size_t bytes = sizeof memory;                                            \
        init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);    \
        give_stored(&o, &s, TS_INT8, TS_STORAGE_2_4, 0);                         \
        memset(memory, 0xa5, sizeof memory);                                     \
        change;                                                                  \
        FAILS(ts_values_expand(&o.desc, plain, bytes, NULL), expected, mention); \
        for (size_t i = 0; i < sizeof memory; ++i)                               \
            CHECK(((unsigned char*)memory)[i] == 0xa5, "%s: written", #change);  \
    } while (0)

static void test_bad_expansions(void) {
    FAILS(ts_values_expand(NULL, NULL, 0, NULL), TS_INVALID_ARGUMENT, "desc");
    REFUSES_EXPANSION(plain = NULL, TS_INVALID_ARGUMENT, "plain is null");
    REFUSES_EXPANSION(plain = (char*)memory + 2, TS_INVALID_ARGUMENT, "plain is at address");
    REFUSES_EXPANSION(--bytes, TS_WORKSPACE_TOO_SMALL, "plain_bytes is 6143; 6144 are needed");
    REFUSES_EXPANSION(plain = s.compressed, TS_INVALID_ARGUMENT, "values and plain overlap");
    REFUSES_EXPANSION(o.desc.metadata = memory, TS_INVALID_ARGUMENT, "metadata and plain overlap");
    REFUSES_EXPANSION(o.desc.scales = memory, TS_INVALID_ARGUMENT, "scales and plain overlap");
    REFUSES_EXPANSION(o.desc.values = NULL, TS_INVALID_ARGUMENT, "values is null");
    REFUSES_EXPANSION(o.desc.scales = NULL, TS_INVALID_ARGUMENT, "scales is null");
    REFUSES_EXPANSION(o.desc.op = TS_SDD_TN, TS_INVALID_ARGUMENT, "sdd_tn");
    REFUSES_EXPANSION((o.desc.op = TS_SDD_TN, o.desc.storage = 0, o.desc.metadata = NULL,
                       o.desc.scales = NULL, o.desc.values_dtype = 0),
                      TS_INVALID_ARGUMENT, "op is 2; the values are those of dds_nt or dds_nn");
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS) return;
    REFUSES_EXPANSION(o.desc.device = TS_CUDA, TS_NO_DEVICE, "CUDA");
}

/* After `change` of one argument compression is refused, and nothing is written. */
#define REFUSES_COMPRESSION(change, expected, mention)                                                      \
    do {                                                                                                    \
        static stored s, before;                                                                            \
        init_stored(&s, TS_FLOAT32);                                                                        \
        before = s;                                                                                         \
        ts_pattern pattern = layer_pattern();                                                               \
        const ts_pattern* given = &pattern;                                                                 \
        int32_t device = TS_CPU, dtype = TS_FLOAT32, transposed = 0;                                        \
        const void* values = s.values;                                                                      \
        const uint8_t* mask = s.mask;                                                                       \
        void* compressed = s.compressed;                                                                    \
        uint32_t* metadata = s.metadata;                                                                    \
        change;                                                                                             \
        FAILS(                                                                                              \
            ts_values_compress(given, device, dtype, values, mask, transposed, compressed, metadata, NULL), \
            expected, mention);                                                                             \
        CHECK(memcmp(&before, &s, sizeof s) == 0, "%s: written", #change);                                  \
    } while (0)

static void test_bad_compressions(void) {
    REFUSES_COMPRESSION(given = NULL, TS_INVALID_ARGUMENT, "pattern");
    REFUSES_COMPRESSION(pattern.block_rows = 8, TS_INVALID_ARGUMENT, "pattern.block_rows is 8");
    REFUSES_COMPRESSION(pattern.block_cols = 16, TS_INVALID_ARGUMENT, "pattern.block_cols is 16; TS_STORAGE");
    REFUSES_COMPRESSION(transposed = 1, TS_INVALID_ARGUMENT, "pattern.block_rows is 16; TS_STORAGE_2_4");
    REFUSES_COMPRESSION(transposed = 2, TS_INVALID_ARGUMENT, "transposed is 2; allowed are 0 and 1");
    REFUSES_COMPRESSION(device = 2, TS_INVALID_ARGUMENT, "device is 2; allowed are 0 to 1");
    REFUSES_COMPRESSION(dtype = 6, TS_INVALID_ARGUMENT, "dtype is 6; allowed are 0 to 5");
    REFUSES_COMPRESSION(dtype = -1, TS_INVALID_ARGUMENT, "dtype is -1");
    REFUSES_COMPRESSION(values = NULL, TS_INVALID_ARGUMENT, "values is null");
    REFUSES_COMPRESSION(mask = NULL, TS_INVALID_ARGUMENT, "mask is null");
    REFUSES_COMPRESSION(compressed = NULL, TS_INVALID_ARGUMENT, "compressed is null");
    REFUSES_COMPRESSION(metadata = NULL, TS_INVALID_ARGUMENT, "metadata is null");
    REFUSES_COMPRESSION(values = s.values + 1, TS_INVALID_ARGUMENT, "values is at address");
    REFUSES_COMPRESSION(compressed = s.compressed + 2, TS_INVALID_ARGUMENT, "compressed is at address");
    REFUSES_COMPRESSION(metadata = (uint32_t*)(s.compressed + 2), TS_INVALID_ARGUMENT, "metadata is at");
    REFUSES_COMPRESSION(compressed = s.values, TS_INVALID_ARGUMENT, "values and compressed overlap");
    REFUSES_COMPRESSION(compressed = s.mask, TS_INVALID_ARGUMENT, "mask and compressed overlap");
    REFUSES_COMPRESSION(metadata = (uint32_t*)s.values, TS_INVALID_ARGUMENT, "values and metadata overlap");
    REFUSES_COMPRESSION(metadata = (uint32_t*)s.mask, TS_INVALID_ARGUMENT, "mask and metadata overlap");
    REFUSES_COMPRESSION(metadata = (uint32_t*)s.compressed, TS_INVALID_ARGUMENT,
                        "compressed and metadata overlap");
    REFUSES_COMPRESSION((device = TS_CUDA, mask = s.mask + 1), TS_INVALID_ARGUMENT, "mask is at address");
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS) return;
    REFUSES_COMPRESSION(device = TS_CUDA, TS_NO_DEVICE, "CUDA");
}

int main(void) {
    test_identity();
    test_kernels();
    test_devices();
    test_absent_device();
    test_pattern_validate();
    test_broken_patterns();
    test_pattern_transpose();
    test_bad_gradients_of_activations();
    test_bad_gates();
    test_bad_descriptors();
    test_bad_operands();
    test_own_dtypes();
    test_short_structures();
    test_long_structures();
    test_bad_pattern_descriptors();
    test_missing_arrays();
    test_wild_arrays();
    test_small_workspace();
    test_overlapping_workspace();
    test_select();
    test_select_without_clusters();
    test_preferences();
    test_estimates();
    test_measurements();
    test_bad_devices();
    test_select_few_tokens();
    test_plans();
    test_plan_keys();
    test_foreign_plan();
    test_vast_plans();
    test_packing();
    test_plans_on_the_device();
    for (int32_t dtype = TS_INT8; dtype <= TS_FLOAT8_E4M3FN; ++dtype) {
        test_compression(dtype);
        for (int32_t option = 0; option < 4; ++option) test_stored_values(dtype, option & 1, option >> 1);
    }
    test_compression(TS_FLOAT32);
    test_stored_values(TS_FLOAT32, TS_STORAGE_2_4, 0);
    test_transposed_compression();
    test_room_for_the_expansion();
    test_bad_storages();
    test_bad_expansions();
    test_bad_compressions();
    for (int32_t dtype = TS_FLOAT64; dtype <= TS_FLOAT32; ++dtype)
        for (int32_t layouts = 0; layouts < 4; ++layouts) test_products(dtype, layouts & 1, layouts >> 1);
    test_forced_kernels();
    test_empty_products();
    test_no_features();
    printf("%d failures\n", failures);
    return failures > 0;
}
