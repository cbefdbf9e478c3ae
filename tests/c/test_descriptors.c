/* Descriptors that are refused, and structures of other versions of the header. */
#include "layer.h"

#include <stdlib.h>

static void test_bad_descriptors(void) {
    INVALID(ts_matmul(NULL, NULL, 0, NULL), "desc");
    REFUSES(TS_DDS_NT, o.desc.struct_size = 0, "struct_size");
    REFUSES(TS_DDS_NT, o.desc.struct_size = 8, "struct_size");
    REFUSES(TS_DDS_NT, o.desc.op = 3, "op");
    REFUSES(TS_DDS_NT, o.desc.op = -1, "op");
    REFUSES(TS_DDS_NT, o.desc.x.dtype = 7, "x.dtype must be 1 to 6, got 7");
    REFUSES(TS_DDS_NT, o.desc.x.dtype = TS_DTYPE_DEFAULT, "x.dtype must be 1 to 6, got 0");
    REFUSES(TS_DDS_NN, o.desc.y.dtype = TS_INT8, "y.dtype must be 1 to 4, got 5");
    REFUSES(TS_DDS_NT, o.desc.device = 2, "device");
    REFUSES(TS_DDS_NT, o.desc.values.storage = 2, "values.storage must be 0 or 1, got 2");
    REFUSES(TS_DDS_NT, o.desc.activation = 4, "activation");
    REFUSES(TS_DDS_NT, o.desc.precision = 2, "precision");
    REFUSES(TS_DDS_NT, o.desc.accumulate = 4, "accumulate must be 0 to 3, got 4");
    REFUSES(TS_DDS_NT, o.desc.kernel = -1, "kernel");
    REFUSES(TS_DDS_NT, o.desc.tokens = -1, "tokens");
    REFUSES(TS_DDS_NT, o.desc.tokens = INT64_MAX, "tokens");
    REFUSES(TS_DDS_NT, o.desc.accumulate = 1, "accumulate");
    REFUSES(TS_DDS_NN, o.desc.activation = TS_RELU, "activation");
    REFUSES(TS_DDS_NT, o.desc.x.layout = 2, "x.layout");
    REFUSES(TS_DDS_NT, o.desc.y.layout = -1, "y.layout");
    REFUSES(TS_DDS_NT, o.desc.residual.layout = 2, "residual.layout");
    REFUSES(TS_DDS_NT, o.desc.residual.storage = 1, "residual.storage must be 0, got 1");
    REFUSES(TS_DDS_NT, o.desc.y.scales = (float*)o.memory[3], "y.scales must be null");
    REFUSES(TS_DDS_NT, o.desc.y.granularity = 1, "y.granularity must be 0, got 1");
    REFUSES(TS_DDS_NT, o.desc.x.metadata = o.memory[3], "x.metadata must be null");
    REFUSES(TS_DDS_NT, o.desc.values.ld = IN, "values.ld must be 0, got 64");
    REFUSES(TS_DDS_NT, o.desc.values.scales_ld = 1, "values.scales_ld must be 0, got 1");
    REFUSES(TS_DDS_NT, o.desc.bias.layout = 1, "bias.layout must be 0, got 1");
    REFUSES(TS_DDS_NT, (o.desc.bias.data = o.memory[3], o.desc.bias.dtype = TS_FLOAT64),
            "bias.dtype must be that of y, float32, got float64");
    REFUSES(TS_DDS_NT, (give_gate(&o), o.desc.gate.dtype = TS_FLOAT16),
            "gate.dtype must be that of y, float32, got float16");
    REFUSES(TS_SDD_TN, o.desc.y.dtype = TS_FLOAT16, "y.dtype must be that of x, float32, got float16");
    REFUSES(TS_DDS_NN, o.desc.residual.data = o.memory[4], "residual");
    REFUSES(TS_SDD_TN, o.desc.residual.data = o.memory[4], "residual");
    REFUSES(TS_DDS_NT, (give_gate(&o), o.desc.gate.layout = TS_COLUMN_MAJOR),
            "gate.layout must be y.layout, 0, got 1");
    REFUSES(TS_DDS_NN, o.desc.gate.data = o.memory[4], "gate.data must be null unless op is dds_nt");
    REFUSES(TS_SDD_TN, o.desc.gate.data = o.memory[4], "gate.data must be null unless op is dds_nt");
    REFUSES(TS_DDS_NN, o.desc.bias.data = o.memory[3], "bias.data must be null where op is dds_nn");
    REFUSES(TS_SDD_TN, o.desc.accumulate = TS_ACCUMULATE_BIAS,
            "accumulate must not have TS_ACCUMULATE_BIAS where bias.data is null, got 2");
    REFUSES(TS_SDD_TN, (give_bias_gradient(&o, 0), o.desc.bias.dtype = TS_FLOAT16),
            "bias.dtype must be that of x, float32, got float16");
    REFUSES(TS_SDD_TN, o.desc.bias.data = o.desc.values.data, "values and bias must not overlap in memory");
    REFUSES(TS_SDD_TN, o.desc.bias.data = o.desc.y.data, "y and bias must not overlap in memory");
    REFUSES(TS_DDS_NT, (give_gate(&o), give_residual(&o)),
            "gate.data must be null where a residual is given");
    REFUSES(TS_DDS_NT, o.desc.values.dtype = 8, "values.dtype must be 0 to 7, got 8");
    REFUSES(TS_DDS_NT, o.desc.values.dtype = -1, "values.dtype");
    REFUSES(TS_DDS_NT, o.desc.y.dtype = 5, "y.dtype must be 0 to 4, got 5");
    REFUSES(TS_DDS_NT, o.desc.policy = 3, "policy");
}

