/* Patterns: validation and transposes. */
#include "layer.h"

static void test_pattern_validate(void) {
    ts_pattern pattern = layer_pattern();
    SUCCEEDS(ts_pattern_validate(&pattern));
    pattern.col_ptr = pattern.row_idx = pattern.col_slot = NULL;
    SUCCEEDS(ts_pattern_validate(&pattern));
    INVALID(ts_pattern_validate(NULL), "pattern");
    pattern.row_ptr = NULL;
    INVALID(ts_pattern_validate(&pattern), "row_ptr");
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
    INVALID(ts_pattern_transpose(NULL, made_ptr, made_idx, made_slot), "pattern");
    INVALID(ts_pattern_transpose(&pattern, NULL, made_idx, made_slot), "col_ptr");
    INVALID(ts_pattern_transpose(&pattern, made_ptr, NULL, made_slot), "row_idx");
    INVALID(ts_pattern_transpose(&pattern, made_ptr, made_idx, NULL), "col_slot");
    INVALID(ts_pattern_transpose(&pattern, made_ptr, col_idx, made_slot),
            "row_idx and pattern.col_idx must not overlap in memory");
    INVALID(ts_pattern_transpose(&pattern, made_ptr, made_idx, made_idx + 1), "overlap");
    INVALID(ts_pattern_transpose(&pattern, (int32_t*)((char*)made_ptr + 1), made_idx, made_slot),
            "col_ptr must be aligned to 4 bytes");
    col_idx[1] = COLS;
    made_ptr[0] = -7;
    FAILS(ts_pattern_transpose(&pattern, made_ptr, made_idx, made_slot), TS_INVALID_PATTERN, "col_idx");
    CHECK(made_ptr[0] == -7, "col_ptr was written");
    col_idx[1] = 1;
}

void test_patterns(void) {
    test_pattern_validate();
    test_broken_patterns();
    test_pattern_transpose();
}
