/* TileSparse: block-sparse linear algebra, the whole public C ABI. It stays one file: programs copy it, and
 * the baseline of the ABI is read from it.
 *
 * A weight W of shape [out_features, in_features] is cut into blocks of block_rows x block_cols;
 * only `nnz` of them are kept. The last block row and column may reach out of W: parts of a block that lie
 * there are never read, and TS_SDD_TN writes zeros there. Three products are offered on x [tokens,
 * in_features] and y [tokens, out_features]:
 *
 *   TS_DDS_NT   y  = activation(x W^T + bias) + residual   forward, or with a gate
 *               y  = (x W^T + bias) * activation(gate)
 *   TS_DDS_NN   x  = y W                                   gradient of x
 *   TS_SDD_TN   W  = y^T x, on the pattern                 gradient of W
 *               and the sums over tokens of y              gradient of the bias
 *
 * The product dsd, Y = W X with X [in_features, tokens], is TS_DDS_NT on column-major x and y.
 *
 * Rules that hold for every function:
 *  - The caller owns all memory. No function allocates device memory or synchronises, so every
 *    ts_matmul on a CUDA device can be captured in a graph.
 *  - Functions return TS_SUCCESS or one status per cause; ts_last_error() then has a sentence
 *    naming the field, the value and what is allowed. On an error nothing has been written: all is checked
 *    before. Only with TS_CUDA_ERROR, which the CUDA runtime reports while work is enqueued, what was
 *    enqueued before may still be written.
 *  - A call reports errors of the CUDA runtime of its own. One that was there before, for cudaGetLastError,
 *    is neither reported nor taken away.
 *  - Memory that a call writes, its workspace among it, overlaps nothing that it reads.
 *  - For a CUDA device tokens and features are at most 2^31 - 2^16, and an operand at most 2^42 bytes.
 *  - Structures start with struct_size, set by the caller to sizeof(the structure); fields are only
 *    ever appended. Zero is the default of every optional field and enumeration. The library takes every size
 *    from that of the first version to 4096: fields that a smaller one lacks are zero, and it writes no field
 *    that the caller does not know; of larger ones the bytes that this library does not know must be zero,
 *    and become zero in results. ts_operand and ts_prepared lie within ts_matmul_desc and never grow.
 *  - Memory is as large as its arguments say. What they say of each other is checked: nothing that a
 *    structure holds, nor a null or misaligned pointer, ends the process. Arrays in device memory are not
 *    read for that, so the caller answers for what they hold.
 *  - All functions are thread-safe.
 */
#ifndef TILESPARSE_TILESPARSE_H_
#define TILESPARSE_TILESPARSE_H_

#include <stddef.h>
#include <stdint.h>

#define TS_VERSION "0.1.0"
#define TS_ABI_VERSION 1

#if defined(__GNUC__)
#define TS_API __attribute__((visibility("default")))
#else
#define TS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t ts_status_t;
enum {
    TS_SUCCESS = 0,
    TS_INVALID_ARGUMENT = 1,    /* a field is out of range, null or inconsistent */
    TS_INVALID_PATTERN = 2,     /* pattern arrays break an invariant of ts_pattern */
    TS_UNSUPPORTED = 3,         /* valid, but no kernel of this library computes it */
    TS_NO_DEVICE = 4,           /* no usable CUDA device, or a library built without CUDA */
    TS_WORKSPACE_TOO_SMALL = 5, /* the workspace or the plan has fewer bytes than asked for */
    TS_CUDA_ERROR = 6,          /* the CUDA runtime reported an error */
    TS_OUT_OF_MEMORY = 7,       /* host memory */
    TS_INTERNAL_ERROR = 8,
    TS_STALE_PLAN = 9 /* an earlier product on a GPU found another plan than its own, see ts_plan_check */
};

/* Element types. A default is that of another operand, see ts_matmul_desc. TS_INT8 and TS_FLOAT8_E4M3FN are
 * dtypes of values, and of x for TS_DDS_NT; TS_INT4 is a dtype of values only. */
enum {
    TS_DTYPE_DEFAULT = 0,
    TS_FLOAT64 = 1,
    TS_FLOAT32 = 2,
    TS_FLOAT16 = 3,
    TS_BFLOAT16 = 4,
    TS_INT8 = 5,
    TS_FLOAT8_E4M3FN = 6,
    TS_INT4 = 7
};
enum { TS_CPU = 0, TS_CUDA = 1 };
enum { TS_DDS_NT = 0, TS_DDS_NN = 1, TS_SDD_TN = 2 };
/* TS_GELU is the one with erf; CUDA kernels for float16 and bfloat16 compute it within 1e-5 before rounding.
 */
enum { TS_NO_ACTIVATION = 0, TS_RELU = 1, TS_GELU = 2, TS_SILU = 3 };
/* Element (t, f) of a tokens x features matrix is at t * ld + f (row-major) or f * ld + t (column-major). */
enum { TS_ROW_MAJOR = 0, TS_COLUMN_MAJOR = 1 };
/* How the values of the kept blocks lie in memory.
 *
 * TS_STORAGE_DENSE: dense blocks [nnz, bn, bk].
 * TS_STORAGE_2_4: [nnz, bn, bk / 2], for bk of 32, 64 or 128. At most two of each 4 neighbours in a row of a
 * block are not zero; two of them are stored, in order, and the metadata says which. Metadata is 32-bit
 * words [nnz, bk / 32, bn / 16, 8, 2]: word (i, c, r, g, h) has the columns 32 c + 16 h and the 15 behind it,
 * of the rows 16 r + g (its low half) and 16 r + g + 8. A half is four groups of 4 columns, from its low end
 * on, each the number of the first kept column in its two low bits and of the second, greater one in the two
 * above.
 *
 * Values of TS_INT4 are stored in TS_STORAGE_DENSE only. A value is -8 to 7 in two's complement, and byte j
 * of a row of a block, [nnz, bn, bk / 2], has the one of column 2 j in its low four bits and that of 2 j + 1
 * in the high ones. */
