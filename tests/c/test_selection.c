/* The choice of kernels: devices, preferences, estimates, measurements. */
#include "layer.h"

#include <math.h>

/* Kernels are chosen from numbers alone: also for GPUs this machine does not have. */
static void test_select(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    int32_t kernel = -1;
    char reason[256] = "";
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, reason, sizeof reason));
    CHECK(kernel >= 1 && kernel <= ts_kernel_count(), "kernel %d", (int)kernel);
    CHECK(reason[0] != '\0', "no reason is given");
    char shortened[5] = "~~~~";
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, shortened, 4));
    CHECK(strncmp(shortened, reason, 3) == 0 && shortened[3] == '\0', "%s", shortened);
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, NULL, 0));
    char whole[256]; /* no more is written than the text, whatever room there is said to be */
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, whole, SIZE_MAX));
    CHECK(strcmp(whole, reason) == 0, "%s", whole);
    INVALID(ts_matmul_select(NULL, &cpu, &kernel, NULL, 0), "desc");
    INVALID(ts_matmul_select(&o.desc, NULL, &kernel, NULL, 0), "device");
    INVALID(ts_matmul_select(&o.desc, &cpu, NULL, NULL, 0), "kernel");
    o.desc.device = TS_CUDA;
    INVALID(ts_matmul_select(&o.desc, &cpu, &kernel, NULL, 0), "device");

    ts_device_info gpu = h100();
    gpu.compute_capability = 10; /* older than any kernel */
    FAILS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0), TS_UNSUPPORTED, "CUDA");
    gpu.compute_capability = 90;
    const int has_cuda = strstr(ts_architectures(), "sm_") != NULL;
    for (o.desc.op = TS_DDS_NT; o.desc.op <= TS_SDD_TN; ++o.desc.op) {
        o.desc.x.dtype = o.desc.y.dtype = TS_FLOAT16;
        const ts_status_t status = ts_matmul_select(&o.desc, &gpu, &kernel, reason, sizeof reason);
        CHECK(status == (has_cuda ? TS_SUCCESS : TS_UNSUPPORTED), "op %d: %s", (int)o.desc.op,
              ts_status_string(status));
    }
}

/* Some slices of a GPU have no room for clusters of thread blocks. */
static void test_select_without_clusters(void) {
    if (strstr(ts_architectures(), "sm_90") == NULL || strstr(ts_architectures(), "sm_80") == NULL) return;
    static operands o;
    for (int32_t op = TS_DDS_NT; op <= TS_SDD_TN; ++op) {
        init_operands(&o, op, TS_BFLOAT16, TS_ROW_MAJOR, TS_ROW_MAJOR);
        o.desc.device = TS_CUDA;
        o.desc.tokens = 4096;
        strcpy(o.desc.prefer, "sm90_");
        ts_device_info gpu = h100();
        int32_t with = -1, without = -1;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &with, NULL, 0));
        gpu.max_cluster = 2;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &without, NULL, 0));
        CHECK(with == without, "op %d: %d and %d", (int)op, (int)with, (int)without);
        CHECK(strncmp(kernel_name(with), "sm90_", 5) == 0, "op %d: %s", (int)op, kernel_name(with));
        gpu.max_cluster = 1;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &without, NULL, 0));
        if (op == TS_SDD_TN) continue; /* which can do without */
        CHECK(strncmp(kernel_name(without), "sm80_", 5) == 0, "op %d: %s", (int)op, kernel_name(without));
        o.desc.kernel = with;
        FAILS(ts_matmul_select(&o.desc, &gpu, &without, NULL, 0), TS_UNSUPPORTED,
              "the device has no room for clusters of thread blocks");
    }
}

