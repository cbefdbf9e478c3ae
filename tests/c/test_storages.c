/* Values in fewer bytes. */
#include "stored.h"

#include <stdlib.h>

/* Lets a product multiply by stored values; operand 2 then holds what these stand for. */
static void give_stored(operands* o, stored* s, int32_t dtype, int32_t storage, int32_t per_row) {
    init_stored(s, dtype);
    if (dtype != TS_INT4) SUCCEEDS(compress(s, &o->pattern));
    o->desc.values.storage = storage;
    o->desc.values.data = storage == TS_STORAGE_DENSE ? s->values : s->compressed;
    o->desc.values.metadata = storage == TS_STORAGE_DENSE ? NULL : s->metadata;
    if (dtype != TS_FLOAT32) {
        o->desc.values.dtype = dtype;
        o->desc.values.scales = s->scales;
        o->desc.values.granularity = per_row ? TS_SCALES_PER_ROW : TS_SCALES_PER_BLOCK;
    }
    for (int i = 0; i < COUNT; ++i) {
        const double scale = dtype == TS_FLOAT32 ? 1 : s->scales[per_row ? i / BK : i / (BN * BK)];
        const int is_there = storage == TS_STORAGE_DENSE || is_kept(s, i);
        put(o, 2, i, is_there ? number_at(s->values, dtype, i) * scale : 0);
    }
}

static void test_stored_values(int32_t dtype, int32_t storage, int32_t per_row) {
    static operands o;
    static stored s;
    static float dense[COUNT + 1];
    for (int32_t op = TS_DDS_NT; op <= TS_DDS_NN; ++op) {
        init_operands(&o, op, TS_FLOAT32, TS_ROW_MAJOR, TS_COLUMN_MAJOR);
        give_stored(&o, &s, dtype, storage, per_row);
        SUCCEEDS(run(&o));
        if (op == TS_DDS_NT)
            check_forward(&o);
        else
            check_gradient_of_x(&o);
        dense[COUNT] = 77;
        SUCCEEDS(ts_values_dequantize(&o.desc, dense, COUNT * sizeof(float), NULL));
        for (int i = 0; i < COUNT; ++i)
            CHECK(dense[i] == get(&o, 2, i), "value %d is %g, not %g", i, dense[i], get(&o, 2, i));
        CHECK(dense[COUNT] == 77, "written behind dense blocks");
    }
}

/* Kernels that are given dense blocks have room for it in the workspace, say so and prepack nothing. */
static void test_room_for_dense_blocks(void) {
    static operands o;
    static stored s;
    const ts_device_info gpu = h100();
    char reason[256] = "";
    int32_t kernel = 0;
    size_t without = 0, with = 0, prepacked = 1;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    SUCCEEDS(ts_matmul_workspace_size(&o.desc, &without));
    give_stored(&o, &s, TS_INT8, TS_STORAGE_2_4, 1);
    SUCCEEDS(ts_matmul_workspace_size(&o.desc, &with));
    CHECK(with >= without + COUNT * sizeof(float), "%d bytes instead of %d", (int)with, (int)without);
    SUCCEEDS(ts_values_prepacked_size(&o.desc, &prepacked));
    CHECK(prepacked == 0, "%d bytes", (int)prepacked);
    void* workspace = aligned_alloc(256, (with / 256 + 1) * 256);
    FAILS(ts_matmul(&o.desc, workspace, with - 1, NULL), TS_WORKSPACE_TOO_SMALL, "workspace_bytes");
    free(workspace);
    ts_device_info cpu = {.struct_size = sizeof cpu};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, reason, sizeof reason));
    CHECK(strstr(reason, "it is given dense blocks") != NULL, "%s", reason);
    if (strstr(ts_architectures(), "sm_") == NULL) return;
    o.desc.device = TS_CUDA;
    o.desc.x.dtype = o.desc.y.dtype = TS_FLOAT16;
    SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0));
}

/* Nothing of x, y and values is written by products that are refused, nor of dense blocks. */
#define REFUSES_STORED(op_, dtype, storage_, change, mention)                           \
    do {                                                                                \
        static stored s;                                                                \
        REFUSES((op_), (give_stored(&o, &s, (dtype), (storage_), 1), change), mention); \
    } while (0)

