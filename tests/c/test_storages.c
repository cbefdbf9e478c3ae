/* Values in fewer bytes. */
#include "stored.h"

#include <stdlib.h>

/* Lets a product multiply by stored values; operand 2 then holds what these stand for. */
static void give_stored(operands* o, stored* s, int32_t dtype, int32_t storage, int32_t row_scales) {
    init_stored(s, dtype);
    if (dtype != TS_INT4) SUCCEEDS(compress(s, &o->pattern));
    o->desc.storage = storage;
    o->desc.values = storage == TS_STORAGE_DENSE ? s->values : s->compressed;
    o->desc.metadata = storage == TS_STORAGE_DENSE ? NULL : s->metadata;
    if (dtype != TS_FLOAT32) {
        o->desc.values_dtype = dtype + 1;
        o->desc.scales = s->scales;
        o->desc.row_scales = row_scales;
    }
    for (int i = 0; i < COUNT; ++i) {
        const double scale = dtype == TS_FLOAT32 ? 1 : s->scales[row_scales ? i / BK : i / (BN * BK)];
        const int is_there = storage == TS_STORAGE_DENSE || is_kept(s, i);
        put(o, 2, i, is_there ? number_at(s->values, dtype, i) * scale : 0);
    }
}

static void test_stored_values(int32_t dtype, int32_t storage, int32_t row_scales) {
    static operands o;
    static stored s;
    static float plain[COUNT + 1];
    for (int32_t op = TS_DDS_NT; op <= TS_DDS_NN; ++op) {
        init_operands(&o, op, TS_FLOAT32, TS_ROW_MAJOR, TS_COLUMN_MAJOR);
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
    CHECK(strstr(reason, "it is given dense blocks") != NULL, "%s", reason);
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
            "metadata must be null unless storage is TS_STORAGE_2_4");
    REFUSES(TS_DDS_NT, o.desc.storage = TS_STORAGE_2_4, TS_INVALID_ARGUMENT, "metadata must not be null");
    REFUSES(
        TS_DDS_NT, o.desc.values_dtype = TS_FLOAT16 + 1, TS_INVALID_ARGUMENT,
        "values_dtype must be that of the activations, float32, or int8, float8_e4m3fn or int4, got float16");
    REFUSES(TS_DDS_NT, o.desc.values_dtype = INT8, TS_INVALID_ARGUMENT,
            "scales must not be null for values of int8");
    REFUSES(TS_DDS_NT, o.desc.scales = (float*)o.memory[3], TS_INVALID_ARGUMENT,
            "scales must be null for values of float32");
    REFUSES(TS_DDS_NT, o.desc.row_scales = 1, TS_INVALID_ARGUMENT,
            "row_scales must be 0 for values of float32");
    REFUSES(TS_DDS_NN, o.desc.dtype = TS_INT8, TS_INVALID_ARGUMENT, "dtype must be 0 to 3, got 4");
    REFUSES(TS_DDS_NT, o.desc.result_dtype = INT8, TS_INVALID_ARGUMENT, "result_dtype must be 0 to 4, got 5");
    REFUSES(TS_SDD_TN, (o.desc.storage = TS_STORAGE_2_4, o.desc.metadata = o.memory[3]), TS_INVALID_ARGUMENT,
            "storage must be 0 for sdd_tn, which writes dense blocks, got 1");
    REFUSES(TS_SDD_TN, (o.desc.values_dtype = INT8, o.desc.scales = (float*)o.memory[3]), TS_INVALID_ARGUMENT,
            "values_dtype must be result_dtype for sdd_tn, float32, got int8");
    REFUSES_STORED(TS_DDS_NN, TS_INT8, 0, o.desc.row_scales = 2, TS_INVALID_ARGUMENT,
                   "row_scales must be 0 or 1 unless x has 8 bits, got 2");
    REFUSES_STORED(TS_DDS_NN, TS_INT8, 0, o.desc.scales = (float*)((char*)s.scales + 1), TS_INVALID_ARGUMENT,
                   "scales must be aligned to 4 bytes");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.scales = (float*)o.memory[1], TS_INVALID_ARGUMENT,
                   "y and scales must not overlap in memory");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.values = o.memory[1], TS_INVALID_ARGUMENT,
                   "y and values must not overlap in memory");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.values = NULL, TS_INVALID_ARGUMENT,
                   "values must not be null");
    REFUSES_STORED(TS_DDS_NT, TS_INT4, 0, o.desc.scales = NULL, TS_INVALID_ARGUMENT,
                   "scales must not be null for values of int4");
    REFUSES_STORED(TS_DDS_NT, TS_INT4, 0, o.desc.dtype = TS_INT4, TS_INVALID_ARGUMENT,
                   "dtype must be 0 to 5, got 6");
    REFUSES_STORED(TS_DDS_NT, TS_INT4, 0, (o.desc.storage = TS_STORAGE_2_4, o.desc.metadata = s.metadata),
                   TS_INVALID_ARGUMENT, "storage must be 0 for values of int4, got 1");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.desc.metadata = (char*)s.metadata + 2, TS_INVALID_ARGUMENT,
                   "metadata must be aligned to 4 bytes");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.desc.metadata = o.memory[1], TS_INVALID_ARGUMENT,
                   "y and metadata must not overlap in memory");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.pattern.block_cols = 16, TS_INVALID_ARGUMENT,
                   "pattern.block_cols must be 32, 64 or 128 for TS_STORAGE_2_4, got 16");
    REFUSES_STORED(
        TS_DDS_NT, TS_FLOAT32, 1,
        (o.desc.device = TS_CUDA, o.desc.x.ld = IN, o.desc.y.ld = 8, o.desc.metadata = s.metadata + 1),
        TS_INVALID_ARGUMENT, "metadata must be aligned to 16 bytes");
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
    REFUSES_EXPANSION(plain = NULL, TS_INVALID_ARGUMENT, "dense must not be null");
    REFUSES_EXPANSION(plain = (char*)memory + 2, TS_INVALID_ARGUMENT, "dense must be aligned to 4 bytes");
    REFUSES_EXPANSION(--bytes, TS_WORKSPACE_TOO_SMALL, "dense_bytes must be at least 6144, got 6143");
    REFUSES_EXPANSION(plain = s.compressed, TS_INVALID_ARGUMENT,
                      "values and dense must not overlap in memory");
    REFUSES_EXPANSION(o.desc.metadata = memory, TS_INVALID_ARGUMENT,
                      "metadata and dense must not overlap in memory");
    REFUSES_EXPANSION(o.desc.scales = memory, TS_INVALID_ARGUMENT,
                      "scales and dense must not overlap in memory");
    REFUSES_EXPANSION(o.desc.values = NULL, TS_INVALID_ARGUMENT, "values must not be null");
    REFUSES_EXPANSION(o.desc.scales = NULL, TS_INVALID_ARGUMENT,
                      "scales must not be null for values of int8");
    REFUSES_EXPANSION(o.desc.op = TS_SDD_TN, TS_INVALID_ARGUMENT, "sdd_tn");
    REFUSES_EXPANSION((o.desc.op = TS_SDD_TN, o.desc.storage = 0, o.desc.metadata = NULL,
                       o.desc.scales = NULL, o.desc.values_dtype = 0),
                      TS_INVALID_ARGUMENT, "op must be dds_nt or dds_nn, got 2");
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS) return;
    REFUSES_EXPANSION(o.desc.device = TS_CUDA, TS_NO_DEVICE, "CUDA");
}

void test_storages(void) {
    for (int32_t dtype = TS_INT8; dtype <= TS_FLOAT8_E4M3FN; ++dtype)
        for (int32_t option = 0; option < 4; ++option) test_stored_values(dtype, option & 1, option >> 1);
    for (int32_t row_scales = 0; row_scales < 2; ++row_scales)
        test_stored_values(TS_INT4, TS_STORAGE_DENSE, row_scales);
    test_stored_values(TS_FLOAT32, TS_STORAGE_2_4, 0);
    test_room_for_the_expansion();
    test_bad_storages();
    test_bad_expansions();
}
