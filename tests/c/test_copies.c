/* Two copies of the library in one process, as two packages may bring them along: each calls its own
 * functions, computes, and has its own last error. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tilesparse/tilesparse.h>

#define REQUIRE(condition)                                         \
    do {                                                           \
        if (!(condition)) {                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            return 1;                                              \
        }                                                          \
    } while (0)

enum { BLOCK = 16 };

typedef struct library {
    int32_t (*abi_version)(void);
    const char* (*last_error)(void);
    ts_status_t (*kernel_get)(int32_t, ts_kernel_info*);
    ts_status_t (*device_get)(int32_t, int32_t, ts_device_info*);
    ts_status_t (*workspace_size)(const ts_matmul_desc*, size_t*);
    ts_status_t (*matmul)(const ts_matmul_desc*, void*, size_t, ts_stream_t);
} library;

/* ISO C has no cast from an object pointer to a function pointer. */
#define FIND(function, handle, name)                   \
    do {                                               \
        void* const found = dlsym(handle, name);       \
        REQUIRE(found != NULL);                        \
        memcpy(&(function), &found, sizeof(function)); \
    } while (0)

static int load(const char* path, library* copy) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) printf("%s\n", dlerror());
    REQUIRE(handle != NULL);
    FIND(copy->abi_version, handle, "ts_abi_version");
    FIND(copy->last_error, handle, "ts_last_error");
    FIND(copy->kernel_get, handle, "ts_kernel_get");
    FIND(copy->device_get, handle, "ts_device_get");
    FIND(copy->workspace_size, handle, "ts_matmul_workspace_size");
    FIND(copy->matmul, handle, "ts_matmul");
    return 0;
}

/* y = x W^T for one block of `weight` everywhere and x = 1. */
static int multiply(const library* copy, float weight) {
    const int32_t ptr[2] = {0, 1}, zero[1] = {0};
    float x[BLOCK], y[BLOCK], values[BLOCK * BLOCK];
    for (int i = 0; i < BLOCK; ++i) x[i] = 1;
    for (int i = 0; i < BLOCK * BLOCK; ++i) values[i] = weight;
    const ts_pattern pattern = {sizeof pattern, BLOCK, BLOCK, 0,    BLOCK, BLOCK, 1, ptr,
                                zero,           zero,  ptr,   zero, zero};
    ts_matmul_desc desc = {.struct_size = sizeof desc, .tokens = 1, .pattern = &pattern};
    desc.x = (ts_operand){.data = x, .ld = BLOCK, .dtype = TS_FLOAT32};
    desc.y = (ts_operand){.data = y, .ld = BLOCK};
    desc.values.data = values;
    size_t bytes = 0;
    REQUIRE(copy->workspace_size(&desc, &bytes) == TS_SUCCESS);
    void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
    const ts_status_t status = copy->matmul(&desc, workspace, bytes, NULL);
    free(workspace);
    REQUIRE(status == TS_SUCCESS);
    for (int i = 0; i < BLOCK; ++i) REQUIRE(y[i] == BLOCK * weight);
    return 0;
}

int main(void) {
    /* The first copy is linked, so that its names are those of the whole process. */
    library first = {ts_abi_version,           ts_last_error, ts_kernel_get, ts_device_get,
                     ts_matmul_workspace_size, ts_matmul};
    library second;
    if (load(COPY, &second) != 0) return 1;
    REQUIRE(first.matmul != second.matmul && first.abi_version() == second.abi_version());
    for (int round = 0; round < 3; ++round) {
        if (multiply(&first, (float)round) != 0 || multiply(&second, (float)-round) != 0) return 1;
    }

    ts_kernel_info info = {.struct_size = sizeof info};
    REQUIRE(first.kernel_get(1000, &info) == TS_INVALID_ARGUMENT);
    REQUIRE(second.kernel_get(2000, &info) == TS_INVALID_ARGUMENT);
    REQUIRE(strstr(first.last_error(), "1000") != NULL && strstr(second.last_error(), "2000") != NULL);

    /* With a GPU or without, they agree on whether there is one. */
    ts_device_info one = {.struct_size = sizeof one}, other = {.struct_size = sizeof other};
    REQUIRE(first.device_get(TS_CUDA, -1, &one) == second.device_get(TS_CUDA, -1, &other));
    REQUIRE(memcmp(&one, &other, sizeof one) == 0);
    return 0;
}
