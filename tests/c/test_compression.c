/* Compression of values. */
#include "stored.h"

static void test_compression(int32_t dtype) {
    static stored s;
    static double dense[COUNT];
    const ts_pattern pattern = layer_pattern();
    const size_t bytes = COUNT / 2 * (dtype == TS_FLOAT32 ? sizeof(float) : 1);
    init_stored(&s, dtype);
    SUCCEEDS(compress(&s, &pattern));
    CHECK(s.compressed[bytes] == 0xa5, "written behind compressed");
    CHECK(s.metadata[COUNT / 32] == 0xa5a5a5a5u, "written behind metadata");
    memset(dense, 0, sizeof dense);
    for (int row = 0; row < NNZ * BN; ++row)
        for (int i = 0; i < BK / 2; ++i) {
            const int column = kept_column(s.metadata, row, i), at = row * (BK / 2) + i;
            CHECK(i % 2 == 0 || column > kept_column(s.metadata, row, i - 1), "row %d: %d does not ascend",
                  row, i);
            if (is_kept(&s, row * BK + column))
                dense[row * BK + column] = number_at(s.compressed, dtype, at);
            else
                for (size_t byte = 0; byte < bytes / (COUNT / 2); ++byte)
                    CHECK(s.compressed[at * (bytes / (COUNT / 2)) + byte] == 0, "%d of row %d is not 0", i,
                          row);
        }
    for (int i = 0; i < COUNT; ++i) {
        const double expected = is_kept(&s, i) ? number_at(s.values, dtype, i) : 0;
        CHECK(dense[i] == expected, "value %d is %g, not %g", i, dense[i], expected);
    }
}

/* A transposed weight with its mask gives the same as `transposed` of the weight. */
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

/* After `change` of one argument compression is refused, and nothing is written. */
#define REFUSES_COMPRESSION(change, mention) REFUSES_COMPRESSION_WITH(TS_INVALID_ARGUMENT, change, mention)
#define REFUSES_COMPRESSION_WITH(expected, change, mention)                                                 \
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
    REFUSES_COMPRESSION(given = NULL, "pattern");
    REFUSES_COMPRESSION(pattern.block_rows = 1, "pattern.block_rows must be 2 to 128, got 1");
    REFUSES_COMPRESSION(pattern.block_cols = 16,
                        "pattern.block_cols must be 32, 64 or 128 for TS_STORAGE_2_4, got 16");
    REFUSES_COMPRESSION(transposed = 1,
                        "pattern.block_rows must be 32, 64 or 128 for TS_STORAGE_2_4, got 16");
    REFUSES_COMPRESSION(transposed = 2, "transposed must be 0 or 1, got 2");
    REFUSES_COMPRESSION(device = 2, "device must be 0 or 1, got 2");
    REFUSES_COMPRESSION(dtype = 7, "dtype must be 1 to 6, got 7");
    REFUSES_COMPRESSION(dtype = -1, "dtype must be 1 to 6, got -1");
    REFUSES_COMPRESSION(values = NULL, "values must not be null");
    REFUSES_COMPRESSION(mask = NULL, "mask must not be null");
    REFUSES_COMPRESSION(compressed = NULL, "compressed must not be null");
    REFUSES_COMPRESSION(metadata = NULL, "metadata must not be null");
    REFUSES_COMPRESSION(values = s.values + 1, "values must be aligned to 4 bytes");
    REFUSES_COMPRESSION(compressed = s.compressed + 2, "compressed must be aligned to 4 bytes");
    REFUSES_COMPRESSION(metadata = (uint32_t*)(s.compressed + 2), "metadata must be aligned to 4 bytes");
    REFUSES_COMPRESSION(compressed = s.values, "values and compressed must not overlap in memory");
    REFUSES_COMPRESSION(compressed = s.mask, "mask and compressed must not overlap in memory");
    REFUSES_COMPRESSION(metadata = (uint32_t*)s.values, "values and metadata must not overlap in memory");
    REFUSES_COMPRESSION(metadata = (uint32_t*)s.mask, "mask and metadata must not overlap in memory");
    REFUSES_COMPRESSION(metadata = (uint32_t*)s.compressed,
                        "compressed and metadata must not overlap in memory");
    REFUSES_COMPRESSION((device = TS_CUDA, mask = s.mask + 1), "mask must be aligned to 16 bytes");
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS) return;
    REFUSES_COMPRESSION_WITH(TS_NO_DEVICE, device = TS_CUDA, "CUDA");
}

void test_compressions(void) {
    for (int32_t dtype = TS_INT8; dtype <= TS_FLOAT8_E4M3FN; ++dtype) test_compression(dtype);
    test_compression(TS_FLOAT32);
    test_transposed_compression();
    test_bad_compressions();
}
