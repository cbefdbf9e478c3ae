/* Gradients of activations, gates, quantization, and rows that are added up. */
#include <math.h>

#include "layer.h"

static void test_bad_gradients_of_activations(void) {
    static float z[16 * 16], workspace[64];
    size_t bytes = 0;
    INVALID(ts_activation_gradient_workspace_size(TS_FLOAT32, 4, 16, NULL), "bytes");
    FAILS(ts_activation_gradient_workspace_size(TS_FLOAT64, 4, 16, &bytes), TS_UNSUPPORTED,
          "dtype must not be 0: no kernel computes this in float64");
    INVALID(ts_activation_gradient_workspace_size(TS_INT8, 4, 16, &bytes), "dtype must be 1 to 4, got 5");
    INVALID(ts_activation_gradient_workspace_size(TS_FLOAT32, -1, 16, &bytes), "tokens");
    INVALID(ts_activation_gradient_workspace_size(TS_FLOAT32, 4, 24, &bytes), "features");
    INVALID(ts_activation_gradient(TS_FLOAT32, TS_NO_ACTIVATION, 4, 16, z, z + 64, z + 64, z + 128, workspace,
                                   sizeof workspace, NULL),
            "activation must be 1 to 3, got 0");
    INVALID(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, NULL, z + 64, z + 64, z + 128, workspace,
                                   sizeof workspace, NULL),
            "z must not be null");
    INVALID(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, z, z + 64, z + 65, z + 128, workspace,
                                   sizeof workspace, NULL),
            "result must be aligned to 16 bytes");
    INVALID(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, z, z + 64, z, z + 128, workspace,
                                   sizeof workspace, NULL),
            "z and result must not overlap in memory");
    INVALID(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, z, z + 64, z + 64, NULL, workspace,
                                   sizeof workspace, NULL),
            "bias_gradient must not be null");
    INVALID(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, z, z + 64, z + 64, z + 100, workspace,
                                   sizeof workspace, NULL),
            "gradient and bias_gradient must not overlap in memory");
    const int64_t most = (INT64_C(1) << 31) - (1 << 16), many = INT64_C(1) << 30;
    INVALID(ts_activation_gradient_workspace_size(TS_FLOAT32, most + 1, 16, &bytes),
            "tokens must be 0 to 2147418112 on a CUDA device, got 2147418113");
    INVALID(ts_activation_gradient_workspace_size(TS_FLOAT32, 4, most + 16, &bytes),
            "features must be 0 to 2147418112 on a CUDA device, got 2147418128");
    INVALID(ts_activation_gradient_workspace_size(TS_FLOAT32, most, most, &bytes),
            "z must have at most 140737488355328 elements, got 2147418112 tokens of 2147418112 features");
    INVALID(ts_activation_gradient(TS_FLOAT32, TS_GELU, most, most, z, z + 64, z + 64, z + 128, workspace,
                                   sizeof workspace, NULL),
            "elements");
    INVALID(ts_activation_gradient(TS_FLOAT32, TS_GELU, many, 4096, z, z, z, z + 128, workspace,
                                   sizeof workspace, NULL),
            "z must have at most 4398046511104 bytes on a CUDA device, got 17592186044416");
    ts_device_info info = {.struct_size = sizeof info};
    if (ts_device_get(TS_CUDA, -1, &info) != TS_SUCCESS) return;
    static _Alignas(256) float scratch[1 << 16]; /* refused before the device sees any of this */
    for (int operand = 0; operand < 4; ++operand) {
        float* operands[] = {z, z + 64, z + 128, z + 192};
        operands[operand] = scratch + 16;
        INVALID(ts_activation_gradient(TS_FLOAT32, TS_GELU, 4, 16, operands[0], operands[1], operands[2],
                                       operands[3], scratch, sizeof scratch, NULL),
                "and workspace overlap");
    }
}