static void test_preferences(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    int32_t best = -1, kernel = -1;
    char reason[256];
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &best, NULL, 0));
    strcpy(o.desc.prefer, "cpu_port");
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, reason, sizeof reason));
    CHECK(kernel == portable_kernel(), "kernel %d", (int)kernel);
    CHECK(strcmp(reason, "the caller prefers it") == 0, "%s", reason);
    SUCCEEDS(run(&o));
    check_forward(&o);
    o.desc.kernel = best; /* comes first */
    SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, NULL, 0));
    CHECK(kernel == best, "kernel %d", (int)kernel);
    if (strstr(ts_architectures(), "sm_80") != NULL) { /* is not for the CPU */
        o.desc.kernel = 0;
        strcpy(o.desc.prefer, "sm80_");
        SUCCEEDS(ts_matmul_select(&o.desc, &cpu, &kernel, NULL, 0));
        CHECK(kernel == best, "kernel %d", (int)kernel);
    }
    REFUSES(TS_DDS_NT, strcpy(o.desc.prefer, "sm70_"),
            "prefer must be the beginning of a kernel's name, got sm70_");
    REFUSES(TS_DDS_NT, memset(o.desc.prefer, 'c', sizeof o.desc.prefer),
            "prefer must end in a zero within 64 characters");
}

static void test_estimates(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu}, gpu = h100();
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    double time = -1;
    SUCCEEDS(ts_matmul_estimate(&o.desc, &cpu, portable_kernel(), &time));
    CHECK(time == 0, "%g us on a CPU", time);
    SUCCEEDS(ts_matmul_estimate(&o.desc, &cpu, TS_RUN_DENSE, &time));
    CHECK(time == 0, "%g us on a CPU", time);
    INVALID(ts_matmul_estimate(NULL, &cpu, 1, &time), "desc");
    INVALID(ts_matmul_estimate(&o.desc, NULL, 1, &time), "device");
    INVALID(ts_matmul_estimate(&o.desc, &cpu, 1, NULL), "microseconds");
    INVALID(ts_matmul_estimate(&o.desc, &gpu, 1, &time), "device.device must be desc.device, 0, got 1");
    INVALID(ts_matmul_estimate(&o.desc, &cpu, ts_kernel_count() + 1, &time), "kernel");
    INVALID(ts_matmul_estimate(&o.desc, &cpu, -2, &time), "kernel");
    o.desc.device = TS_CUDA;
    time = -1;
    FAILS(ts_matmul_estimate(&o.desc, &gpu, 1, &time), TS_UNSUPPORTED, "it is for another kind of device");
    CHECK(time == -1, "%g was written", time);
    if (strstr(ts_architectures(), "sm_90") == NULL) return;
    o.desc.x.dtype = o.desc.y.dtype = TS_BFLOAT16;
    int32_t best = -1;
    SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &best, NULL, 0));
    double least = 0;
    SUCCEEDS(ts_matmul_estimate(&o.desc, &gpu, best, &least));
    CHECK(least > 0, "%g us", least);
    for (int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel)
        if (ts_matmul_estimate(&o.desc, &gpu, kernel, &time) == TS_SUCCESS)
            CHECK(time >= least, "%s: %g us, less than the %g of what was chosen", kernel_name(kernel), time,
                  least);
    SUCCEEDS(ts_matmul_estimate(&o.desc, &gpu, TS_RUN_DENSE, &time));
    CHECK(time > 0, "%g us", time);
}

