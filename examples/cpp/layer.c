/* layer.cpp in C11: one layer of a checkpoint that tilesparse.save has written, on the GPU if
 * there is one, otherwise on the CPU, compared with a result in float64 that is computed here.
 *
 *     layer_c FOLDER LAYER [TOKENS]
 *
 * It reads layers of dense blocks from one file, and compares no checksums; checkpoint.h reads all that there
 * is. The process ends with the first thing that is wrong, in a sentence and with the exit code 1. */

#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <tilesparse/tilesparse.h>
#include <time.h>

#include "numbers.h"
#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#endif

enum { REPETITIONS = 21 };

static _Noreturn void fail(const char* format, ...) {
    va_list words;
    va_start(words, format);
    vfprintf(stderr, format, words);
    va_end(words);
    fputc('\n', stderr);
    exit(1);
}

static void check(ts_status_t status) {
    if (status != TS_SUCCESS) fail("%s: %s", ts_status_string(status), ts_last_error());
}

static void* allocate(size_t bytes) {
    void* memory = aligned_alloc(256, (bytes / 256 + 1) * 256);
    if (memory == NULL) fail("no memory for %zu bytes", bytes);
    return memory;
}

/* --- Memory of the device ------------------------------------------------------------------------------- */

static int32_t device = TS_CPU;

#ifdef WITH_CUDA
static void check_cuda(cudaError_t status) {
    if (status != cudaSuccess) fail("CUDA: %s", cudaGetErrorString(status));
}
#endif

static void* allocate_there(size_t bytes) {
#ifdef WITH_CUDA
    if (device == TS_CUDA) {
        void* memory = NULL;
        check_cuda(cudaMalloc(&memory, bytes + 1));
        return memory;
    }
#endif
    return allocate(bytes);
}

static void copy(void* to, const void* from, size_t bytes) {
#ifdef WITH_CUDA
    if (device == TS_CUDA) {
        check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
        return;
    }
#endif
    if (bytes > 0) memcpy(to, from, bytes);
}

static void* copy_there(const void* host, size_t bytes) {
    void* memory = allocate_there(bytes);
    copy(memory, host, bytes);
    return memory;
}

/* Until what was launched has ended. */
static void wait(void) {
#ifdef WITH_CUDA
    if (device == TS_CUDA) check_cuda(cudaDeviceSynchronize());
#endif
}

/* --- JSON: places in a text that ends with a zero; NULL where it is none ----------------------------------
 */

