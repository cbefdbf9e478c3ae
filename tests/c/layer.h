/* Shared by the tests of the C interface: checks, and one small layer with the operands of its products. */
#ifndef TILESPARSE_TESTS_LAYER_H_
#define TILESPARSE_TESTS_LAYER_H_

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <tilesparse/tilesparse.h>

extern int failures;

#define CHECK(condition, ...)                                      \
    do {                                                           \
        if (!(condition)) {                                        \
            ++failures;                                            \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            printf(" (last error: %s)\n", ts_last_error());        \
        }                                                          \
    } while (0)

#define SUCCEEDS(call)                                                          \
    do {                                                                        \
        const ts_status_t status = (call);                                      \
        CHECK(status == TS_SUCCESS, "%s: %s", #call, ts_status_string(status)); \
    } while (0)

/* The call returns the status, and the sentence about it mentions a word. */
#define FAILS(call, expected, mention)                                                        \
    do {                                                                                      \
        const ts_status_t status = (call);                                                    \
        CHECK(status == (expected), "%s: %s", #call, ts_status_string(status));               \
        CHECK(strstr(ts_last_error(), (mention)) != NULL, "no mention of \"%s\"", (mention)); \
    } while (0)

#define INVALID(call, mention) FAILS(call, TS_INVALID_ARGUMENT, mention)

/* After `change` the product fails with that status, its text mentions a word, and nothing is written. */
#define REFUSES(op, change, mention) REFUSES_WITH(TS_INVALID_ARGUMENT, op, change, mention)
#define REFUSES_WITH(expected, op_, change, mention)                                          \
    do {                                                                                      \
        static operands o, before;                                                            \
        init_operands(&o, (op_), TS_FLOAT32, TS_ROW_MAJOR, TS_ROW_MAJOR);                     \
        change;                                                                               \
        before = o;                                                                           \
        static double workspace[1 << 16];                                                     \
        FAILS(ts_matmul(&o.desc, workspace, sizeof workspace, NULL), expected, mention);      \
        CHECK(memcmp(before.memory, o.memory, sizeof o.memory) == 0, "%s: written", #change); \
    } while (0)

/* Bytes of the structures in the first version of the header. */
enum { FIRST_MATMUL_DESC = 504, FIRST_KERNEL_INFO = 116 };

/* Block row 1 is empty, slots are out of order. */
enum { BN = 16, BK = 32, ROWS = 3, COLS = 2, NNZ = 3, OUT = ROWS * BN, IN = COLS * BK, TOKENS = 5 };

extern int32_t row_ptr[ROWS + 1];
extern int32_t col_idx[NNZ];
extern int32_t row_slot[NNZ];
extern int32_t col_ptr[COLS + 1];
extern int32_t row_idx[NNZ];
extern int32_t col_slot[NNZ];
extern const double kUntouched;

/* Operands of a product in float32 or float64, with gaps between their lines. */
typedef struct operands {
    ts_pattern pattern;
    ts_matmul_desc desc;
    _Alignas(16) double memory[5][4096]; /* x, y, values, bias, residual; aligned as for CUDA */
} operands;

ts_pattern layer_pattern(void);

double get(const operands* o, int which, int64_t i);

void put(operands* o, int which, int64_t i, double value);

void init_operands(operands* o, int32_t op, int32_t dtype, int32_t x_layout, int32_t y_layout);

void give_residual(operands* o);

/* Multiples of 1/8, so that relu of them is exact. */
void give_gate(operands* o);

/* Sets what receives the gradient of the bias, filled with kUntouched. */
void give_bias_gradient(operands* o, int32_t accumulate);

int64_t at(const ts_operand* m, int64_t token, int64_t feature);

double x_at(const operands* o, int64_t t, int64_t f);

double y_at(const operands* o, int64_t t, int64_t f);

double weight(const operands* o, int64_t n, int64_t k);

/* Runs the product with the workspace it asks for. */
ts_status_t run(operands* o);

void check_forward(const operands* o);

void check_gradient_of_x(const operands* o);

void check_gradient_of_values(const operands* o);

/* The name of a kernel, the kernel for every processor, and a device that need not be there. */
const char* kernel_name(int32_t kernel);
int32_t portable_kernel(void);
ts_device_info h100(void);

/* The tests, one function for each file. */
void test_library(void);
void test_patterns(void);
void test_descriptors(void);
void test_memory_of_operands(void);
void test_elementwise(void);
void test_encoder(void);
void test_selection(void);
void test_plans(void);
void test_compressions(void);
void test_storages(void);
void test_eight_bits(void);
void test_products(void);
void test_groups(void);

#endif /* TILESPARSE_TESTS_LAYER_H_ */
