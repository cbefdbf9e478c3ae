/* Plans, and values in the order of one. */
#include "layer.h"

#include <stdlib.h>

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
        INVALID(ts_plan_build(pattern, kernel, op, NULL, bytes), "plan");
    }
    SUCCEEDS(ts_plan_build(pattern, kernel, op, plan, bytes));
    CHECK(plan[bytes] == 0xa5, "written behind the plan");
    free(plan);
}

static void test_built_plans(void) {
    ts_pattern pattern = layer_pattern();
    pattern.in_features = pattern.in_features / pattern.block_cols * pattern.block_rows;
    pattern.block_cols = pattern.block_rows; /* every kernel takes small square blocks */
    ts_kernel_info info = {.struct_size = sizeof info};
    for (int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel) {
        SUCCEEDS(ts_kernel_get(kernel, &info));
        for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op)
            if (info.ops >> op & 1) check_plan(&pattern, kernel, op, info.plan != 0);
    }
    size_t bytes = 0;
    INVALID(ts_plan_size(NULL, 1, TS_DDS_NT, &bytes), "pattern");
    INVALID(ts_plan_size(&pattern, 1, TS_DDS_NT, NULL), "bytes");
    INVALID(ts_plan_size(&pattern, -1, TS_DDS_NT, &bytes), "kernel");
    INVALID(ts_plan_size(&pattern, 1, 3, &bytes), "op");
    pattern.col_ptr = NULL;
    INVALID(ts_plan_build(&pattern, 1, TS_DDS_NT, NULL, 0), "col_ptr");
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
    for (int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel) {
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
    INVALID(ts_plan_key(NULL, 1, TS_DDS_NT, &key), "pattern");
    INVALID(ts_plan_key(&pattern, 1, TS_DDS_NT, NULL), "key");
    INVALID(ts_plan_key(&pattern, -1, TS_DDS_NT, &key), "kernel");
    INVALID(ts_plan_key(&pattern, 1, -1, &key), "op");
    SUCCEEDS(ts_plan_check()); /* no product has run */
}

/* A product takes no plan that was made for other kernels. No address is followed. */
static void test_foreign_plan(void) {
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) != TS_SUCCESS) return;
    REFUSES(TS_DDS_NT,
            (o.desc.device = TS_CUDA, o.desc.tokens = 1 << 20, o.desc.x.ld = IN, o.desc.y.ld = OUT,
             o.desc.x.data = (void*)(1ull << 40), o.desc.y.data = (void*)(2ull << 40),
             o.desc.plan.data = o.memory[3], o.desc.plan.bytes = 64, o.desc.plan.key = 1),
            "plan.key must be");
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
    for (int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel) {
        SUCCEEDS(ts_kernel_get(kernel, &info));
        const int32_t op = info.ops >> TS_SDD_TN & 1 ? TS_SDD_TN : info.ops >> TS_DDS_NN & 1;
        size_t bytes = 0;
        if (info.plan != 0)
            FAILS(ts_plan_size(&pattern, kernel, op, &bytes), TS_UNSUPPORTED, "blocks, kept or not");
        else
            SUCCEEDS(ts_plan_size(&pattern, kernel, op, &bytes));
    }
    free(no_blocks);
}

/* Products on the CPU read values as they are. */
static void test_packing(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    size_t bytes = 1;
    SUCCEEDS(ts_values_prepacked_size(&o.desc, &bytes));
    CHECK(bytes == 0, "%d bytes", (int)bytes);
    SUCCEEDS(ts_values_prepack(&o.desc, NULL, 0, NULL));
    o.desc.prepacked.data = o.memory[4];
    o.desc.prepacked.key = 7; /* of whatever kernel: this one reads no prepacked values */
    SUCCEEDS(run(&o));
    check_forward(&o);
    INVALID(ts_values_prepacked_size(NULL, &bytes), "desc");
    INVALID(ts_values_prepacked_size(&o.desc, NULL), "bytes");
    INVALID(ts_values_prepack(NULL, NULL, 0, NULL), "desc");
    o.desc.op = 3;
    INVALID(ts_values_prepack(&o.desc, NULL, 0, NULL), "op");
}

