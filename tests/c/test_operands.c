/* Memory of operands and workspaces that is refused. */
#include "layer.h"

#include <stdlib.h>

static void test_bad_operands(void) {
    REFUSES(TS_DDS_NT, o.desc.x.data = NULL, "x");
    REFUSES(TS_DDS_NT, o.desc.y.data = NULL, "y");
    REFUSES(TS_DDS_NT, o.desc.values.data = NULL, "values");
    REFUSES(TS_DDS_NT, o.desc.x.ld = IN - 1, "x.ld");
    REFUSES(TS_DDS_NT, o.desc.y.ld = OUT - 1, "y.ld");
    REFUSES(TS_DDS_NT, o.desc.x.ld = INT64_MAX, "x.ld");
    REFUSES(TS_DDS_NT, o.desc.x.data = (char*)o.memory[0] + 1, "x");
    REFUSES(TS_DDS_NT, o.desc.x.data = o.desc.y.data, "overlap");
    REFUSES(TS_DDS_NN, o.desc.x.data = o.desc.values.data, "overlap");
    REFUSES(TS_SDD_TN, o.desc.values.data = o.desc.y.data, "overlap");
    REFUSES(TS_DDS_NT, o.desc.bias.data = o.desc.y.data, "overlap");
    REFUSES(TS_DDS_NT, (give_residual(&o), o.desc.residual.layout = TS_COLUMN_MAJOR),
            "residual.layout must be y.layout, 0, got 1");
    REFUSES(TS_DDS_NT, (give_residual(&o), o.desc.residual.ld = OUT - 1), "residual.ld");
    REFUSES(TS_DDS_NT, (give_residual(&o), o.desc.residual.data = (char*)o.memory[4] + 1),
            "residual must be aligned to 4 bytes");
    REFUSES(TS_DDS_NT, (give_residual(&o), o.desc.residual.data = o.desc.y.data),
            "y and residual must not overlap in memory");
    REFUSES(TS_DDS_NT, (give_gate(&o), o.desc.gate.ld = OUT - 1), "gate.ld");
    REFUSES(TS_DDS_NT, (give_gate(&o), o.desc.gate.data = o.desc.y.data),
            "y and gate must not overlap in memory");
    REFUSES(TS_DDS_NT, o.desc.bias.data = (char*)o.memory[3] + 2, "bias.data must be aligned to 4 bytes");
    REFUSES(TS_DDS_NT, (o.desc.prepacked.data = o.desc.y.data, o.desc.prepacked.bytes = 4),
            "y and prepacked must not overlap in memory");
    REFUSES(TS_DDS_NT, (o.desc.plan.data = o.desc.y.data, o.desc.plan.bytes = 4),
            "y and plan must not overlap in memory");
    REFUSES(TS_DDS_NT, (o.desc.prepacked.data = o.memory[3], o.desc.prepacked.bytes = SIZE_MAX),
            "prepacked must end within the address space, got 18446744073709551615 bytes");
    REFUSES(TS_DDS_NT,
            (o.desc.tokens = INT32_MAX, o.pattern.in_features = INT32_MAX / BK * BK, o.desc.x.ld = INT32_MAX),
            "x must have at most 140737488355328 elements, got 2147483647 tokens of 2147483616 features");
    REFUSES(TS_DDS_NT, (o.desc.tokens = INT32_MAX, o.desc.x.dtype = TS_FLOAT64, o.desc.x.ld = INT32_MAX),
            "x.ld");
    REFUSES(TS_DDS_NT, (o.desc.tokens = 1 << 24, o.desc.x.data = (void*)(UINTPTR_MAX - 15)),
            "x must end within the address space, got 4496293876 bytes");
    REFUSES(TS_DDS_NT,
            (o.desc.device = TS_CUDA, o.desc.plan.data = (char*)o.memory[3] + 8, o.desc.x.ld = IN,
             o.desc.y.ld = OUT),
            "plan.data must be aligned to 16 bytes");
    REFUSES(
        TS_DDS_NT,
        (o.desc.device = TS_CUDA, o.desc.prepacked.data = (char*)0x1010, o.desc.x.ld = IN, o.desc.y.ld = OUT),
        "prepacked.data must be aligned to 256 bytes");
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.desc.tokens = INT32_MAX),
            "tokens must be 0 to 2147418112 on a CUDA device, got 2147483647");
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.pattern.out_features = INT32_MAX / BN * BN),
            "pattern.out_features must be 0 to 2147418112 on a CUDA device, got 2147483632");
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.desc.tokens = 1 << 20, o.desc.x.ld = 1 << 24),
            "x must have at most 4398046511104 bytes on a CUDA device, got 70368677069056");
    /* On CUDA 16 bytes of alignment are asked for; this is found before any device is looked for. */
    REFUSES(TS_DDS_NT, (o.desc.device = TS_CUDA, o.desc.x.data = (char*)o.memory[0] + 4), "x");
}