static void test_bad_gates(void) {
    static _Alignas(256) float memory[4][64];
    ts_matrix gate = {memory[0], 16, TS_ROW_MAJOR, 0}, factor = {memory[1], 16, TS_ROW_MAJOR, 0};
    ts_matrix of_result = {memory[2], 16, TS_ROW_MAJOR, 0}, of_gate = {memory[3], 32, TS_ROW_MAJOR, 0};
    ts_matrix of_factor = {memory[3] + 16, 32, TS_ROW_MAJOR, 0}, other;
#define GATE(dtype, activation, ...) ts_gate(dtype, activation, 2, 16, __VA_ARGS__, NULL)
#define GRADIENT(...) ts_gate_gradient(TS_FLOAT32, TS_SILU, 2, 16, __VA_ARGS__, NULL)
    INVALID(ts_gate(TS_FLOAT32, TS_SILU, -1, 16, &gate, &factor, &of_result, NULL),
            "tokens must be 0 to 2147418112 on a CUDA device, got -1");
    INVALID(ts_gate(TS_FLOAT32, TS_SILU, 2, 24, &gate, &factor, &of_result, NULL),
            "features must be a multiple of 16, got 24");
    FAILS(GATE(TS_FLOAT64, TS_SILU, &gate, &factor, &of_result), TS_UNSUPPORTED,
          "dtype must not be 0: no kernel computes this in float64");
    INVALID(GATE(TS_INT8, TS_SILU, &gate, &factor, &of_result), "dtype must be 1 to 4, got 5");
    INVALID(GATE(TS_FLOAT32, 4, &gate, &factor, &of_result), "activation must be 0 to 3, got 4");
    INVALID(GATE(TS_FLOAT32, -1, &gate, &factor, &of_result), "activation must be 0 to 3, got -1");
    INVALID(GATE(TS_FLOAT32, TS_SILU, NULL, &factor, &of_result), "gate must not be null");
    INVALID(GATE(TS_FLOAT32, TS_SILU, &gate, &factor, &factor),
            "factor and result must not overlap in memory");
    other = gate, other.data = NULL;
    INVALID(GATE(TS_FLOAT32, TS_SILU, &gate, &other, &of_result), "factor.data must not be null");
    other = gate, other.ld = 8;
    INVALID(GATE(TS_FLOAT32, TS_SILU, &other, &factor, &of_result), "gate.ld must be at least 16, got 8");
    other = gate, other.ld = 17;
    INVALID(GATE(TS_FLOAT32, TS_SILU, &other, &factor, &of_result),
            "gate.ld must be a multiple of 16 bytes, got 17 elements of 4 bytes");
    other = gate, other.layout = TS_COLUMN_MAJOR;
    INVALID(GATE(TS_FLOAT32, TS_SILU, &gate, &factor, &other), "result.layout must be 0, got 1");
    other = gate, other.data = memory[0] + 1;
    INVALID(GATE(TS_FLOAT32, TS_SILU, &other, &factor, &of_result), "gate must be aligned to 16 bytes");
    INVALID(GRADIENT(&gate, &factor, &of_result, &of_gate, NULL), "factor_gradient must not be null");
    INVALID(GRADIENT(&gate, &factor, &of_result, &gate, &of_factor),
            "gate and gate_gradient must not overlap in memory");
    INVALID(GRADIENT(&gate, &factor, &of_result, &of_gate, &of_gate),
            "gate_gradient and factor_gradient must not overlap in memory");
#undef GATE
#undef GRADIENT
}

static void test_quantization(void) {
    static float x[2][32], scales[3] = {7, 7, 7};
    static signed char values[2][48];
    for (int i = 0; i < 32; ++i) x[0][i] = (float)(i - 31), x[1][i] = 0.5f * (float)i;
    x[0][0] = -63.5f; /* the scale is 0.5 */
    ts_matrix from = {x, 32, TS_ROW_MAJOR, 0}, to = {values, 48, TS_ROW_MAJOR, 0}, other;
#define QUANTIZE(...) ts_quantize(TS_CPU, TS_FLOAT32, TS_INT8, 2, 32, __VA_ARGS__, NULL)
    values[0][32] = 99;
    SUCCEEDS(QUANTIZE(&from, &to, scales));
    CHECK(scales[0] == 0.5f && scales[1] == 15.5f / 127 && scales[2] == 7, "scales %g %g", scales[0],
          scales[1]);
    CHECK(values[0][0] == -127 && values[0][1] == -60 && values[0][31] == 0 && values[0][32] == 99, "int8");
    CHECK(values[1][31] == 127 && values[1][0] == 0, "got %d", values[1][31]);
    SUCCEEDS(ts_quantize(TS_CPU, TS_FLOAT32, TS_FLOAT8_E4M3FN, 1, 32, &from, &to, scales, NULL));
    CHECK((unsigned char)values[0][0] == 0xfe, "-448 is 0xfe, got %d", values[0][0]);
    SUCCEEDS(ts_quantize(TS_CPU, TS_FLOAT32, TS_INT8, 0, 32, &from, &to, NULL, NULL));
    FAILS(ts_quantize(TS_CPU, TS_FLOAT64, TS_INT8, 2, 32, &from, &to, scales, NULL), TS_UNSUPPORTED,
          "dtype must not be 1: float64");
    INVALID(ts_quantize(TS_CPU, TS_FLOAT32, TS_FLOAT16, 2, 32, &from, &to, scales, NULL),
            "quantized_dtype must be 5 or 6, got 3");
    INVALID(ts_quantize(2, TS_FLOAT32, TS_INT8, 2, 32, &from, &to, scales, NULL),
            "device must be 0 or 1, got 2");
    INVALID(ts_quantize(TS_CPU, TS_FLOAT32, TS_INT8, 2, 24, &from, &to, scales, NULL),
            "features must be a multiple of 16, got 24");
    INVALID(QUANTIZE(NULL, &to, scales), "x must not be null");
    INVALID(QUANTIZE(&from, &to, NULL), "scales must not be null");
    INVALID(QUANTIZE(&from, &to, x[1]), "x and scales must not overlap in memory");
    other = from, other.layout = TS_COLUMN_MAJOR;
    INVALID(QUANTIZE(&other, &to, scales), "x.layout must be 0, got 1");
    other = to, other.ld = 31;
    INVALID(QUANTIZE(&from, &other, scales), "quantized.ld must be at least 32, got 31");
    INVALID(QUANTIZE(&from, &from, scales), "x and quantized must not overlap in memory");
#undef QUANTIZE
}