static void test_features(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu}, gpu = h100();
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    double features[64] = {-1};
    char family[64] = "untouched";
    int32_t count = 64;
    INVALID(ts_matmul_features(&o.desc, &cpu, TS_RUN_DENSE, features, &count, family, sizeof family),
            "device.device must be 1");
    o.desc.device = TS_CUDA;
    INVALID(ts_matmul_features(NULL, &gpu, TS_RUN_DENSE, features, &count, NULL, 0), "desc");
    INVALID(ts_matmul_features(&o.desc, &gpu, TS_RUN_DENSE, NULL, &count, NULL, 0), "features");
    INVALID(ts_matmul_features(&o.desc, &gpu, TS_RUN_DENSE, features, NULL, NULL, 0), "count");
    FAILS(ts_matmul_features(&o.desc, &gpu, 1, features, &count, NULL, 0), TS_UNSUPPORTED,
          "it is for another kind of device");
    count = 1;
    INVALID(ts_matmul_features(&o.desc, &gpu, TS_RUN_DENSE, features, &count, family, sizeof family),
            "count must be at least");
    CHECK(count == 1 && features[0] == -1 && strcmp(family, "untouched") == 0, "%d features, of %s",
          (int)count, family);
    count = 64;
    SUCCEEDS(ts_matmul_features(&o.desc, &gpu, TS_RUN_DENSE, features, &count, NULL, 0));
    CHECK(count > 1 && count < 64 && features[0] == 1, "%d features, %g launches", (int)count, features[0]);
    count = 64;
    SUCCEEDS(ts_matmul_features(&o.desc, &gpu, TS_RUN_DENSE, features, &count, family, 6));
    CHECK(strcmp(family, "dense") == 0, "%s", family);
}

/* The choice on the CPU, and its reason. */
static int32_t chosen(const operands* o, const ts_device_info* cpu, char* reason) {
    int32_t kernel = -7;
    SUCCEEDS(ts_matmul_select(&o->desc, cpu, &kernel, reason, 256));
    return kernel;
}

static void test_measurements(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    ts_device_info cpu = {.struct_size = sizeof cpu};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &cpu));
    char reason[256];
    const int32_t best = chosen(&o, &cpu, reason), portable = portable_kernel();
    INVALID(ts_measurement_add(NULL, &cpu, portable, 1, 0), "desc");
    INVALID(ts_measurement_add(&o.desc, NULL, portable, 1, 0), "device");
    INVALID(ts_measurement_add(&o.desc, &cpu, -1, 1, 0), "kernel must be 1 to ");
    INVALID(ts_measurement_add(&o.desc, &cpu, portable, 0, 0),
            "microseconds must be a finite number above 0, got 0");
    INVALID(ts_measurement_add(&o.desc, &cpu, portable, NAN, 0), "microseconds");
    INVALID(ts_measurement_add(&o.desc, &cpu, portable, 1, -1),
            "dense_microseconds must be 0 or a finite number above 0, got -1");
    INVALID(ts_measurement_add(&o.desc, &cpu, portable, 1, INFINITY), "dense_micro");
    if (strstr(ts_architectures(), "sm_80") != NULL)
        FAILS(ts_measurement_add(&o.desc, &cpu, ts_kernel_count(), 1, 0), TS_UNSUPPORTED, "cannot compute");
    CHECK(chosen(&o, &cpu, reason) == best, "%s", reason);

    SUCCEEDS(ts_measurement_add(&o.desc, &cpu, portable, 12.25, 0));
    CHECK(chosen(&o, &cpu, reason) == portable, "%s", reason);
    CHECK(strcmp(reason, "the fastest when measured on this device; measured 12.2 us") == 0, "%s", reason);
    SUCCEEDS(run(&o));
    check_forward(&o);
    o.desc.policy = TS_POLICY_AUTO; /* dense was not measured */
    CHECK(chosen(&o, &cpu, reason) == portable, "%s", reason);
    SUCCEEDS(ts_measurement_add(&o.desc, &cpu, portable, 12, 11)); /* in place of the first */
    CHECK(chosen(&o, &cpu, reason) == TS_RUN_DENSE, "%s", reason);
    CHECK(strstr(reason, "dense was measured to be faster; measured 12.0 us by cpu_portable, dense 11.0 us"),
          "%s", reason);
    o.desc.policy = TS_POLICY_SPARSE;

    const int64_t tokens = o.desc.tokens, nnz = o.pattern.nnz;
    int64_t most = 1;
    while (most < tokens) most *= 2;
    for (int64_t count = 1; count <= 2 * most; ++count) { /* those that round up to the same power of two */
        o.desc.tokens = count;
        const int counts = count <= most && 2 * count > most;
        CHECK((chosen(&o, &cpu, reason) == portable) == counts, "%d tokens", (int)count);
    }
    o.desc.tokens = tokens;
    for (int64_t other = 0; other <= nnz; ++other) {
        o.pattern.nnz = other;
        CHECK((chosen(&o, &cpu, reason) == portable) == (8 * (nnz - other) <= nnz), "%d blocks", (int)other);
    }
    o.pattern.nnz = nnz;
    ts_device_info other = cpu;
    other.multiprocessors = cpu.multiprocessors % 65536 + 1;
    CHECK(chosen(&o, &other, reason) == best, "%s", reason);
    other = cpu;
    strcpy(other.name, "another");
    CHECK(chosen(&o, &other, reason) == best, "%s", reason);
    o.desc.activation = TS_RELU; /* is no matter */
    CHECK(chosen(&o, &cpu, reason) == portable, "%s", reason);
    strcpy(o.desc.prefer, kernel_name(best)); /* comes first */
    CHECK(chosen(&o, &cpu, reason) == best, "%s", reason);
    o.desc.prefer[0] = 0;
    SUCCEEDS(ts_measurements_clear());
    CHECK(chosen(&o, &cpu, reason) == best, "%s", reason);
}

