/* One product on the CPU, in a program of one file that other builds of the library are tried with. */
#include <stdio.h>
#include <stdlib.h>

#include <tilesparse/tilesparse.h>

#define REQUIRE(condition)                                                               \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, ts_last_error()); \
            return 1;                                                                    \
        }                                                                                \
    } while (0)

enum { BLOCK = 16, TOKENS = 3 };

int main(void) {
    REQUIRE(ts_abi_version() == TS_ABI_VERSION);
    ts_device_info device = {.struct_size = sizeof device};
    REQUIRE(ts_device_get(TS_CPU, -1, &device) == TS_SUCCESS && device.multiprocessors > 0);

    const int32_t ptr[2] = {0, 1}, zero[1] = {0};
    static float x[TOKENS * BLOCK], y[TOKENS * BLOCK], values[BLOCK * BLOCK];
    for (int i = 0; i < TOKENS * BLOCK; ++i) x[i] = 1;
    for (int i = 0; i < BLOCK * BLOCK; ++i) values[i] = (float)(i / BLOCK);
    ts_pattern pattern = {.struct_size = sizeof pattern,
                          .block_rows = BLOCK,
                          .block_cols = BLOCK,
                          .out_features = BLOCK,
                          .in_features = BLOCK,
                          .nnz = 1,
                          .row_ptr = ptr,
                          .col_idx = zero,
                          .row_slot = zero,
                          .col_ptr = ptr,
                          .row_idx = zero,
                          .col_slot = zero};
    ts_matmul_desc desc = {.struct_size = sizeof desc, .dtype = TS_FLOAT32};
    desc.tokens = TOKENS;
    desc.pattern = &pattern;
    desc.x = (ts_matrix){x, BLOCK, TS_ROW_MAJOR, 0};
    desc.y = (ts_matrix){y, BLOCK, TS_ROW_MAJOR, 0};
    desc.values = values;
    REQUIRE(ts_pattern_validate(&pattern) == TS_SUCCESS);
    int32_t chosen = -1;
    REQUIRE(ts_matmul_select(&desc, &device, &chosen, NULL, 0) == TS_SUCCESS && chosen >= 0);
    size_t bytes = 0;
    REQUIRE(ts_matmul_workspace_size(&desc, &bytes) == TS_SUCCESS);
    void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
    REQUIRE(ts_matmul(&desc, workspace, bytes, NULL) == TS_SUCCESS);
    free(workspace);
    for (int i = 0; i < TOKENS * BLOCK; ++i) REQUIRE(y[i] == (float)(BLOCK * (i % BLOCK)));
    return 0;
}