static void test_quantization_of_groups(void) {
    static float x[2][256], scales[2 * 3 + 1];
    static unsigned char values[2][256];
    for (int i = 0; i < 256; ++i) x[0][i] = i < 128 ? 1.75f : 0, x[1][i] = (float)(i - 128) * 7;
    x[0][100] = 448 * 2; /* the scale is 2 */
    x[1][5] = -896 - 7;
    x[1][255] = INFINITY;
    for (int i = 0; i < 7; ++i) scales[i] = 7;
    ts_matrix from = {x, 256, TS_ROW_MAJOR, 0}, to = {values, 256, TS_ROW_MAJOR, 0};
#define QUANTIZE(dtype, tokens, features, ...) \
    ts_quantize_groups(TS_CPU, TS_FLOAT32, dtype, tokens, features, &from, &to, __VA_ARGS__, NULL)
    SUCCEEDS(QUANTIZE(TS_FLOAT8_E4M3FN, 2, 256, scales, 3));
    CHECK(scales[0] == 2 && scales[1] == 903.0f / 448 && scales[2] == 7, "%g %g", scales[0], scales[1]);
    CHECK(scales[3] == 0x1p-116f && isnan(scales[4]) && scales[5] == 7, "%g %g", scales[3], scales[4]);
    CHECK(values[0][100] == 0x7e && values[0][0] == 0x36 && values[0][128] == 0, "got %d", values[0][0]);
    CHECK(values[1][5] == 0xfe && values[1][255] == 0 && values[1][130] == 0, "got %d", values[1][5]);
    SUCCEEDS(QUANTIZE(TS_FLOAT8_E4M3FN, 0, 256, NULL, 1));
    INVALID(QUANTIZE(TS_INT8, 2, 256, scales, 3), "quantized_dtype must be 6 for scales of groups, got 5");
    INVALID(QUANTIZE(TS_FLOAT8_E4M3FN, 2, 192, scales, 3), "features must be a multiple of 128, got 192");
    INVALID(QUANTIZE(TS_FLOAT8_E4M3FN, 2, 256, scales, 1), "scales_ld must be 2 to 2147483647, got 1");
    INVALID(QUANTIZE(TS_FLOAT8_E4M3FN, 2, 256, NULL, 3), "scales must not be null");
    INVALID(QUANTIZE(TS_FLOAT8_E4M3FN, 2, 256, x[1], 3), "x and scales must not overlap in memory");
#undef QUANTIZE
}