enum { TS_STORAGE_DENSE = 0, TS_STORAGE_2_4 = 1 };
/* Granularity: how many elements of an operand of 8 or 4 bits share a float32 scale.
 *
 * values:  TS_SCALES_PER_BLOCK    [nnz]
 *          TS_SCALES_PER_ROW      [nnz, bn], one for each row of a block
 *          TS_SCALES_PER_FEATURE  [out_features], where x has 8 bits and TS_SCALES_PER_TOKEN, and only there
 * x:       TS_SCALES_PER_TOKEN    [tokens]
 *          TS_SCALES_PER_GROUP    one for each token and 128 of k, where x is of TS_FLOAT8_E4M3FN, blocks are
 *                                 128 x 128 and values have TS_SCALES_PER_BLOCK. The scales of k from 128 g
 *                                 on are at g * scales_ld, which is at least tokens, and on TS_CUDA a
 *                                 multiple of 4
 *
 * Where x has 16 bits or more, a weight is value times scale in float32, rounded to the dtype of x (y for
 * TS_DDS_NN); kernels that read values of 8 or 4 bits themselves may not round it. Where x has 8 bits, either
 *     y[t, f] = sum over k of x[t, k] W[f, k], times x.scales[t], times values.scales[f]
 * with scales outside of the sums, or with TS_SCALES_PER_GROUP inside of them
 *     y[t, f] = sum over g of (sum over k from 128 g to 128 g + 127 of x[t, k] W[f, k])
 *               times x.scales[g * x.scales_ld + t] times values.scales[the block's]
 * before bias, activation and the rest. */
enum {
    TS_SCALES_NONE = 0,
    TS_SCALES_PER_BLOCK = 1,
    TS_SCALES_PER_ROW = 2,
    TS_SCALES_PER_FEATURE = 3,
    TS_SCALES_PER_TOKEN = 4,
    TS_SCALES_PER_GROUP = 5
};
/* How tensor cores multiply float32: with float32-level error (3xTF32), or in TF32; and x and values of
 * TS_FLOAT8_E4M3FN on compute capability 9.0, whose accumulators keep about 13 bits of a sum: carried over to
 * float32 every 512 products, so that sums of products of one sign and alike sizes are within .4 %, or there
 * throughout (fast), 1.5 % too small for 1024 features and 25 % for 16384. */
enum { TS_PRECISION_HIGHEST = 0, TS_PRECISION_TF32 = 1, TS_PRECISION_FAST = 1 };
/* TS_SDD_TN: what is added to what is there instead of overwriting it. Bits. */
enum { TS_ACCUMULATE_NOTHING = 0, TS_ACCUMULATE_VALUES = 1, TS_ACCUMULATE_BIAS = 2 };
/* The answers that ts_matmul_select may give: a kernel of this library; such a kernel or TS_RUN_DENSE,
 * whichever is estimated to be faster; always TS_RUN_DENSE. */
enum { TS_POLICY_SPARSE = 0, TS_POLICY_AUTO = 1, TS_POLICY_DENSE = 2 };
/* Kernels have numbers from 1 to ts_kernel_count(). In place of one: the library chooses; or the caller
 * writes W dense and runs the product in a dense library, which ts_matmul does not do. */
enum { TS_KERNEL_DEFAULT = 0, TS_RUN_DENSE = -1 };

/* Neurons that are off, in TS_DDS_NT of at most 8 tokens, or of any number in a grouped product. Numbers
 * whose magnitude is at most the threshold count as zeros; NaN and infinities never do.
 *
 * With TS_SKIP_INPUTS these are numbers of x. Columns of the weight that meet zeros of all tokens are not
 * read. On TS_CUDA `values` has each block transposed, [nnz, bk, bn]. On TS_CPU it has the weights of a
 * neuron together: for each column of blocks, in the order of col_slot, [bk, blocks of the column, bn]; the
 * arrays of the pattern by column are read. Scales are as they are otherwise.
 *
 * With TS_SKIP_OUTPUTS these are numbers of the gate, which must be there and has no activation. Their
 * results are 0, and rows of the weight whose gate is zero for all tokens are not read.
 *
 * x and y are TS_ROW_MAJOR, of one dtype: TS_FLOAT16, TS_BFLOAT16, on TS_CPU also TS_FLOAT32. Values are
 * dense blocks of that dtype or TS_INT8: on TS_CPU in blocks of 32 or more, on TS_CUDA with TS_SKIP_INPUTS in
 * blocks of 128 rows and 64 or more columns. Weights are not rounded to the dtype of x. With TS_SKIP_OUTPUTS
 * group_offsets is null. kernel is 0; plan, policy and prefer do not count. A result does not depend on the
 * order of tokens, nor on which others there are but for rounding. */