static const char* skip_space(const char* at) {
    while (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n') ++at;
    return at;
}

static const char* skip_string(const char* at) {
    for (++at; *at != '"'; ++at) {
        if (*at == '\\') ++at;
        if (*at == '\0') return NULL;
    }
    return at + 1;
}

static const char* skip_value(const char* at, int depth) {
    if (*at == '"') return skip_string(at);
    if (*at != '{' && *at != '[') {
        const size_t length = strcspn(at, ",]} \t\r\n");
        return length > 0 ? at + length : NULL;
    }
    const char end = *at == '{' ? '}' : ']';
    if (depth == 64) return NULL;
    at = skip_space(at + 1);
    while (*at != end) { /* keys and values, one after the other */
        at = skip_value(at, depth + 1);
        if (at == NULL) return NULL;
        at = skip_space(at);
        if (*at == ',' || *at == ':')
            at = skip_space(at + 1);
        else if (*at != end)
            return NULL;
    }
    return at + 1;
}

/* The value of a key that is written without escapes, or NULL. */
static const char* find(const char* object, const char* key) {
    if (object == NULL || *object != '{') return NULL;
    const size_t length = strlen(key);
    const char* at = skip_space(object + 1);
    while (*at == '"') {
        const char* const after = skip_string(at);
        if (after == NULL) return NULL;
        const bool is_it = (size_t)(after - at) == length + 2 && memcmp(at + 1, key, length) == 0;
        at = skip_space(after);
        if (*at != ':') return NULL;
        at = skip_space(at + 1);
        if (is_it) return skip_value(at, 0) != NULL ? at : NULL;
        at = skip_value(at, 0);
        if (at == NULL) return NULL;
        at = skip_space(at);
        if (*at != ',') return NULL;
        at = skip_space(at + 1);
    }
    return NULL;
}

static const char* member(const char* object, const char* key) {
    const char* value = find(object, key);
    if (value == NULL) fail("%s: missing", key);
    return value;
}

static bool is_text(const char* value, const char* text) {
    const size_t length = strlen(text);
    return *value == '"' && strncmp(value + 1, text, length) == 0 && value[length + 1] == '"';
}

/* Reads `count` integers from 0 on, of a list or alone. Returns how many there are, or count + 1 where they
 * are more or others. */
static int read_integers(const char* value, int64_t* integers, int count) {
    const bool is_list = *value == '[';
    int found = 0;
    if (is_list) value = skip_space(value + 1);
    if (is_list && *value == ']') return 0;
    for (;;) {
        char* end = NULL;
        if (found == count || *value < '0' || *value > '9') return count + 1;
        integers[found++] = strtoll(value, &end, 10); /* the largest one, where it is larger */
        if (strcspn(end, ",]} \t\r\n") > 0) return count + 1;
        value = skip_space(end);
        if (!is_list || *value == ']') return found;
        if (*value != ',') return count + 1;
        value = skip_space(value + 1);
    }
}

static int64_t integer(const char* object, const char* key) {
    int64_t number = 0;
    if (read_integers(member(object, key), &number, 1) != 1 || number > INT32_MAX)
        fail("%s must be an integer from 0 to %d", key, INT32_MAX);
    return number;
}

/* --- The files of a checkpoint -----------------------------------------------------------------------------
 */

/* A whole file, with a zero behind it. */
static char* read_file(const char* folder, const char* name, size_t* size) {
    char path[4096];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
        fail("%s: too long", folder);
    FILE* file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) fail("%s: cannot be read", path);
    const long length = ftell(file);
    if (length < 0 || fseek(file, 0, SEEK_SET) != 0) fail("%s: cannot be read", path);
    char* text = allocate((size_t)length + 1);
    if (fread(text, 1, (size_t)length, file) != (size_t)length) fail("%s: cannot be read", path);
    fclose(file);
    text[length] = '\0';
    *size = (size_t)length;
    return text;
}

/* By TS_FLOAT64 to TS_BFLOAT16. */
static const char* const dtype_names[] = {"", "float64", "float32", "float16", "bfloat16"};
static const char* const stored_names[] = {"", "F64", "F32", "F16", "BF16"};
static const size_t dtype_bytes[] = {0, 8, 4, 2, 2};

typedef struct tensors {
    const char* header; /* of the safetensors file */
    const char* data;
    int64_t size;       /* of the data */
    const char* prefix; /* of the names of this layer */
    const char* ties;   /* of the configuration: names of tensors that are stored under others, or NULL */
} tensors;

static tensors open_tensors(const char* file, size_t size, const char* prefix, const char* ties) {
    uint64_t length = 0;
    if (size < 8) fail("model.safetensors: no safetensors file");
    for (int i = 7; i >= 0; --i) length = length << 8 | (unsigned char)file[i];
    if (length > size - 8) fail("model.safetensors: the header is longer than the file");
    char* header = allocate(length + 1);
    memcpy(header, file + 8, length);
    header[length] = '\0';
    return (tensors){skip_space(header), file + 8 + length, (int64_t)(size - 8 - length), prefix, ties};
}

