/* Grouped products: each block row of the layer is a weight of its own. */
#include "layer.h"

enum { OF_ONE = OUT / ROWS };

static int32_t group_offsets[ROWS + 1] = {0, 2, 2, TOKENS};
static int32_t group_col_ptr[ROWS * COLS + 1], group_row_idx[NNZ], group_col_slot[NNZ];

/* The operands of `op`, y and what is like it having the features of one weight. */
static void init_grouped(operands* o, int32_t op) {
    init_operands(o, op, TS_FLOAT64, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o->pattern.groups = ROWS;
    o->pattern.col_ptr = group_col_ptr;
    o->pattern.row_idx = group_row_idx;
    o->pattern.col_slot = group_col_slot;
    o->desc.y.ld = OF_ONE + 3;
    o->desc.group_offsets = group_offsets;
}

static int group_of(int64_t token) {
    int group = 0;
    while (token >= group_offsets[group + 1]) ++group;
    return group;
}

static void test_transpose(void) {
    ts_pattern pattern = layer_pattern();
    pattern.groups = ROWS;
    pattern.col_ptr = group_col_ptr; /* of zeros */
    pattern.row_idx = group_row_idx;
    pattern.col_slot = group_col_slot;
    FAILS(ts_pattern_validate(&pattern), TS_INVALID_PATTERN, "col_ptr must be that of the transpose");
    SUCCEEDS(ts_pattern_transpose(&pattern, group_col_ptr, group_row_idx, group_col_slot));
    const int32_t ptr[ROWS * COLS + 1] = {0, 1, 2, 2, 2, 2, 3}, slots[NNZ] = {2, 0, 1}, rows[NNZ] = {0};
    CHECK(memcmp(group_col_ptr, ptr, sizeof ptr) == 0, "col_ptr differs");
    CHECK(memcmp(group_row_idx, rows, sizeof rows) == 0, "row_idx differs");
    CHECK(memcmp(group_col_slot, slots, sizeof slots) == 0, "col_slot differs");
    SUCCEEDS(ts_pattern_validate(&pattern));
}

static void test_forward(void) {
    static operands o;
    init_grouped(&o, TS_DDS_NT);
    o.desc.bias.data = o.memory[3];
    give_residual(&o);
    SUCCEEDS(run(&o));
    for (int64_t t = 0; t < TOKENS; ++t)
        for (int64_t n = 0; n < o.desc.y.ld; ++n) {
            const int64_t row = group_of(t) * OF_ONE + n;
            double sum = n < OF_ONE ? get(&o, 3, row) + get(&o, 4, at(&o.desc.residual, t, n)) : kUntouched;
            for (int64_t k = 0; n < OF_ONE && k < IN; ++k) sum += x_at(&o, t, k) * weight(&o, row, k);
            CHECK(y_at(&o, t, n) == sum, "y[%d, %d] is %g, not %g", (int)t, (int)n, y_at(&o, t, n), sum);
        }
}

static void test_gradient_of_x(void) {
    static operands o;
    init_grouped(&o, TS_DDS_NN);
    SUCCEEDS(run(&o));
    for (int64_t t = 0; t < TOKENS; ++t)
        for (int64_t k = 0; k < IN; ++k) {
            double sum = 0;
            for (int64_t n = 0; n < OF_ONE; ++n)
                sum += y_at(&o, t, n) * weight(&o, group_of(t) * OF_ONE + n, k);
            CHECK(x_at(&o, t, k) == sum, "x[%d, %d] is %g, not %g", (int)t, (int)k, x_at(&o, t, k), sum);
        }
}

static void test_gradient_of_values(int32_t accumulate) {
    static operands o;
    init_grouped(&o, TS_SDD_TN);
    o.desc.accumulate = accumulate ? TS_ACCUMULATE_VALUES : 0;
    SUCCEEDS(run(&o));
    for (int64_t n = 0; n < OUT; ++n)
        for (int64_t k = 0; k < IN; ++k) {
            double sum = accumulate ? kUntouched : 0;
            for (int64_t t = 0; t < TOKENS; ++t)
                if (group_of(t) == n / OF_ONE) sum += y_at(&o, t, n % OF_ONE) * x_at(&o, t, k);
            for (int32_t e = row_ptr[n / BN]; e < row_ptr[n / BN + 1]; ++e)
                if (col_idx[e] == k / BK)
                    CHECK(weight(&o, n, k) == sum, "W[%d, %d] is %g, not %g", (int)n, (int)k,
                          weight(&o, n, k), sum);
        }
}

static void test_sums(void) {
    static operands o;
    init_grouped(&o, TS_SDD_TN);
    double* const sums = o.memory[3];
    for (int i = 0; i <= OUT; ++i) sums[i] = kUntouched;
    const ts_matrix matrix = {o.desc.y.data, o.desc.y.ld, o.desc.y.layout, 0}, *const y = &matrix;
    SUCCEEDS(
        ts_group_sums(TS_CPU, TS_FLOAT64, TS_FLOAT64, TOKENS, OF_ONE, ROWS, y, group_offsets, sums, NULL));
    for (int64_t n = 0; n < OUT; ++n) {
        double sum = 0;
        for (int64_t t = 0; t < TOKENS; ++t)
            if (group_of(t) == n / OF_ONE) sum += y_at(&o, t, n % OF_ONE);
        CHECK(sums[n] == sum, "sums[%d] is %g, not %g", (int)n, sums[n], sum);
    }
    CHECK(sums[OUT] == kUntouched, "written behind the sums");
    const int32_t descending[] = {0, 3, 2, TOKENS};
#define REFUSES_SUMS(mention, ...) INVALID(ts_group_sums(__VA_ARGS__, NULL), mention)
    REFUSES_SUMS("dtype must be 1 to 4", 0, TS_INT8, TS_INT8, TOKENS, OF_ONE, ROWS, y, group_offsets, sums);
    REFUSES_SUMS("result_dtype must be dtype, 1, got 2", 0, TS_FLOAT64, TS_FLOAT32, TOKENS, OF_ONE, ROWS, y,
                 group_offsets, sums);
    REFUSES_SUMS("groups must be 1 to 1024, got 0", 0, TS_FLOAT64, TS_FLOAT64, TOKENS, OF_ONE, 0, y,
                 group_offsets, sums);
    REFUSES_SUMS("features must be a multiple of 16", 0, TS_FLOAT64, TS_FLOAT64, TOKENS, 8, ROWS, y,
                 group_offsets, sums);
    REFUSES_SUMS("y must not be null", 0, TS_FLOAT64, TS_FLOAT64, TOKENS, OF_ONE, ROWS, NULL, group_offsets,
                 sums);
    REFUSES_SUMS("group_offsets must not be null", 0, TS_FLOAT64, TS_FLOAT64, TOKENS, OF_ONE, ROWS, y, NULL,
                 sums);
    REFUSES_SUMS("sums must not be null", 0, TS_FLOAT64, TS_FLOAT64, TOKENS, OF_ONE, ROWS, y, group_offsets,
                 NULL);
    REFUSES_SUMS("group_offsets must ascend", 0, TS_FLOAT64, TS_FLOAT64, TOKENS, OF_ONE, ROWS, y, descending,
                 sums);
    REFUSES_SUMS("y and sums must not overlap", 0, TS_FLOAT64, TS_FLOAT64, TOKENS, OF_ONE, ROWS, y,
                 group_offsets, y->data);
}

/* As REFUSES, of a grouped product. */
#define REFUSES_GROUPED(op_, change, mention)                                                 \
    do {                                                                                      \
        static operands o, before;                                                            \
        init_grouped(&o, (op_));                                                              \
        change;                                                                               \
        before = o;                                                                           \
        static double workspace[1 << 16];                                                     \
        INVALID(ts_matmul(&o.desc, workspace, sizeof workspace, NULL), mention);              \
        CHECK(memcmp(before.memory, o.memory, sizeof o.memory) == 0, "%s: written", #change); \
    } while (0)

static void test_refused(void) {
    static int32_t late[] = {1, 2, 2, TOKENS}, descending[] = {0, 3, 2, TOKENS}, short_of[] = {0, 2, 2, 4};
    REFUSES_GROUPED(TS_DDS_NT, o.pattern.groups = -1, "pattern.groups must be 0 to 1024, got -1");
    REFUSES_GROUPED(TS_DDS_NT, o.pattern.groups = 1025, "pattern.groups");
    REFUSES_GROUPED(
        TS_DDS_NT, o.pattern.groups = 2,
        "pattern.out_features must be the same number of block rows for each of pattern.groups, 2");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.group_offsets = NULL,
                    "group_offsets must not be null for a pattern of 3 groups");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.group_offsets = (int32_t*)((char*)group_offsets + 1),
                    "group_offsets must be aligned to 4 bytes");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.group_offsets = late, "group_offsets[0] must be 0, got 1");
    REFUSES_GROUPED(TS_DDS_NN, o.desc.group_offsets = descending,
                    "group_offsets must ascend, got 2 after 3 at 2");
    REFUSES_GROUPED(TS_SDD_TN, o.desc.group_offsets = short_of, "group_offsets[3] must be tokens, 5, got 4");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.group_offsets = o.desc.y.data,
                    "y and group_offsets must not overlap in memory");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.x.layout = TS_COLUMN_MAJOR, "x.layout must be 0 for a grouped product");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.y.layout = TS_COLUMN_MAJOR, "y.layout must be 0 for a grouped product");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.prepacked.data = o.memory[4], "prepacked.data must be null");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.policy = TS_POLICY_DENSE,
                    "policy must be 0 or 1 for a grouped product");
    REFUSES_GROUPED(TS_SDD_TN, give_bias_gradient(&o, 0), "ts_group_sums");
    REFUSES_GROUPED(TS_DDS_NT, o.desc.y.ld = OF_ONE - 1, "y.ld must be at least 16");
}

static void test_selected(void) {
    static operands o;
    init_grouped(&o, TS_DDS_NT);
    o.desc.policy = TS_POLICY_AUTO;
    ts_device_info device = {.struct_size = sizeof device};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &device));
    int32_t kernel = -7;
    SUCCEEDS(ts_matmul_select(&o.desc, &device, &kernel, NULL, 0));
    CHECK(kernel >= 1 && strncmp(kernel_name(kernel), "cpu", 3) == 0, "kernel %d", (int)kernel);
}

void test_groups(void) {
    test_transpose();
    test_forward();
    test_gradient_of_x();
    test_gradient_of_values(0);
    test_gradient_of_values(1);
    test_sums();
    test_refused();
    test_selected();
}