enum { TS_SKIP_NOTHING = 0, TS_SKIP_INPUTS = 1, TS_SKIP_OUTPUTS = 2 };

/* A stream as cudaStream_t; NULL is the default stream. Ignored on the CPU. */
typedef struct CUstream_st* ts_stream_t;

/* Which blocks of W are kept, as block compressed rows (BSR) and its transpose.
 * Block rows are sorted by column without duplicates. Entry e of a row belongs to block
 * values[row_slot[e]], so that changing the pattern moves no weight; slots are a permutation of
 * 0..nnz-1. The transpose lists the same blocks by column, made by ts_pattern_transpose.
 * The arrays lie in memory of the device that reads them: host memory for the functions on
 * patterns and plans and for TS_CPU, device memory for ts_matmul on TS_CUDA. */
typedef struct ts_pattern {
    uint32_t struct_size;
    int32_t block_rows; /* bn: 2 to 128 */
    int32_t block_cols; /* bk: 2 to 128 */
    int32_t groups; /* 0 or 1: one weight. E, at most 1024: weights of equal shape below each other, such as
                       those of experts; out_features is that of all, E times that of one. Column arrays go
                       by group: col_ptr is [E * C + 1], and row_idx counts block
                       rows from the group's first */
    int64_t out_features;    /* elements; R = out_features / block_rows, rounded up, block rows */
    int64_t in_features;     /* C = in_features / block_cols, rounded up, block columns */
    int64_t nnz;             /* kept blocks */
    const int32_t* row_ptr;  /* [R + 1] */
    const int32_t* col_idx;  /* [nnz] */
    const int32_t* row_slot; /* [nnz] */
    const int32_t* col_ptr;  /* [C + 1] */
    const int32_t* row_idx;  /* [nnz] */
    const int32_t* col_slot; /* [nnz] */
} ts_pattern;

/* A matrix of tokens x features in one of the two layouts, for the functions that are no product. */
typedef struct ts_matrix {
    void* data;
    int64_t ld;       /* leading dimension: elements from one row (column) to the next */
    int32_t layout;   /* TS_ROW_MAJOR or TS_COLUMN_MAJOR */
    int32_t reserved; /* zero */
} ts_matrix;

/* One operand of a product. Fields that an operand does not have, see the table below, are zero. */
typedef struct ts_operand {
    void* data;
    int64_t ld;          /* leading dimension: elements from one row (column-major: column) to the next */
    int32_t layout;      /* TS_ROW_MAJOR or TS_COLUMN_MAJOR */
    int32_t dtype;       /* TS_DTYPE_DEFAULT or an element type */
    int32_t storage;     /* TS_STORAGE_DENSE or TS_STORAGE_2_4 */
    int32_t granularity; /* TS_SCALES_NONE or how many elements share a scale */
    const float* scales;
    int64_t scales_ld;    /* leading dimension of scales that are TS_SCALES_PER_GROUP */
    const void* metadata; /* of TS_STORAGE_2_4 */
} ts_operand;

/* Memory made for some kernels: a plan, or prepacked values. */
typedef struct ts_prepared {
    const void* data;
    size_t bytes;
    int64_t key; /* of ts_plan_key for the kernel that it was made for: products for which a kernel with
                    another key is chosen then refuse it; 0: not known */
} ts_prepared;

/* One product.
 *
 *   field          | TS_DDS_NT                  | TS_DDS_NN             | TS_SDD_TN
 *   ---------------+----------------------------+-----------------------+------------------------------------
 *   x              | read [tokens, in]; its     | written; default y's  | read; its dtype is given
 *                  | dtype is given             | dtype                 |
 *   y              | written [tokens, out];     | read; its dtype is    | read, in x's dtype
 *                  | default x's dtype          | given                 |
 *   values         | read; default x's dtype    | read; default y's     | written, TS_STORAGE_DENSE; x's
 *                  | or 8 or 4 bits             | dtype or 8 or 4 bits  | dtype, or TS_FLOAT32 for 16 bits
 *   bias           | read or null, y's dtype    | null                  | receives its gradient or null; x's
 *                  |                            |                       | dtype, or TS_FLOAT32 for 16 bits
 *   residual       | read or null, y's dtype    | null                  | null
 *   gate           | read or null, y's dtype    | null                  | null
 *   activation     | any                        | 0                     | 0
 *   accumulate     | 0                          | 0                     | bits
 *   x of 8 bits    | yes; y's dtype is given    | no                    | no
 *
 *   field of an    | x           | y           | values      | bias        | residual, gate
 *   operand        |             |             |             |             |
 *   ---------------+-------------+-------------+-------------+-------------+---------------
 *   ld, layout     | yes         | yes         |             |             | y's layout
 *   dtype          | yes         | yes         | yes         | yes         | yes
 *   storage,       |             |             | yes         |             |
 *   metadata       |             |             |             |             |
 *   scales,        | of 8 bits   |             | of 8 and    |             |
 *   granularity    |             |             | 4 bits      |             |
 *   scales_ld      | per group   |             |             |             |
 *
 * Sums are float32 (float64 for TS_FLOAT64, exact for TS_INT8, where in_features is below 2^17) and rounded
 * once. Operands of one call must not overlap the memory it writes. On TS_CUDA all of them lie on the current
 * device; x, y, values, residual, gate, metadata, scales of x and plan are aligned to 16 bytes, as is every
 * ld in bytes, prepacked values to 256 bytes, bias and scales of values to one element. On TS_CPU the arrays
 * of the pattern that the product reads (by column for TS_DDS_NN, otherwise by row) are checked not to lead
 * out of the operands. Without outputs there is nothing to do; without inputs y is activation(bias) +
 * residual, or bias * activation(gate), and x is 0. */
