/* A program built against the first version of the header, as it was: the library still serves it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../cpp/src/first_sizes.h"
#include "first/tilesparse.h"

_Static_assert(sizeof(ts_pattern) == TS_FIRST_PATTERN, "ts_pattern");
_Static_assert(sizeof(ts_matmul_desc) == TS_FIRST_MATMUL_DESC, "ts_matmul_desc");
_Static_assert(sizeof(ts_device_info) == TS_FIRST_DEVICE_INFO, "ts_device_info");
_Static_assert(sizeof(ts_kernel_info) == TS_FIRST_KERNEL_INFO, "ts_kernel_info");

#define REQUIRE(condition)                                                               \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, ts_last_error()); \
            return 1;                                                                    \
        }                                                                                \
    } while (0)

enum { BLOCK = 16, TOKENS = 3 };

/* Each structure is followed by bytes of another owner, which the library must neither read nor write. */
#define GUARDED(type)            \
    struct {                     \
        type known;              \
        unsigned char after[64]; \
    }
#define IS_UNTOUCHED(guarded) (memcmp((guarded).after, other_bytes, sizeof other_bytes) == 0)

static unsigned char other_bytes[64];

int main(void) {
    GUARDED(ts_kernel_info) kernel;
    GUARDED(ts_device_info) device;
    GUARDED(ts_pattern) pattern;
    GUARDED(ts_matmul_desc) desc;
    memset(other_bytes, 0xa5, sizeof other_bytes);
    memset(&kernel, 0xa5, sizeof kernel);
    memset(&device, 0xa5, sizeof device);
    memset(&pattern, 0xa5, sizeof pattern);
    memset(&desc, 0xa5, sizeof desc);

    REQUIRE(ts_abi_version() == TS_ABI_VERSION);
    kernel.known.struct_size = sizeof kernel.known;
    REQUIRE(ts_kernel_get(0, &kernel.known) == TS_SUCCESS);
    REQUIRE(kernel.known.struct_size == sizeof kernel.known && strncmp(kernel.known.name, "cpu", 3) == 0);
    device.known.struct_size = sizeof device.known;
    REQUIRE(ts_device_get(TS_CPU, -1, &device.known) == TS_SUCCESS);
    REQUIRE(device.known.multiprocessors > 0 && IS_UNTOUCHED(kernel) && IS_UNTOUCHED(device));

    const int32_t ptr[2] = {0, 1}, zero[1] = {0};
    static float x[TOKENS * BLOCK], y[TOKENS * BLOCK], values[BLOCK * BLOCK];
    for (int i = 0; i < TOKENS * BLOCK; ++i) x[i] = 1;
    for (int i = 0; i < BLOCK * BLOCK; ++i) values[i] = (float)(i / BLOCK);
    pattern.known =
        (ts_pattern){sizeof(ts_pattern), BLOCK, BLOCK, 0, BLOCK, BLOCK, 1, ptr, zero, zero, ptr, zero, zero};
    desc.known = (ts_matmul_desc){.struct_size = sizeof(ts_matmul_desc), .dtype = TS_FLOAT32};
    desc.known.tokens = TOKENS;
    desc.known.pattern = &pattern.known;
    desc.known.x = (ts_matrix){x, BLOCK, TS_ROW_MAJOR, 0};
    desc.known.y = (ts_matrix){y, BLOCK, TS_ROW_MAJOR, 0};
    desc.known.values = values;
    REQUIRE(ts_pattern_validate(&pattern.known) == TS_SUCCESS);
    int32_t chosen = -1;
    REQUIRE(ts_matmul_select(&desc.known, &device.known, &chosen, NULL, 0) == TS_SUCCESS && chosen >= 0);
    size_t bytes = 0;
    REQUIRE(ts_matmul_workspace_size(&desc.known, &bytes) == TS_SUCCESS);
    void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
    REQUIRE(ts_matmul(&desc.known, workspace, bytes, NULL) == TS_SUCCESS);
    free(workspace);
    for (int i = 0; i < TOKENS * BLOCK; ++i) REQUIRE(y[i] == (float)(BLOCK * (i % BLOCK)));
    REQUIRE(IS_UNTOUCHED(pattern) && IS_UNTOUCHED(desc));
    return 0;
}