/* Two tokens with two rows each. */
static void test_combination(void) {
    static float y[4][32], of_y[4][16], result[2][16], weights[4] = {1, 2, -1, 0.5f}, of_weights[5];
    static int64_t rows[4] = {2, 0, 3, 1}, wrong[4] = {2, 0, 4, 1};
    for (int i = 0; i < 4 * 16; ++i) y[i / 16][i % 16] = (float)(i % 7 - 3);
    of_weights[4] = y[0][16] = of_y[0][0] = 99;
    ts_matrix from = {y, 32, TS_ROW_MAJOR, 0}, to = {result, 16, TS_ROW_MAJOR, 0}, other;
    ts_matrix gradient = {of_y, 16, TS_ROW_MAJOR, 0};
#define COMBINE(...) ts_combine(TS_CPU, TS_FLOAT32, 2, 2, 16, __VA_ARGS__, NULL)
#define GRADIENT(...) ts_combine_gradient(TS_CPU, TS_FLOAT32, 2, 2, 16, __VA_ARGS__, NULL)
    SUCCEEDS(COMBINE(&from, rows, weights, &to));
    for (int t = 0; t < 2; ++t)
        for (int f = 0; f < 16; ++f) {
            const float sum = weights[2 * t] * y[rows[2 * t]][f] + weights[2 * t + 1] * y[rows[2 * t + 1]][f];
            CHECK(result[t][f] == sum, "result[%d, %d] is %g, not %g", t, f, result[t][f], sum);
        }
    SUCCEEDS(GRADIENT(&from, rows, weights, &to, &gradient, of_weights));
    for (int i = 0; i < 4; ++i) {
        float sum = 0;
        for (int f = 0; f < 16; ++f) {
            const float expected = weights[i] * result[i / 2][f];
            sum += y[rows[i]][f] * result[i / 2][f];
            CHECK(of_y[rows[i]][f] == expected, "%g, not %g", of_y[rows[i]][f], expected);
        }
        CHECK(of_weights[i] == sum, "of_weights[%d] is %g, not %g", i, of_weights[i], sum);
    }
    CHECK(of_weights[4] == 99, "written behind the gradient of the weights");
    SUCCEEDS(GRADIENT(NULL, rows, NULL, &to, &gradient, NULL)); /* copies */
    for (int i = 0; i < 4; ++i) CHECK(of_y[rows[i]][3] == result[i / 2][3], "got %g", of_y[rows[i]][3]);
    SUCCEEDS(ts_combine(TS_CPU, TS_FLOAT32, 0, 2, 16, &from, NULL, NULL, &to, NULL));
    INVALID(ts_combine(2, TS_FLOAT32, 2, 2, 16, &from, rows, weights, &to, NULL),
            "device must be 0 or 1, got 2");
    INVALID(ts_combine(TS_CPU, TS_INT8, 2, 2, 16, &from, rows, weights, &to, NULL),
            "dtype must be 1 to 4, got 5");
    INVALID(ts_combine(TS_CPU, TS_FLOAT32, -1, 2, 16, &from, rows, weights, &to, NULL),
            "tokens must be 0 to 2147483647, got -1");
    INVALID(ts_combine(TS_CPU, TS_FLOAT32, 2, -2, 16, &from, rows, weights, &to, NULL),
            "choices must be 0 to 2147483647, got -2");
    INVALID(ts_combine(TS_CPU, TS_FLOAT32, 1 << 20, 1 << 20, 16, &from, rows, weights, &to, NULL),
            "tokens * choices must be 0 to 2147483647, got 1099511627776");
    INVALID(ts_combine(TS_CPU, TS_FLOAT32, 2, 2, 24, &from, rows, weights, &to, NULL),
            "features must be a multiple of 16, got 24");
    INVALID(COMBINE(NULL, rows, weights, &to), "y must not be null");
    INVALID(COMBINE(&from, NULL, weights, &to), "rows must not be null");
    INVALID(COMBINE(&from, rows, weights, NULL), "result must not be null");
    INVALID(COMBINE(&from, wrong, weights, &to), "rows[2] must be 0 to 3, got 4");
    INVALID(COMBINE(&from, rows, (char*)weights + 1, &to), "weights must be aligned to 4 bytes");
    INVALID(COMBINE(&from, rows, result, &to), "weights and result must not overlap in memory");
    INVALID(COMBINE(&from, rows, weights, &from), "y and result must not overlap");
    other = from, other.layout = TS_COLUMN_MAJOR;
    INVALID(COMBINE(&other, rows, weights, &to), "y.layout must be 0, got 1");
    INVALID(GRADIENT(&from, rows, weights, &to, NULL, NULL),
            "y_gradient must not be null where weights_gradient is");
    INVALID(GRADIENT(NULL, rows, weights, &to, &gradient, of_weights), "y must not be null");
    INVALID(GRADIENT(&from, wrong, weights, &to, &gradient, of_weights), "rows[2] must be 0 to 3, got 4");
    INVALID(GRADIENT(&from, rows, weights, &to, &to, of_weights),
            "gradient and y_gradient must not overlap in memory");
    INVALID(GRADIENT(&from, rows, weights, &to, &gradient, of_y),
            "y_gradient and weights_gradient must not overlap in memory");
    INVALID(GRADIENT(&from, rows, weights, &to, &gradient, rows),
            "rows and weights_gradient must not overlap in memory");
#undef COMBINE
#undef GRADIENT
}

void test_elementwise(void) {
    test_bad_gradients_of_activations();
    test_bad_gates();
    test_quantization();
    test_quantization_of_groups();
    test_combination();
}