/* A tensor of so many elements, copied to where it is aligned; NULL where it is not there and need not be. */
static void* read_tensor(const tensors* from, const char* name, const char* dtype, size_t itemsize,
                         int64_t elements, bool is_needed) {
    char key[1024];
    if ((size_t)snprintf(key, sizeof key, "%s%s", from->prefix, name) >= sizeof key)
        fail("%s: too long", name);
    const char* const entry = find(from->header, key);
    if (find(from->ties, key) != NULL)
        fail("%s: shared with another layer; checkpoint.h reads such tensors", key);
    if (entry == NULL && !is_needed) return NULL;
    if (entry == NULL) fail("%s: missing", key);
    int64_t shape[4], range[2], count = 1;
    const int rank = read_integers(member(entry, "shape"), shape, 4);
    if (rank > 4) fail("%s: shape must be at most 4 integers that are not negative", key);
    for (int i = 0; i < rank; ++i) {
        if (shape[i] > 0 && count > elements / shape[i])
            fail("%s: shape has more elements than the layer", key);
        count *= shape[i];
    }
    if (!is_text(member(entry, "dtype"), dtype) || count != elements)
        fail("%s must have the dtype and shape that config.json says", key);
    if (read_integers(member(entry, "data_offsets"), range, 2) != 2 || range[0] > range[1] ||
        range[1] > from->size || (uint64_t)(range[1] - range[0]) != (uint64_t)elements * itemsize)
        fail("%s: data_offsets must be a range within the file", key);
    void* tensor = allocate((size_t)(range[1] - range[0]));
    memcpy(tensor, from->data + range[0], (size_t)(range[1] - range[0]));
    return tensor;
}

/* --- One layer ---------------------------------------------------------------------------------------------
 */

typedef struct layer {
    int32_t dtype;
    ts_pattern pattern; /* in host memory, with the arrays by column */
    void* values;
    void* bias; /* or NULL */
} layer;

static layer read_layer(const char* folder, const char* name) {
    size_t size = 0;
    const char* config = skip_space(read_file(folder, "config.json", &size));
    const char* section = find(config, "quantization_config"); /* of Transformers */
    const char* method = find(section, "quant_method");
    if (method == NULL || !is_text(method, "tilesparse")) section = member(config, "tilesparse");
    if (integer(section, "version") != 1) fail("config.json: version must be 1; a newer program is needed");
    const char* entry = member(member(section, "layers"), name);
    const char* nm = find(entry, "nm");
    if (!is_text(member(entry, "storage"), "plain") || (nm != NULL && *nm != 'n'))
        fail("%s must be stored as dense blocks; checkpoint.h reads the others", name);

    layer read = {.dtype = TS_DTYPE_DEFAULT};
    for (int32_t dtype = TS_FLOAT64; dtype <= TS_BFLOAT16; ++dtype)
        if (is_text(member(entry, "dtype"), dtype_names[dtype])) read.dtype = dtype;
    int64_t shape[2], block[2];
    if (read.dtype == TS_DTYPE_DEFAULT) fail("%s: dtype must be one of activations", name);
    if (read_integers(member(entry, "shape"), shape, 2) != 2 || shape[0] > INT32_MAX || shape[1] > INT32_MAX)
        fail("%s: shape must be two numbers", name);
    if (read_integers(member(entry, "block_shape"), block, 2) != 2 || block[0] < 16 || block[0] > 128 ||
        block[1] < 16 || block[1] > 128)
        fail("%s: block_shape must be two numbers from 16 to 128", name);

    char prefix[1000];
    if ((size_t)snprintf(prefix, sizeof prefix, "%s%s", name, *name != '\0' ? "." : "") >= sizeof prefix)
        fail("%s: too long", name);
    const char* file = read_file(folder, "model.safetensors", &size);
    const tensors from = open_tensors(file, size, prefix, find(section, "ties"));
    const int64_t nnz = integer(entry, "nnz");
    const size_t itemsize = dtype_bytes[read.dtype];
    read.values =
        read_tensor(&from, "weight", stored_names[read.dtype], itemsize, nnz * block[0] * block[1], true);
    read.bias = read_tensor(&from, "bias", stored_names[read.dtype], itemsize, shape[0], false);

    ts_pattern* pattern = &read.pattern;
    pattern->struct_size = sizeof *pattern;
    pattern->block_rows = (int32_t)block[0];
    pattern->block_cols = (int32_t)block[1];
    pattern->out_features = shape[0];
    pattern->in_features = shape[1];
    pattern->nnz = nnz;
    pattern->row_ptr = read_tensor(&from, "crow_indices", "I32", 4, shape[0] / block[0] + 1, true);
    pattern->col_idx = read_tensor(&from, "col_indices", "I32", 4, nnz, true);
    pattern->row_slot = read_tensor(&from, "slot", "I32", 4, nnz, true);
    check(ts_pattern_validate(pattern));
    int32_t* col_ptr = allocate(((size_t)(shape[1] / block[1]) + 1) * 4);
    int32_t* row_idx = allocate((size_t)nnz * 4);
    int32_t* col_slot = allocate((size_t)nnz * 4);
    check(ts_pattern_transpose(pattern, col_ptr, row_idx, col_slot));
    pattern->col_ptr = col_ptr;
    pattern->row_idx = row_idx;
    pattern->col_slot = col_slot;
    return read;
}

