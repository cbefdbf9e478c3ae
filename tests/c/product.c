/* One product, as a program without any of these tests' helpers has it. */
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
    static const int32_t ptr[2] = {0, 1}, zero[1] = {0};
    static float x[TOKENS * BLOCK], y[TOKENS * BLOCK], values[BLOCK * BLOCK];
    for (int i = 0; i < TOKENS * BLOCK; ++i) x[i] = 1;
    for (int i = 0; i < BLOCK * BLOCK; ++i) values[i] = (float)(i / BLOCK);
    const ts_pattern pattern = {.struct_size = sizeof pattern,
                                .block_rows = BLOCK,
                                .block_cols = BLOCK,
                                .out_features = BLOCK,
                                .in_features = BLOCK,
                                .nnz = 1,
                                .row_ptr = ptr,
                                .col_idx = zero,
                                .row_slot = zero};
    const ts_matmul_desc desc = {.struct_size = sizeof desc,
                                 .tokens = TOKENS,
                                 .pattern = &pattern,
                                 .x = {.data = x, .ld = BLOCK, .dtype = TS_FLOAT32},
                                 .y = {.data = y, .ld = BLOCK},
                                 .values = {.data = values}};
    REQUIRE(ts_abi_version() == TS_ABI_VERSION);
    size_t bytes = 0;
    REQUIRE(ts_matmul_workspace_size(&desc, &bytes) == TS_SUCCESS);
    void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
    REQUIRE(ts_matmul(&desc, workspace, bytes, NULL) == TS_SUCCESS);
    free(workspace);
    for (int i = 0; i < TOKENS * BLOCK; ++i) REQUIRE(y[i] == (float)(BLOCK * (i % BLOCK)));
    return 0;
}