/* By default an operand has the dtype of the one that is read. */
static void test_own_dtypes(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.desc.values.dtype = TS_FLOAT32;
    o.desc.y.dtype = TS_DTYPE_DEFAULT;
    SUCCEEDS(run(&o));
    check_forward(&o);
}

static void test_short_structures(void) {
    static operands o;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    o.desc.struct_size = FIRST_MATMUL_DESC;
    SUCCEEDS(run(&o));
    check_forward(&o);
    REFUSES(TS_DDS_NT, o.desc.struct_size = FIRST_MATMUL_DESC - 1,
            "desc.struct_size must be 504 (the first version) to 4096, got 503");

    ts_kernel_info info;
    memset(&info, 0xa5, sizeof info);
    info.struct_size = FIRST_KERNEL_INFO;
    SUCCEEDS(ts_kernel_get(1, &info));
    CHECK(info.struct_size == FIRST_KERNEL_INFO && strncmp(info.name, "cpu", 3) == 0, "%s", info.name);
    for (size_t i = FIRST_KERNEL_INFO; i < sizeof info; ++i)
        CHECK(((unsigned char*)&info)[i] == 0xa5, "byte %d, which the caller does not know, was written",
              (int)i);
}

static void test_long_structures(void) {
    static operands o;
    static struct {
        ts_matmul_desc known;
        unsigned char unknown[40];
    } desc;
    static struct {
        ts_pattern known;
        unsigned char unknown[24];
    } pattern;
    init_operands(&o, TS_DDS_NT, TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);
    desc.known = o.desc;
    desc.known.struct_size = sizeof desc;
    pattern.known = o.pattern;
    pattern.known.struct_size = sizeof pattern;
    desc.known.pattern = &pattern.known;
    size_t bytes = 0;
    SUCCEEDS(ts_matmul_workspace_size(&desc.known, &bytes));
    void* workspace = aligned_alloc(256, (bytes / 256 + 1) * 256);
    SUCCEEDS(ts_matmul(&desc.known, workspace, bytes, NULL));
    free(workspace);
    check_forward(&o);
    pattern.unknown[23] = 1;
    INVALID(ts_matmul_workspace_size(&desc.known, &bytes),
            "pattern must be 0 beyond the 88 bytes that this library (ABI 1) knows, got a nonzero byte 111");
    pattern.unknown[23] = 0;
    desc.unknown[0] = 1;
    INVALID(ts_matmul_workspace_size(&desc.known, &bytes),
            "desc must be 0 beyond the 512 bytes that this library (ABI 1) knows, got a nonzero byte 512");
    desc.known.struct_size = UINT32_MAX;
    INVALID(ts_matmul_workspace_size(&desc.known, &bytes), "desc.struct_size");

    struct {
        ts_device_info known;
        unsigned char unknown[8];
    } device = {{.struct_size = sizeof device}, {1, 2, 3, 4, 5, 6, 7, 8}};
    SUCCEEDS(ts_device_get(TS_CPU, -1, &device.known));
    CHECK(device.known.struct_size == sizeof device && device.known.multiprocessors > 0, "size or content");
    for (int i = 0; i < 8; ++i) CHECK(device.unknown[i] == 0, "byte %d behind the known ones", i);
}

static void test_bad_pattern_descriptors(void) {
    REFUSES(TS_DDS_NT, o.desc.pattern = NULL, "pattern");
    REFUSES(TS_DDS_NT, o.pattern.struct_size = 1, "struct_size");
    REFUSES(TS_DDS_NT, o.pattern.block_rows = 129, "block_rows");
    REFUSES(TS_DDS_NT, o.pattern.block_cols = 0, "block_cols");
    REFUSES(TS_DDS_NT, o.pattern.groups = -1, "groups");
    REFUSES(TS_DDS_NT, o.pattern.out_features = -1, "out_features");
    REFUSES(TS_DDS_NT, o.pattern.in_features = -BK, "in_features");
    REFUSES(TS_DDS_NT, o.pattern.nnz = ROWS * COLS + 1, "nnz");
    REFUSES(TS_DDS_NT, o.pattern.nnz = -1, "nnz");
    REFUSES(TS_DDS_NT, o.desc.pattern = (ts_pattern*)((char*)&o.pattern + 1),
            "pattern must be aligned to 8 bytes");
}

void test_descriptors(void) {
    test_bad_descriptors();
    test_own_dtypes();
    test_short_structures();
    test_long_structures();
    test_bad_pattern_descriptors();
}