/* Kernels for few tokens are chosen before the others, for values that they read, and refuse more tokens. */
static void test_select_few_tokens(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    const ts_device_info gpu = h100();
    ts_kernel_info few = {.struct_size = sizeof few}, chosen = {.struct_size = sizeof chosen};
    o.desc.device = TS_CUDA;
    /* Such that every one of these kernels takes it; no array is read. */
    o.pattern.block_rows = o.pattern.block_cols = 64;
    o.pattern.out_features = o.pattern.in_features = 8192;
    o.pattern.nnz = 4096;
    o.desc.x.ld = o.desc.y.ld = 8192;
    for (int32_t i = 1; i <= ts_kernel_count(); ++i) {
        SUCCEEDS(ts_kernel_get(i, &few));
        if (few.max_tokens == 0 || few.device != TS_CUDA) continue;
        int32_t kernel = -1;
        o.desc.x.dtype = o.desc.y.dtype = few.dtypes >> TS_FLOAT64 & 1   ? TS_FLOAT64
                                          : few.dtypes >> TS_FLOAT16 & 1 ? TS_FLOAT16
                                                                         : TS_BFLOAT16;
        o.desc.values.storage = few.storages >> TS_STORAGE_DENSE & 1 ? TS_STORAGE_DENSE : TS_STORAGE_2_4;
        o.desc.values.dtype = few.values_dtypes >> TS_INT8 & 1   ? TS_INT8
                              : few.values_dtypes >> TS_INT4 & 1 ? TS_INT4
                                                                 : TS_DTYPE_DEFAULT;
        o.desc.values.granularity =
            o.desc.values.dtype == TS_DTYPE_DEFAULT ? TS_SCALES_NONE : TS_SCALES_PER_BLOCK;
        o.desc.tokens = 1;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0));
        SUCCEEDS(ts_kernel_get(kernel, &chosen));
        CHECK(chosen.max_tokens > 0 && chosen.storages == few.storages, "%s instead of %s", chosen.name,
              few.name);
        o.desc.tokens = few.max_tokens + 1;
        SUCCEEDS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0));
        SUCCEEDS(ts_kernel_get(kernel, &chosen));
        CHECK(chosen.max_tokens == 0 || chosen.max_tokens > few.max_tokens, "%s", chosen.name);
        o.desc.kernel = i;
        FAILS(ts_matmul_select(&o.desc, &gpu, &kernel, NULL, 0), TS_UNSUPPORTED, "fewer tokens");
        o.desc.kernel = 0;
    }
}

void test_selection(void) {
    test_select();
    test_select_without_clusters();
    test_preferences();
    test_estimates();
    test_features();
    test_measurements();
    test_select_few_tokens();
}