/* --- Its product
 * -------------------------------------------------------------------------------------------- */

static ts_pattern pattern_there(const ts_pattern* host) {
    ts_pattern there = *host;
    const size_t rows = (size_t)(host->out_features / host->block_rows) + 1, nnz = (size_t)host->nnz;
    const size_t cols = (size_t)(host->in_features / host->block_cols) + 1;
    there.row_ptr = copy_there(host->row_ptr, rows * 4);
    there.col_idx = copy_there(host->col_idx, nnz * 4);
    there.row_slot = copy_there(host->row_slot, nnz * 4);
    there.col_ptr = copy_there(host->col_ptr, cols * 4);
    there.row_idx = copy_there(host->row_idx, nnz * 4);
    there.col_slot = copy_there(host->col_slot, nnz * 4);
    return there;
}

/* Chooses the kernel and gives the product the plan that it walks. */
static int32_t plan_product(ts_matmul_desc* product, const ts_pattern* host, const ts_device_info* info) {
    int32_t kernel = 0;
    size_t bytes = 0;
    check(ts_matmul_select(product, info, &kernel, NULL, 0));
    check(ts_plan_size(host, kernel, product->op, &bytes));
    product->kernel = kernel;
    if (bytes == 0) return kernel;
    void* plan = allocate(bytes);
    check(ts_plan_build(host, kernel, product->op, plan, bytes));
    check(ts_plan_key(host, kernel, product->op, &product->plan.key));
    product->plan.data = copy_there(plan, bytes);
    product->plan.bytes = bytes;
    free(plan);
    return kernel;
}

static double milliseconds_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

static int compare_times(const void* a, const void* b) {
    return (*(const double*)a > *(const double*)b) - (*(const double*)a < *(const double*)b);
}

/* The median of several runs; on a GPU, with the launch and the wait for its end. */
static double run(const ts_matmul_desc* product) {
    size_t bytes = 0;
    double times[REPETITIONS];
    check(ts_matmul_workspace_size(product, &bytes));
    void* workspace = allocate_there(bytes);
    for (int i = 0; i < REPETITIONS; ++i) {
        const double begin = milliseconds_now();
        check(ts_matmul(product, workspace, bytes, NULL));
        wait();
        times[i] = milliseconds_now() - begin;
    }
    qsort(times, REPETITIONS, sizeof times[0], compare_times);
    return times[REPETITIONS / 2];
}