typedef struct ts_matmul_desc {
    uint32_t struct_size;
    int32_t op;
    int32_t device;
    int32_t activation; /* of the sums; with a gate, of the gate only */
    int32_t precision;  /* for TS_FLOAT32 and TS_FLOAT8_E4M3FN on TS_CUDA only */
    int32_t accumulate; /* TS_ACCUMULATE_VALUES | TS_ACCUMULATE_BIAS */
    int32_t kernel;     /* TS_KERNEL_DEFAULT or the number of a kernel */
    int32_t policy;     /* of ts_matmul_select only */
    int64_t tokens;
    const ts_pattern* pattern;
    ts_operand x;        /* [tokens, in_features]. Of 8 bits: row-major */
    ts_operand y;        /* [tokens, out_features] */
    ts_operand values;   /* of the kept blocks, contiguous, see TS_STORAGE_DENSE */
    ts_operand bias;     /* [out_features]. Its gradient is the sums over tokens of y, in a fixed order; also
                            of block rows without a block, and where nnz or tokens is 0 */
    ts_operand residual; /* like y, with its own ld: added to y */
    ts_operand gate;     /* likewise, in place of a residual: y is multiplied by activation(gate), which is
                            rounded to its dtype before */
    const int32_t* group_offsets; /* [groups + 1], or NULL where the pattern has no groups: a grouped product.
                                     Tokens group_offsets[g] to group_offsets[g + 1] - 1 of x and y, which
                                     are row-major [tokens, features of one weight], meet the weight of group
                                     g alone. Offsets ascend from 0 to tokens and lie where the operands do.
                                     On TS_CUDA the host does not read them, and kernels touch nothing
                                     outside of x and y whatever they are. bias is [out_features]; residual
                                     and gate are like y. Scales of x of 8 bits are TS_SCALES_PER_TOKEN,
                                     prepacked and, for TS_SDD_TN, bias are null (see ts_group_sums), and
                                     dense is never chosen */
    ts_prepared plan; /* made by ts_plan_build or ts_plan_device_build; null where ts_plan_size gives 0 */
    ts_prepared prepacked; /* made by ts_values_prepack of the same values, pattern and kernel, or null */
    char prefer[64];       /* the first characters of the names of kernels that are preferred, ending in a
                              zero; empty: those that TILESPARSE_KERNEL names */
    int32_t skip;          /* TS_SKIP_NOTHING, TS_SKIP_INPUTS or TS_SKIP_OUTPUTS */
    float threshold;       /* with skip, from 0 on: up to which magnitude numbers count as zero */
} ts_matmul_desc;

/* The properties of a device that kernels are chosen by. */
typedef struct ts_device_info {
    uint32_t struct_size;
    int32_t device;             /* TS_CPU or TS_CUDA */
    int32_t compute_capability; /* major * 10 + minor, 10 to 999; 0 on the CPU */
    int32_t multiprocessors;    /* processors (cores) on the CPU; 1 to 65536 */
    int32_t shared_memory;      /* bytes a thread block may use, at most 2^24; 0 on the CPU */
    int32_t max_cluster; /* thread blocks of a cluster for which the device has room, at most 16: kernels of
                            compute capability 9.0 need 2, which some slices of a GPU do not have; 0: not
                            known and taken to suffice, as of devices that are not the current one */
    char name[64];
} ts_device_info;

/* One kernel of the library. */
typedef struct ts_kernel_info {
    uint32_t struct_size;
    int32_t device;
    int32_t min_compute_capability; /* 0 on the CPU */
    uint32_t ops;                   /* bit 1 << op */
    uint32_t dtypes;                /* bit 1 << dtype */
    int32_t precision;              /* on TS_CUDA: of TS_FLOAT32; TS_PRECISION_FAST: fast sums alone */
    int32_t plan;                   /* kernels with equal, nonzero `plan` share plans; 0: needs none */
    int32_t tile_tokens;            /* 0 where the kernel has no fixed tile */
    int32_t tile_features;
    int32_t max_tokens; /* 0: any number */
    char name[64];
    uint32_t storages;      /* bit 1 << storage */
    uint32_t values_dtypes; /* bit 1 << dtype; 0: that of the activations */
    uint32_t result_dtypes; /* likewise */
} ts_kernel_info;

/* TS_VERSION and TS_ABI_VERSION of the library that is loaded. */
TS_API const char* ts_version(void);
TS_API int32_t ts_abi_version(void);

/* A short constant text for a status; the sentence of this thread's last error. */
TS_API const char* ts_status_string(ts_status_t status);
TS_API const char* ts_last_error(void);

/* Comma-separated architectures the library holds code for, for example "cpu,sm_80". */
TS_API const char* ts_architectures(void);

/* Kernels by their numbers, 1 to ts_kernel_count(). */
TS_API int32_t ts_kernel_count(void);
TS_API ts_status_t ts_kernel_get(int32_t kernel, ts_kernel_info* info);

