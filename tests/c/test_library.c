/* The library, its kernels and devices. */
#include "layer.h"

static void test_identity(void) {
    CHECK(strcmp(ts_version(), TS_VERSION) == 0, "%s", ts_version());
    CHECK(ts_abi_version() == TS_ABI_VERSION, "%d", (int)ts_abi_version());
    CHECK(strncmp(ts_architectures(), "cpu", 3) == 0, "%s", ts_architectures());
    for (ts_status_t a = TS_SUCCESS; a <= TS_STALE_PLAN + 1; ++a)
        for (ts_status_t b = TS_SUCCESS; b < a; ++b)
            CHECK(strcmp(ts_status_string(a), ts_status_string(b)) != 0, "%d and %d", (int)a, (int)b);
    CHECK(ts_status_string(-1) != NULL, "an unknown status has no text");
}

static void test_kernels(void) {
    ts_kernel_info info = {.struct_size = sizeof info}, other = {.struct_size = sizeof other};
    CHECK(ts_kernel_count() > 0, "the library has no kernel");
    for (int32_t i = 1; i <= ts_kernel_count(); ++i) {
        SUCCEEDS(ts_kernel_get(i, &info));
        CHECK(info.name[0] != '\0' && info.ops != 0 && info.dtypes != 0 && info.storages != 0,
              "kernel %d computes nothing", (int)i);
        for (int32_t j = 1; j < i; ++j) {
            SUCCEEDS(ts_kernel_get(j, &other));
            CHECK(strcmp(info.name, other.name) != 0, "two kernels are named %s", info.name);
        }
    }
    INVALID(ts_kernel_get(1, NULL), "info");
    INVALID(ts_kernel_get(0, &info), "kernel must be 1 to ");
    INVALID(ts_kernel_get(-1, &info), "kernel");
    INVALID(ts_kernel_get(ts_kernel_count() + 1, &info), "kernel");
    info.struct_size = FIRST_KERNEL_INFO - 1;
    INVALID(ts_kernel_get(1, &info), "struct_size");
}

static void test_devices(void) {
    ts_device_info info = {.struct_size = sizeof info};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &info));
    CHECK(info.device == TS_CPU && info.multiprocessors > 0 && info.name[0] != '\0', "%s", info.name);
    CHECK(info.max_cluster == 0, "%d", (int)info.max_cluster);
    ts_device_info gpu = {.struct_size = sizeof gpu};
    if (strstr(ts_architectures(), "sm_90") != NULL && ts_device_get(TS_CUDA, -1, &gpu) == TS_SUCCESS) {
        const int has_clusters = gpu.compute_capability == 90;
        CHECK(has_clusters == (gpu.max_cluster > 0), "%s: %d", gpu.name, (int)gpu.max_cluster);
    }
    INVALID(ts_device_get(TS_CPU, -1, NULL), "info");
    INVALID(ts_device_get(2, -1, &info), "device");
    CHECK(ts_device_get(TS_CUDA, 1000, &info) != TS_SUCCESS, "there is a device 1000");
    info.struct_size = 0;
    INVALID(ts_device_get(TS_CPU, -1, &info), "struct_size");
}

/* Without a device, a product on it says so and the library stays usable. */
static void test_absent_device(void) {
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS) return;
    FAILS(ts_device_get(TS_CUDA, -1, &info), TS_NO_DEVICE, "CUDA");
    REFUSES_WITH(TS_NO_DEVICE, TS_DDS_NT, (o.desc.device = TS_CUDA, o.desc.x.ld = IN, o.desc.y.ld = OUT),
                 "CUDA");
}

ts_device_info h100(void) {
    return (ts_device_info){.struct_size = sizeof(ts_device_info),
                            .device = TS_CUDA,
                            .compute_capability = 90,
                            .multiprocessors = 132,
                            .shared_memory = 232448};
}

const char* kernel_name(int32_t kernel) {
    static ts_kernel_info info;
    info.struct_size = sizeof info;
    SUCCEEDS(ts_kernel_get(kernel, &info));
    return info.name;
}

/* cpu_portable is every processor's, and the best of none. */
int32_t portable_kernel(void) {
    for (int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel)
        if (strcmp(kernel_name(kernel), "cpu_portable") == 0) return kernel;
    return -1;
}

/* After `change` the device is none that a kernel could be chosen for. */
#define REFUSES_DEVICE(change, mention)                                         \
    do {                                                                        \
        static operands o;                                                      \
        init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);   \
        o.desc.device = TS_CUDA;                                                \
        ts_device_info device = h100();                                         \
        int32_t kernel = -7;                                                    \
        change;                                                                 \
        INVALID(ts_matmul_select(&o.desc, &device, &kernel, NULL, 0), mention); \
        CHECK(kernel == -7, "%s: written", #change);                            \
    } while (0)

static void test_bad_devices(void) {
    REFUSES_DEVICE(device.multiprocessors = 0, "device.multiprocessors must be 1 to 65536, got 0");
    REFUSES_DEVICE(device.multiprocessors = -1, "device.multiprocessors");
    REFUSES_DEVICE(device.multiprocessors = INT32_MIN, "device.multiprocessors");
    REFUSES_DEVICE(device.multiprocessors = INT32_MAX, "device.multiprocessors");
    REFUSES_DEVICE(device.shared_memory = -1, "device.shared_memory");
    REFUSES_DEVICE(device.shared_memory = INT32_MAX, "device.shared_memory");
    REFUSES_DEVICE(device.compute_capability = -90, "device.compute_capability");
    REFUSES_DEVICE(device.compute_capability = INT32_MAX, "device.compute_capability");
    REFUSES_DEVICE(device.max_cluster = -1, "device.max_cluster must be 0 to 16, got -1");
    REFUSES_DEVICE(device.max_cluster = 17, "device.max_cluster");
    REFUSES_DEVICE(device.device = 2, "device.device");
    REFUSES_DEVICE((device.device = TS_CPU, o.desc.device = TS_CPU), "device.compute_capability");
    REFUSES_DEVICE((device = (ts_device_info){.struct_size = sizeof device}, o.desc.device = TS_CPU),
                   "device.multiprocessors");
}

void test_library(void) {
    test_identity();
    test_kernels();
    test_devices();
    test_absent_device();
    test_bad_devices();
}
