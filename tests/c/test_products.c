/* Products: what they write, and with nothing to read or write. */
#include "layer.h"

static void test_product(int32_t dtype, int32_t x_layout, int32_t y_layout) {
    static operands o;
    for (int options = 0; options < 6; ++options) {
        init_operands(&o, TS_DDS_NT, dtype, x_layout, y_layout);
        o.desc.bias.data = options & 1 ? o.memory[3] : NULL;
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
        o.desc.accumulate = options % 2 ? TS_ACCUMULATE_VALUES : 0;
        if (options >= 2) give_bias_gradient(&o, options / 4);
        SUCCEEDS(run(&o));
        check_gradient_of_values(&o);
    }
}

/* Each CPU kernel by its number; those this processor cannot run refuse. */
static void test_forced_kernels(void) {
    static operands o;
    int ran = 0;
    for (int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel) {
        init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
        o.desc.kernel = kernel;
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
    INVALID(run(&o), "kernel");
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
    o.desc.values.data = NULL;
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
                o.desc.bias.data = o.memory[3];
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

void test_products(void) {
    for (int32_t dtype = TS_FLOAT64; dtype <= TS_FLOAT32; ++dtype)
        for (int32_t layouts = 0; layouts < 4; ++layouts) test_product(dtype, layouts & 1, layouts >> 1);
    test_forced_kernels();
    test_empty_products();
    test_no_features();
}