/* Properties of the CPU, or of a CUDA device by its ordinal (-1: the current one). */
TS_API ts_status_t ts_device_get(int32_t device, int32_t ordinal, ts_device_info* info);

/* Checks every invariant of the row arrays of a host pattern. The column arrays, where not NULL,
 * must be their transpose. */
TS_API ts_status_t ts_pattern_validate(const ts_pattern* pattern);

/* Writes the transpose of a valid host pattern: col_ptr [in_features / block_cols + 1],
 * row_idx [nnz] and col_slot [nnz], none of which may overlap another or the row arrays. The pattern's own
 * column arrays are ignored. */
TS_API ts_status_t ts_pattern_transpose(const ts_pattern* pattern, int32_t* col_ptr, int32_t* row_idx,
                                        int32_t* col_slot);

/* Chooses the kernel that would compute the product on that device, or TS_RUN_DENSE, and says why, as text
 * of at most reason_bytes bytes with the ending zero. Reads shapes, layouts, flags, the sizes of the
 * pattern and whether there is a bias, residual or gate; no pointer is followed but the pattern's.
 * desc->kernel, where it is set, comes first; then TS_POLICY_DENSE; then the kernels whose names begin with
 * desc->prefer, or where that is empty with TILESPARSE_KERNEL, which is read once, if one of them computes
 * the product; then what ts_measurement_add was told; then estimates. TS_POLICY_AUTO compares with dense in
 * the last two. */
TS_API ts_status_t ts_matmul_select(const ts_matmul_desc* desc, const ts_device_info* device, int32_t* kernel,
                                    char* reason, size_t reason_bytes);

/* The plan a kernel walks for one pattern: what to load and multiply, in which order. It depends on
 * the kernel's `plan` and op and on the pattern alone. Built in host memory from host arrays (both
 * directions); for TS_CUDA the caller copies it to the device, aligned to 16 bytes. TS_UNSUPPORTED: the
 * weight has so many blocks, kept or not, that the builder would need more than 8 GiB. */
TS_API ts_status_t ts_plan_size(const ts_pattern* pattern, int32_t kernel, int32_t op, size_t* bytes);
TS_API ts_status_t ts_plan_build(const ts_pattern* pattern, int32_t kernel, int32_t op, void* plan,
                                 size_t bytes);

/* Scratch memory a product needs, on its device, aligned to 256 bytes (64 on the CPU); any content. */
TS_API ts_status_t ts_matmul_workspace_size(const ts_matmul_desc* desc, size_t* bytes);

/* A number, never 0, that two plans have in common only if kernels can walk either of them: it follows from
 * the kernel's `plan`, op, and the sizes of the pattern, whose arrays are not read. 0 for a kernel without a
 * plan. ts_prepared.key is for it, and the plan holds it, too. */
TS_API ts_status_t ts_plan_key(const ts_pattern* pattern, int32_t kernel, int32_t op, int64_t* key);

/* A kernel of TS_CUDA that finds another key in its plan than that of its product writes no results and says
 * so. The next ts_matmul or ts_values_prepack on a GPU then does nothing and returns TS_STALE_PLAN, once; the
 * sentence names the kernel. Neither waits for kernels that still run: after the last product synchronize the
 * stream and call ts_plan_check, which returns the same. */
TS_API ts_status_t ts_plan_check(void);

/* Some kernels prepack the values before every product: they copy them into the order in which they multiply
 * them. The caller may keep that copy instead, while values and plan stay as they are: `prepacked` of the
 * descriptor, in device memory aligned to 256 bytes. ts_values_prepacked_size gives 0 for kernels that have
 * no use for it; with `prepacked` set (its address is not followed), ts_matmul_workspace_size counts no room
 * for the copy. ts_values_prepack reads values, pattern, plan and kernel of the descriptor, no activations,
 * and does nothing where the size is 0. A copy serves kernels with the ts_plan_key of the one it was made
 * for: set desc.kernel for all of these calls. With prepacked.key set ts_matmul refuses a copy for others. */
TS_API ts_status_t ts_values_prepacked_size(const ts_matmul_desc* desc, size_t* bytes);
TS_API ts_status_t ts_values_prepack(const ts_matmul_desc* desc, void* prepacked, size_t prepacked_bytes,
                                     ts_stream_t stream);

/* Kernels read the storages and dtypes of values that ts_kernel_info names. For other values ts_matmul first
 * dequantizes (or decompresses) them to dense blocks in its workspace, in every product. The reason that
 * ts_matmul_select gives says so. Such kernels prepack nothing.
 *
 * ts_values_dequantize only dequantizes: it writes dense blocks [nnz, bn, bk] of the dtype of x (y for
 * TS_DDS_NN), from values of the descriptor. No activations are read. */
TS_API ts_status_t ts_values_dequantize(const ts_matmul_desc* desc, void* dense, size_t dense_bytes,
                                        ts_stream_t stream);

/* Compresses dense blocks of any dtype to TS_STORAGE_2_4: of each 4 neighbours in a row of a block, those
 * whose byte in `mask` [nnz, bn, bk] is not 0, the first two if there are more. With `transposed` of each 4
 * in a column: the results are the values of the transposed weight, [nnz, bk, bn / 2] with metadata for
 * blocks of bk x bn. Of the pattern only sizes are read. On TS_CUDA all memory lies on the current device,
 * aligned to 16 bytes. */