/* The largest error of y in parts of what is allowed, against sums in float64. */
static double largest_error(const layer* of, const void* x, const void* y, size_t tokens) {
    const ts_pattern* pattern = &of->pattern;
    const size_t in = (size_t)pattern->in_features, out = (size_t)pattern->out_features;
    const size_t rows = (size_t)pattern->block_rows, cols = (size_t)pattern->block_cols;
    double largest = 0;
    for (size_t t = 0; t < tokens; ++t)
        for (size_t n = 0; n < out; ++n) {
            double sum = of->bias == NULL ? 0 : get_number(of->bias, n, of->dtype), sizes = fabs(sum);
            const int32_t first = pattern->row_ptr[n / rows], last = pattern->row_ptr[n / rows + 1];
            for (int32_t e = first; e < last; ++e)
                for (size_t k = 0; k < cols; ++k) {
                    const size_t place = ((size_t)pattern->row_slot[e] * rows + n % rows) * cols + k;
                    const size_t column = (size_t)pattern->col_idx[e] * cols + k;
                    const double product =
                        get_number(of->values, place, of->dtype) * get_number(x, t * in + column, of->dtype);
                    sum += product;
                    sizes += fabs(product);
                }
            const double number = get_number(y, t * out + n, of->dtype);
            const int64_t terms = (last - first) * (int64_t)cols;
            const double error = fabs(number - sum) / allowed_error(sum, sizes, terms, of->dtype);
            if (number != sum && !(error <= largest)) largest = isnan(error) ? INFINITY : error;
        }
    return largest;
}

int main(int count, char** arguments) {
    if (count < 3 || count > 4) {
        fprintf(stderr, "usage: %s FOLDER LAYER [TOKENS]\n", arguments[0]);
        return 2;
    }
    if (ts_abi_version() != TS_ABI_VERSION)
        fail("compiled for ABI %d of tilesparse, but %s, which is loaded, has %d", TS_ABI_VERSION,
             ts_version(), (int)ts_abi_version());
    char* end = "";
    const long tokens = count == 4 ? strtol(arguments[3], &end, 10) : 64;
    if (tokens < 1 || tokens > 1 << 20 || *end != '\0')
        fail("TOKENS must be 1 to 1048576, got %s", arguments[3]);

    ts_device_info info = {.struct_size = sizeof info};
#ifdef WITH_CUDA
    if (ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS)
        device = TS_CUDA;
    else
        fprintf(stderr, "on the CPU, since there is no GPU: %s\n", ts_last_error());
#endif
    if (device == TS_CPU) check(ts_device_get(TS_CPU, -1, &info));

    const layer read = read_layer(arguments[1], arguments[2]);
    const size_t in = (size_t)read.pattern.in_features, out = (size_t)read.pattern.out_features;
    const size_t itemsize = dtype_bytes[read.dtype], x_size = (size_t)tokens * in,
                 y_size = (size_t)tokens * out;
    void* const x = allocate(x_size * itemsize);
    void* const y = allocate(y_size * itemsize);
    uint32_t state = 1;
    for (size_t i = 0; i < x_size; ++i) {
        state = state * 1664525u + 1013904223u;
        put_eighths(x, i, read.dtype, (int)(state >> 28) - 8);
    }

    const ts_pattern pattern = device == TS_CUDA ? pattern_there(&read.pattern) : read.pattern;
    ts_matmul_desc product = {.struct_size = sizeof product, .op = TS_DDS_NT, .device = device};
    product.tokens = tokens;
    product.pattern = &pattern;
    product.x =
        (ts_operand){.data = copy_there(x, x_size * itemsize), .ld = (int64_t)in, .dtype = read.dtype};
    product.y = (ts_operand){.data = allocate_there(y_size * itemsize), .ld = (int64_t)out};
    product.values.data = copy_there(read.values, (size_t)read.pattern.nnz * (size_t)pattern.block_rows *
                                                      (size_t)pattern.block_cols * itemsize);
    if (read.bias != NULL) product.bias.data = copy_there(read.bias, out * itemsize);
    const int32_t kernel = plan_product(&product, &read.pattern, &info);
    const double milliseconds = run(&product);
    copy(y, product.y.data, y_size * itemsize);

    ts_kernel_info chosen = {.struct_size = sizeof chosen};
    check(ts_kernel_get(kernel, &chosen));
    const double error = largest_error(&read, x, y, (size_t)tokens);
    printf("%s (%s), %s: %.4f ms, error %.3f of what is allowed\n", device == TS_CUDA ? "cuda" : "cpu",
           info.name, chosen.name, milliseconds, error);
    return error <= 1 ? 0 : 1; /* the memory ends with the process */
}