static void test_bad_storages(void) {
    REFUSES(TS_DDS_NT, o.desc.values.metadata = o.memory[3],
            "values.metadata must be null unless values.storage is TS_STORAGE_2_4");
    REFUSES(TS_DDS_NT, o.desc.values.storage = TS_STORAGE_2_4, "values.metadata must not be null");
    REFUSES(
        TS_DDS_NT, o.desc.values.dtype = TS_FLOAT16,
        "values.dtype must be that of the activations, float32, or int8, float8_e4m3fn or int4, got float16");
    REFUSES(TS_DDS_NT, (o.desc.values.dtype = TS_INT8, o.desc.values.granularity = TS_SCALES_PER_ROW),
            "values.scales must not be null for values of int8");
    REFUSES(TS_DDS_NT, o.desc.values.scales = (float*)o.memory[3],
            "values.scales must be null for values of float32");
    REFUSES(TS_DDS_NT, o.desc.values.granularity = 1,
            "values.granularity must be 0 for values of float32, got 1");
    REFUSES(TS_DDS_NN, o.desc.x.dtype = TS_INT8, "x.dtype must be 0 to 4, got 5");
    REFUSES(TS_DDS_NT, o.desc.y.dtype = TS_INT8, "y.dtype must be 0 to 4, got 5");
    REFUSES(TS_SDD_TN, (o.desc.values.storage = TS_STORAGE_2_4, o.desc.values.metadata = o.memory[3]),
            "values.storage must be 0 for sdd_tn, which writes dense blocks, got 1");
    REFUSES(TS_SDD_TN, (o.desc.values.dtype = TS_INT8, o.desc.values.scales = (float*)o.memory[3]),
            "values.dtype must be 0 to 4, got 5");
    REFUSES_STORED(TS_DDS_NN, TS_INT8, 0, o.desc.values.granularity = TS_SCALES_PER_FEATURE,
                   "values.granularity must be 1 or 2 for values of int8 unless x has 8 bits, got 3");
    REFUSES_STORED(TS_DDS_NN, TS_INT8, 0, o.desc.values.scales = (float*)((char*)s.scales + 1),
                   "values.scales must be aligned to 4 bytes");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.values.scales = (float*)o.memory[1],
                   "y and values.scales must not overlap in memory");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.values.data = o.memory[1],
                   "y and values must not overlap in memory");
    REFUSES_STORED(TS_DDS_NT, TS_INT8, 0, o.desc.values.data = NULL, "values.data must not be null");
    REFUSES_STORED(TS_DDS_NT, TS_INT4, 0, o.desc.values.scales = NULL,
                   "values.scales must not be null for values of int4");
    REFUSES_STORED(TS_DDS_NT, TS_INT4, 0, o.desc.x.dtype = TS_INT4, "x.dtype must be 1 to 6, got 7");
    REFUSES_STORED(TS_DDS_NT, TS_INT4, 0,
                   (o.desc.values.storage = TS_STORAGE_2_4, o.desc.values.metadata = s.metadata),
                   "values.storage must be 0 for values of int4, got 1");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.desc.values.metadata = (char*)s.metadata + 2,
                   "values.metadata must be aligned to 4 bytes");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.desc.values.metadata = o.memory[1],
                   "y and values.metadata must not overlap in memory");
    REFUSES_STORED(TS_DDS_NT, TS_FLOAT32, 1, o.pattern.block_cols = 16,
                   "pattern.block_cols must be 32, 64 or 128 for TS_STORAGE_2_4, got 16");
    REFUSES_STORED(
        TS_DDS_NT, TS_FLOAT32, 1,
        (o.desc.device = TS_CUDA, o.desc.x.ld = IN, o.desc.y.ld = 8, o.desc.values.metadata = s.metadata + 1),
        "values.metadata must be aligned to 16 bytes");
}

/* After `change` of a product with values of 8 bits in 2:4, dense blocks are refused and not written. */
#define REFUSES_DENSE_BLOCKS(change, mention) REFUSES_DENSE_BLOCKS_WITH(TS_INVALID_ARGUMENT, change, mention)
#define REFUSES_DENSE_BLOCKS_WITH(expected, change, mention)                         \
    do {                                                                             \
        static operands o;                                                           \
        static stored s;                                                             \
        static float memory[COUNT];                                                  \
        void* dense = memory;                                                        \
        size_t bytes = sizeof memory;                                                \
        init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);        \
        give_stored(&o, &s, TS_INT8, TS_STORAGE_2_4, 0);                             \
        memset(memory, 0xa5, sizeof memory);                                         \
        change;                                                                      \
        FAILS(ts_values_dequantize(&o.desc, dense, bytes, NULL), expected, mention); \
        for (size_t i = 0; i < sizeof memory; ++i)                                   \
            CHECK(((unsigned char*)memory)[i] == 0xa5, "%s: written", #change);      \
    } while (0)

static void test_bad_dense_blocks(void) {
    INVALID(ts_values_dequantize(NULL, NULL, 0, NULL), "desc");
    REFUSES_DENSE_BLOCKS(dense = NULL, "dense must not be null");
    REFUSES_DENSE_BLOCKS(dense = (char*)memory + 2, "dense must be aligned to 4 bytes");
    REFUSES_DENSE_BLOCKS_WITH(TS_WORKSPACE_TOO_SMALL, --bytes, "dense_bytes must be at least 6144, got 6143");
    REFUSES_DENSE_BLOCKS(dense = s.compressed, "values and dense must not overlap in memory");
    REFUSES_DENSE_BLOCKS(o.desc.values.metadata = memory,
                         "values.metadata and dense must not overlap in memory");
    REFUSES_DENSE_BLOCKS(o.desc.values.scales = memory, "values.scales and dense must not overlap in memory");
    REFUSES_DENSE_BLOCKS(o.desc.values.data = NULL, "values.data must not be null");
    REFUSES_DENSE_BLOCKS(o.desc.values.scales = NULL, "values.scales must not be null for values of int8");
    REFUSES_DENSE_BLOCKS(o.desc.op = TS_SDD_TN, "values.dtype must be 0 to 4, got 5");
    REFUSES_DENSE_BLOCKS(
        (o.desc.op = TS_SDD_TN, o.desc.values.storage = 0, o.desc.values.metadata = NULL,
         o.desc.values.scales = NULL, o.desc.values.dtype = 0, o.desc.values.granularity = 0),
        "op must be dds_nt or dds_nn, got 2");
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS) return;
    REFUSES_DENSE_BLOCKS_WITH(TS_NO_DEVICE, o.desc.device = TS_CUDA, "CUDA");
}

void test_storages(void) {
    for (int32_t dtype = TS_INT8; dtype <= TS_FLOAT8_E4M3FN; ++dtype)
        for (int32_t option = 0; option < 4; ++option) test_stored_values(dtype, option & 1, option >> 1);
    for (int32_t per_row = 0; per_row < 2; ++per_row) test_stored_values(TS_INT4, TS_STORAGE_DENSE, per_row);
    test_stored_values(TS_FLOAT32, TS_STORAGE_2_4, 0);
    test_room_for_dense_blocks();
    test_bad_storages();
    test_bad_dense_blocks();
}