TS_API ts_status_t ts_values_compress(const ts_pattern* pattern, int32_t device, int32_t dtype,
                                      const void* values, const uint8_t* mask, int32_t transposed,
                                      void* compressed, uint32_t* metadata, ts_stream_t stream);

/* Computes one product on the given stream of the current device. */
TS_API ts_status_t ts_matmul(const ts_matmul_desc* desc, void* workspace, size_t workspace_bytes,
                             ts_stream_t stream);

/* The gradient of z, where y = activation(z) and y has the given gradient, and the sums over tokens of it, in
 * one pass: of the bias that was added to become z. On TS_CUDA alone. z, gradient and result are row-major
 * [tokens, features] without gaps, of TS_FLOAT32, TS_FLOAT16 or TS_BFLOAT16, aligned to 16 bytes; features is
 * a multiple of 16. bias_gradient is [features], of that dtype: sums of float32 before the gradient of z is
 * rounded, in a fixed order. result may be gradient; nothing else may overlap what is written or the
 * workspace, which is aligned to 256 bytes. The derivative of TS_RELU is 0 at 0. */
TS_API ts_status_t ts_activation_gradient_workspace_size(int32_t dtype, int64_t tokens, int64_t features,
                                                         size_t* bytes);
TS_API ts_status_t ts_activation_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                                          const void* z, const void* gradient, void* result,
                                          void* bias_gradient, void* workspace, size_t workspace_bytes,
                                          ts_stream_t stream);

/* result = factor * activation(gate), where activation(gate) is rounded to the dtype before; and from the
 * gradient of result those of gate and factor, in one pass. On TS_CUDA alone. Matrices are TS_ROW_MAJOR
 * [tokens, features] of TS_FLOAT32, TS_FLOAT16 or TS_BFLOAT16, each with its own ld: gate and factor, or
 * their gradients, may be halves of one. They and every ld in bytes are aligned to 16 bytes; features is a
 * multiple of 16. What is written overlaps nothing else. The derivative of TS_RELU is 0 at 0. */
TS_API ts_status_t ts_gate(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                           const ts_matrix* gate, const ts_matrix* factor, const ts_matrix* result,
                           ts_stream_t stream);
TS_API ts_status_t ts_gate_gradient(int32_t dtype, int32_t activation, int64_t tokens, int64_t features,
                                    const ts_matrix* gate, const ts_matrix* factor, const ts_matrix* gradient,
                                    const ts_matrix* gate_gradient, const ts_matrix* factor_gradient,
                                    ts_stream_t stream);

/* Quantizes activations to 8 bits, token by token:
 *   scales[t] = max(the largest |x[t, f]| / m, 2^-116)   with m = 127 for TS_INT8, 448 for TS_FLOAT8_E4M3FN
 *   quantized[t, f] = x[t, f] * (1 / scales[t]), rounded to the nearest, ties to even
 * in float32, so that every device gives the same bits. A token of zeros has zeros; one with an infinity or a
 * NaN has zeros and NaN as its scale, so that its products are NaN. x and quantized are TS_ROW_MAJOR [tokens,
 * features], each with its own ld; x has TS_FLOAT32, TS_FLOAT16 or TS_BFLOAT16; features is a multiple of 16.
 * scales is [tokens], aligned to one element. On TS_CUDA x, quantized and their ld in bytes are aligned to 16
 * bytes. What is written overlaps nothing else. */
TS_API ts_status_t ts_quantize(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens,
                               int64_t features, const ts_matrix* x, const ts_matrix* quantized,
                               float* scales, ts_stream_t stream);

/* The same with a scale for each 128 features of a token, for products with scales inside of the sums:
 *   scales[g * scales_ld + t] = max(the largest |x[t, f]| / 448, 2^-116), f from 128 g to 128 g + 127
 * Where these 128 have an infinity or a NaN, they become zeros, and NaN is their scale. quantized_dtype is
 * TS_FLOAT8_E4M3FN, features a multiple of 128, and scales_ld at least tokens. */
TS_API ts_status_t ts_quantize_groups(int32_t device, int32_t dtype, int32_t quantized_dtype, int64_t tokens,
                                      int64_t features, const ts_matrix* x, const ts_matrix* quantized,
                                      float* scales, int64_t scales_ld, ts_stream_t stream);

/* The sums over tokens of each group of y, TS_ROW_MAJOR [tokens, features]: the gradient of the biases of a
 * grouped product. sums is [groups, features] of result_dtype: that of y, or TS_FLOAT32 for 16 bits. They are
 * added in float32 (float64) and in a fixed order and rounded once; those of a group without tokens are 0.
 * features is a multiple of 16, groups 1 to 1024, group_offsets as in ts_matmul_desc. On TS_CUDA y and its ld
 * in bytes are aligned to 16 bytes. What is written overlaps nothing else. */
TS_API ts_status_t ts_group_sums(int32_t device, int32_t dtype, int32_t result_dtype, int64_t tokens,
                                 int64_t features, int64_t groups, const ts_matrix* y,
                                 const int32_t* group_offsets, void* sums, ts_stream_t stream);