/* Kernels of the CPU read the pattern's arrays, those by column for dds_nn. */
static void test_missing_arrays(void) {
    REFUSES(TS_DDS_NT, o.pattern.row_ptr = NULL, "pattern.row_ptr must not be null: kernel");
    REFUSES(TS_DDS_NT, o.pattern.col_idx = NULL, "pattern.col_idx must not be null: kernel");
    REFUSES(TS_DDS_NT, o.pattern.row_slot = NULL, "pattern.row_slot must not be null: kernel");
    REFUSES(TS_SDD_TN, o.pattern.row_ptr = NULL, "pattern.row_ptr must not be null: kernel");
    REFUSES(TS_SDD_TN, o.pattern.row_slot = NULL, "pattern.row_slot must not be null: kernel");
    REFUSES(TS_DDS_NN, o.pattern.col_ptr = NULL, "pattern.col_ptr must not be null: kernel");
    REFUSES(TS_DDS_NN, o.pattern.row_idx = NULL, "pattern.row_idx must not be null: kernel");
    REFUSES(TS_DDS_NN, o.pattern.col_slot = NULL, "pattern.col_slot must not be null: kernel");
    REFUSES(TS_DDS_NT, o.pattern.row_ptr = (int32_t*)((char*)row_ptr + 2),
            "pattern.row_ptr must be aligned to 4 bytes");
}

/* Arrays that lead out of the weight or the values. */
static void test_wild_arrays(void) {
    static int32_t wild[4];
    for (int i = 0; i < 4; ++i) wild[i] = INT32_MAX - i;
    REFUSES_WITH(TS_INVALID_PATTERN, TS_DDS_NT, o.pattern.row_ptr = wild, "row_ptr");
    static int32_t crowded[ROWS + 1] = {0, NNZ, NNZ, NNZ}; /* a row with more blocks than columns */
    REFUSES_WITH(TS_INVALID_PATTERN, TS_DDS_NT, o.pattern.row_ptr = crowded, "row_ptr");
    REFUSES_WITH(TS_INVALID_PATTERN, TS_DDS_NT, o.pattern.col_idx = wild,
                 "col_idx must have entries 0 to 1, got 2147483647");
    REFUSES_WITH(TS_INVALID_PATTERN, TS_SDD_TN, o.pattern.row_slot = wild, "row_slot");
    REFUSES_WITH(TS_INVALID_PATTERN, TS_DDS_NN, o.pattern.col_ptr = wild, "col_ptr");
    REFUSES_WITH(TS_INVALID_PATTERN, TS_DDS_NN, o.pattern.row_idx = wild, "row_idx");
    wild[0] = -1;
    REFUSES_WITH(TS_INVALID_PATTERN, TS_DDS_NN, o.pattern.col_slot = wild, "col_slot");
}

/* A workspace of one byte less than asked for. */
static void test_small_workspace(void) {
    static operands o, before;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    INVALID(ts_matmul_workspace_size(NULL, NULL), "desc");
    INVALID(ts_matmul_workspace_size(&o.desc, NULL), "bytes");
    for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op) {
        init_operands(&o, op, TS_FLOAT32, TS_COLUMN_MAJOR, TS_COLUMN_MAJOR);
        size_t bytes = 0;
        SUCCEEDS(ts_matmul_workspace_size(&o.desc, &bytes));
        if (bytes == 0) continue;
        before = o;
        void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
        FAILS(ts_matmul(&o.desc, workspace, bytes - 1, NULL), TS_WORKSPACE_TOO_SMALL, "workspace_bytes");
        INVALID(ts_matmul(&o.desc, NULL, bytes, NULL), "workspace");
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
            init_operands(&o, op, TS_FLOAT32, TS_COLUMN_MAJOR, TS_COLUMN_MAJOR);
            SUCCEEDS(ts_matmul_workspace_size(&o.desc, &bytes));
            if (which == 0) o.desc.x.data = workspace;
            if (which == 1) o.desc.y.data = workspace;
            if (which == 2) o.desc.values.data = workspace;
            if (which == 3)
                *(op == TS_DDS_NN ? &o.pattern.row_idx : &o.pattern.col_idx) =
                    memcpy(workspace, op == TS_DDS_NN ? o.pattern.row_idx : o.pattern.col_idx,
                           (size_t)o.pattern.nnz * sizeof(int32_t));
            if (bytes == 0)
                SUCCEEDS(ts_matmul(&o.desc, workspace, sizeof workspace, NULL));
            else
                INVALID(ts_matmul(&o.desc, workspace, sizeof workspace, NULL),
                        "and workspace must not overlap in memory");
        }
    }
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.pattern.row_ptr = memcpy(o.desc.y.data, o.pattern.row_ptr, (OUT / BN + 1) * sizeof(int32_t));
    INVALID(ts_matmul(&o.desc, workspace, sizeof workspace, NULL),
            "pattern.row_ptr and y must not overlap in memory");
}

void test_memory_of_operands(void) {
    test_bad_operands();
    test_missing_arrays();
    test_wild_arrays();
    test_small_workspace();
    test_overlapping_workspace();
}