/* On the GPU plans are made of patterns in its memory alone, and in a library with CUDA alone. */
static void test_plans_on_the_device(void) {
    const int has_cuda = strstr(ts_architectures(), "sm_") != NULL;
    ts_pattern pattern = layer_pattern();
    ts_kernel_info info = {.struct_size = sizeof info};
    size_t plan = 0, workspace = 0;
    char memory[16];
    INVALID(ts_plan_device_size(NULL, 1, TS_DDS_NT, &plan, &workspace), "pattern");
    INVALID(ts_plan_device_size(&pattern, -1, TS_DDS_NT, &plan, &workspace), "kernel");
    INVALID(ts_plan_device_size(&pattern, 1, 3, &plan, &workspace), "op");
    INVALID(ts_plan_device_size(&pattern, 1, TS_DDS_NT, NULL, &workspace), "plan_bytes");
    INVALID(ts_plan_device_size(&pattern, 1, TS_DDS_NT, &plan, NULL), "workspace_bytes");
    INVALID(ts_pattern_device_transpose_size(&pattern, NULL), "workspace_bytes");
    ts_array_pair pair = {.first = col_ptr, .second = row_idx, .count = 1};
    INVALID(ts_arrays_compare(NULL, 1, 1, NULL), "pairs must not be null");
    INVALID(ts_arrays_compare(&pair, -1, 1, NULL), "count must be 0 to 16777216, got -1");
    INVALID(ts_arrays_compare(&pair, 1, 0, NULL),
            "mark must not be 0, which means that a pair does not differ");
    FAILS(ts_arrays_compare(&pair, 1, 1, NULL), has_cuda ? TS_INVALID_ARGUMENT : TS_UNSUPPORTED,
          has_cuda ? "must be in pinned memory" : "CUDA");
    CHECK(pair.differs == 0, "the pair has the mark %d", (int)pair.differs);
    if (!has_cuda) {
        FAILS(ts_plan_device_size(&pattern, 1, TS_DDS_NT, &plan, &workspace), TS_UNSUPPORTED, "CUDA");
        FAILS(ts_plan_device_build(&pattern, 1, TS_DDS_NT, memory, 16, memory, 16, NULL), TS_UNSUPPORTED,
              "CUDA");
        FAILS(ts_pattern_device_transpose_size(&pattern, &workspace), TS_UNSUPPORTED, "CUDA");
        FAILS(ts_pattern_device_transpose(&pattern, col_ptr, row_idx, col_slot, memory, 16, NULL),
              TS_UNSUPPORTED, "CUDA");
        return;
    }
    for (int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel) {
        SUCCEEDS(ts_kernel_get(kernel, &info));
        const int32_t op = info.ops >> TS_SDD_TN & 1 ? TS_SDD_TN : info.ops >> TS_DDS_NN & 1;
        /* The blocks of this pattern are none for kernels that want square ones. */
        if (ts_plan_device_size(&pattern, kernel, op, &plan, &workspace) != TS_SUCCESS) continue;
        CHECK((plan > 0) == (info.plan != 0), "kernel %d has a plan of %d bytes", (int)kernel, (int)plan);
        if (plan > 0)
            INVALID(ts_plan_device_build(&pattern, kernel, op, memory, plan, memory, workspace, NULL),
                    "must be in memory of a CUDA device");
    }
    SUCCEEDS(ts_pattern_device_transpose_size(&pattern, &workspace));
    INVALID(ts_pattern_device_transpose(&pattern, col_ptr, row_idx, col_slot, memory, workspace, NULL),
            "must be in memory of a CUDA device");
}

void test_plans(void) {
    test_built_plans();
    test_plan_keys();
    test_foreign_plan();
    test_vast_plans();
    test_packing();
    test_plans_on_the_device();
}