/* Adds up the rows of y that belong to a token, such as the results of its experts, times weights:
 *   result[t] = sum over c of weights[t, c] * y[rows[t, c]]
 * and from the gradient of result those of both, in one pass over y:
 *   y_gradient[rows[t, c]] = weights[t, c] * gradient[t]
 *   weights_gradient[t, c] = the sum over features of gradient[t] * y[rows[t, c]]
 * y and y_gradient are TS_ROW_MAJOR [tokens * choices, features], result and gradient [tokens, features], of
 * one dtype, TS_FLOAT64 to TS_BFLOAT16; features is a multiple of 16. rows and the weights are [tokens,
 * choices], aligned to one element. rows has each row of y once. weights may be null for ones: the gradient
 * of y then copies each token to its rows. Either gradient may be null; without that of the weights y is not
 * read, and may be null. Sums are taken in float32 (float64), in a fixed order, and rounded once. On the CPU
 * rows are checked to be rows of y; on TS_CUDA others count as zeros. On TS_CUDA matrices and their ld in
 * bytes are aligned to 16 bytes. What is written overlaps nothing else. */
TS_API ts_status_t ts_combine(int32_t device, int32_t dtype, int64_t tokens, int64_t choices,
                              int64_t features, const ts_matrix* y, const int64_t* rows, const void* weights,
                              const ts_matrix* result, ts_stream_t stream);
TS_API ts_status_t ts_combine_gradient(int32_t device, int32_t dtype, int64_t tokens, int64_t choices,
                                       int64_t features, const ts_matrix* y, const int64_t* rows,
                                       const void* weights, const ts_matrix* gradient,
                                       const ts_matrix* y_gradient, void* weights_gradient,
                                       ts_stream_t stream);

/* A weight of a layer of an encoder: values of TS_INT8 in TS_STORAGE_DENSE with TS_SCALES_PER_FEATURE, and
 * a bias in float32 [out_features], or NULL. `prepacked` is made by ts_values_prepack with kernel, pattern
 * and values of a product of x of TS_INT8, or is null; AMX is fastest where all weights of all layers have
 * it. It never grows, as ts_encoder_norm. */
typedef struct ts_encoder_weight {
    const ts_pattern* pattern;
    ts_operand values;
    const float* bias;
    ts_prepared prepacked;
} ts_encoder_weight;

/* A LayerNorm over the features of a token; where weight is NULL there is none. */
typedef struct ts_encoder_norm {
    const float* weight; /* [hidden] */
    const float* bias;   /* [hidden] or NULL */
    float epsilon;       /* added to the variance: above 0 */
    int32_t reserved;    /* zero */
} ts_encoder_norm;

/* One layer of an encoder of texts or images, of the BERT kind, or with norm_first of the kind of ModernBERT
 * and ViT:
 *
 *   h = attention_norm(x + output(attention(qkv(x))))       h = x + output(attention(qkv(attention_norm(x))))
 *   y = mlp_norm(h + down(activation(up(h))))               y = h + down(activation(up(mlp_norm(h))))
 *
 * With `gated` up has two halves, and down gets activation(first) * second. Each token attends to those of
 * its own sentence:
 *
 *   attention(i) = sum over j of softmax over j of (scale * q(i) k(j) + position_bias[head][j - i]) v(j)
 *
 * The features of qkv are those of q, k and v, each [heads, head_features]. What is multiplied is quantized
 * to 8 bits before: rows of a token as by ts_quantize; q, k and v with a scale for each token and head.
 * Probabilities have 14 bits. Sums are exact, and the rest is computed in float32. */
typedef struct ts_encoder_layer {
    uint32_t struct_size;
    int32_t norm_first; /* 0 or 1 */
    int32_t heads;
    int32_t head_features; /* a multiple of 16, or with rotary of 32; at most 256 */
    int32_t activation;    /* TS_NO_ACTIVATION to TS_SILU */
    int32_t gated;         /* 0 or 1 */
    int32_t window;        /* 0: all tokens of a sentence; w: those at most w places away */
    int32_t positions; /* that rotary and position_bias have: at least the tokens of the longest sentence */
    float scale;       /* of the products of q and k, often 1 / sqrt(head_features) */
    int32_t reserved;  /* zero */
    ts_encoder_weight qkv;          /* [3 * heads * head_features, hidden] */
    ts_encoder_weight output;       /* [hidden, heads * head_features] */
    ts_encoder_weight up;           /* [inner, hidden], or with `gated` [2 * inner, hidden] */
    ts_encoder_weight down;         /* [hidden, inner] */
    ts_encoder_norm attention_norm; /* its weight may be NULL with norm_first alone */
    ts_encoder_norm mlp_norm;
    const float* rotary; /* NULL, or [positions, head_features]: of half as many angles the cosines, then
                            the sines; feature f of a half of q or k is turned with f of the other half */
    const float* position_bias; /* NULL, or [heads, 2 * positions - 1]: of j - i = 1 - positions and on */
} ts_encoder_layer;

/* Layers that run one after another, on sentences whose tokens follow each other without padding. On TS_CPU
 * alone. x and y are TS_ROW_MAJOR [tokens, hidden] of `dtype`; y may be x. Between layers activations are
 * float32. A sentence without tokens has no results, and a NaN or an infinity spoils the results of its
 * sentence alone. Results do not depend on the number of threads, nor on the other sentences. */
typedef struct ts_encoder_desc {
    uint32_t struct_size;
    int32_t device;
    int32_t dtype; /* TS_FLOAT32 or TS_BFLOAT16 */
    int32_t
        kernel; /* TS_KERNEL_DEFAULT or the number of a kernel for x of TS_INT8: its instructions are used */
    int64_t tokens;
    int64_t sentences;
    const int32_t* offsets; /* [sentences + 1]: where they begin, ascending from 0 to tokens */
    int64_t layer_count;    /* 1 to 1024 */
    const ts_encoder_layer* const* layers;
    ts_matrix x;
    ts_matrix y;
    char prefer[64]; /* as in ts_matmul_desc */
} ts_encoder_desc;

TS_API ts_status_t ts_encoder_workspace_size(const ts_encoder_desc* desc, size_t* bytes);
TS_API ts_status_t ts_encoder(const ts_encoder_desc* desc, void* workspace, size_t workspace_bytes,
                              ts_stream_t stream);

/* Makes the same plans on the GPU, from a pattern whose arrays lie in memory of the current device, for
 * patterns that change there: nothing waits for the GPU, and the call can be captured in a graph, whose
 * replays then follow what the arrays hold. Equal patterns give equal plans, bit by bit. TS_DDS_NN reads
 * the arrays by column and the other products those by row; the caller answers for what is in them.
 * ts_plan_device_size reads shapes and nnz alone: a plan takes at most `plan_bytes`, and building it
 * `workspace_bytes` of any content. In device memory, aligned to 16 and 256 bytes. Both are 0 for a
 * kernel without a plan. Only how block rows are grouped may differ from ts_plan_build.
 * TS_UNSUPPORTED: the library was built without CUDA, or the weight has 2^31 blocks or more, kept or not. */
TS_API ts_status_t ts_plan_device_size(const ts_pattern* pattern, int32_t kernel, int32_t op,
                                       size_t* plan_bytes, size_t* workspace_bytes);
TS_API ts_status_t ts_plan_device_build(const ts_pattern* pattern, int32_t kernel, int32_t op, void* plan,
                                        size_t plan_bytes, void* workspace, size_t workspace_bytes,
                                        ts_stream_t stream);

/* ts_pattern_transpose of a pattern in device memory, into device memory, under the same rules. */
TS_API ts_status_t ts_pattern_device_transpose_size(const ts_pattern* pattern, size_t* workspace_bytes);
TS_API ts_status_t ts_pattern_device_transpose(const ts_pattern* pattern, int32_t* col_ptr, int32_t* row_idx,
                                               int32_t* col_slot, void* workspace, size_t workspace_bytes,
                                               ts_stream_t stream);

/* Two arrays in memory of a CUDA device, and whether they were found to differ. */
typedef struct ts_array_pair {
    const int32_t* first;
    const int32_t* second;
    int64_t count;   /* of elements; of 0 the arrays are not read */
    int64_t differs; /* 0, or what ts_arrays_compare wrote */
} ts_array_pair;

/* Has the current device compare pairs of arrays, such as those of a pattern with copies of them, and write
 * `mark`, which is not 0, to `differs` of the pairs that differ, unless there is another mark. Nothing waits
 * for the GPU. The pairs lie in pinned memory of the host, where they can be read and changed at any time.
 * TS_UNSUPPORTED: the library was built without CUDA. */
TS_API ts_status_t ts_arrays_compare(ts_array_pair* pairs, int32_t count, int64_t mark, ts_stream_t stream);

/* Microseconds that a kernel, or TS_RUN_DENSE, is estimated to take for
 * a product on that device; 0 where there is no estimate. Estimates of GPUs that were not measured are scaled
 * by what these can do. They read what ts_matmul_select reads, and neither desc->kernel, prefer and policy
 * nor measurements. TS_UNSUPPORTED: the kernel does not compute the product on that device, and why. */
TS_API ts_status_t ts_matmul_estimate(const ts_matmul_desc* desc, const ts_device_info* device,
                                      int32_t kernel, double* microseconds);

/* The features of an estimate, for programs that fit estimates to measurements: those of a product, a
 * kernel or TS_RUN_DENSE and a device, and the name of the coefficients that they are multiplied by
 * (docs/developers/plans.md). Where values are dequantized first, the features of that follow, and the
 * name of their coefficients after a "+". `count` is the room in `features` and becomes their number, which
 * may differ between versions of the library; 64 suffice. `family` may be NULL. */
TS_API ts_status_t ts_matmul_features(const ts_matmul_desc* desc, const ts_device_info* device,
                                      int32_t kernel, double* features, int32_t* count, char* family,
                                      size_t family_bytes);

/* Adds a measurement of a product on that device: its fastest kernel, its time in microseconds, and that of
 * TS_RUN_DENSE, 0 where it was not measured. From then on this process chooses so for
 * products that have the same op, dtypes, storage, precision, layouts, features and block shape, tokens that
 * round up to the same power of two, and a number of blocks that differs by at most an eighth (of several
 * measurements the nearest counts), on devices with the same name, compute capability and number of
 * multiprocessors; unless the kernel does not compute the product. A second measurement of the same product
 * replaces the first. ts_measurements_clear forgets all. As both change what is chosen, set desc->kernel of
 * products whose plans, workspaces or prepacked values are there already. */
TS_API ts_status_t ts_measurement_add(const ts_matmul_desc* desc, const ts_device_info* device,
                                      int32_t kernel, double microseconds, double dense_microseconds);
TS_API ts_status_t ts_measurements_clear(void);

#ifdef __cplusplus
}
#endif

#endif /* TILESPARSE_TILESPARSE_H_ */
