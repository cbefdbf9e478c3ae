// The agreement of the host layers and every kernel family: a checked product and the table of kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace ts {

enum class Op : int32_t { dds_nt = 0, dds_nn = 1, sdd_tn = 2 };
// int8 and float8_e4m3fn are dtypes of values and of what is multiplied by them, int4 of values alone, int32
// is one of sums: the ABI has no number for it.
enum class DType : int32_t {
    float64 = 0,
    float32 = 1,
    float16 = 2,
    bfloat16 = 3,
    int8 = 4,
    float8_e4m3fn = 5,
    int4 = 6,
    int32 = 7
};
enum class DeviceType : int32_t { cpu = 0, cuda = 1 };
enum class Layout : int32_t { row_major = 0, column_major = 1 };
enum class Activation : int32_t { none = 0, relu = 1, gelu = 2, silu = 3 };
enum class Precision : int32_t { highest = 0, tf32 = 1, fast = tf32 };
// The granularity of scales of values of 8 and 4 bits.
enum class ScalesPer : int32_t { block = 0, row = 1, feature = 2 };
// How the weights of the kept blocks lie in memory.
enum class Storage : int32_t { dense = 0, two_of_four = 1 };
// Weights that a small batch skips: those that meet zeros of x, or give features whose gate is zero.
enum class Skip : int32_t { nothing = 0, inputs = 1, outputs = 2 };
// How the products of a tile are summed over k: in the same registers throughout (kept), or each step apart
// and then added to other registers (promoted), which rounds where tensor cores cut off; or added times the
// scales of the step (scaled); or most of a sum is moved elsewhere now and then (carried), unless precision
// is fast.
enum class Accumulation : int32_t { kept = 0, promoted = 1, scaled = 2, carried = 3 };

// True if values of it have scales.
constexpr bool is_quantized(DType dtype) {
    return dtype == DType::int8 || dtype == DType::float8_e4m3fn || dtype == DType::int4;
}

// Scales inside of the sums: this many k of a token share one of x, and blocks, which have as many features
// and k, one of W.
constexpr int kScaleGroup = 128;

// How many values a stored element holds.
constexpr int values_of_element(DType dtype) { return dtype == DType::int4 ? 2 : 1; }

// Bytes of a stored element.
constexpr int element_size(DType dtype) {
    if (is_quantized(dtype)) return 1;
    if (dtype == DType::float64) return 8;
    return dtype == DType::float32 || dtype == DType::int32 ? 4 : 2;
}

// The dtype of sums of products of an input: exact for int8.
constexpr DType accumulator_of(DType input) {
    if (input == DType::int8) return DType::int32;
    return input == DType::float64 ? DType::float64 : DType::float32;
}

// A set of operations, dtypes or storages as the registry has it.
template <class... Values>
constexpr uint32_t bits_of(Values... values) {
    return (... | (1u << static_cast<int>(values)));
}

// One direction of a pattern: the kept blocks of each row (or column), in order.
struct Adjacency {
    const int32_t* ptr;   // [rows + 1]
    const int32_t* idx;   // [nnz] columns, ascending in each row
    const int32_t* slot;  // [nnz] position of the block in values
};

struct Pattern {
    int32_t block_rows;  // bn
    int32_t block_cols;  // bk
    int64_t out_features;
    int64_t in_features;
    int64_t nnz;
    Adjacency rows;      // of each block row (out)
    Adjacency cols;      // of each block column (in); of groups one after another, idx within the group
    int32_t groups = 1;  // weights of equal shape below each other, see ts_pattern

    int64_t group_out_features() const { return out_features / groups; }

    // Blocks along each dimension, of which the last one may reach out of the matrix.
    int64_t row_count() const { return (out_features + block_rows - 1) / block_rows; }
    int64_t col_count() const { return (in_features + block_cols - 1) / block_cols; }

    // True if blocks have sides of 16, 32, 64 or 128 that divide the matrix, as tiles of most kernels need
    // it.
    bool is_regular() const {
        const auto is_tile = [](int32_t side) {
            return side == 16 || side == 32 || side == 64 || side == 128;
        };
        return is_tile(block_rows) && is_tile(block_cols) && out_features % block_rows == 0 &&
               in_features % block_cols == 0;
    }

    // Elements of the weight that the kept blocks cover, whatever their storage keeps of them.
    int64_t value_count() const { return nnz * block_rows * block_cols; }
    double density() const {
        const double size = static_cast<double>(out_features) * static_cast<double>(in_features);
        return size > 0 ? static_cast<double>(value_count()) / size : 0;
    }
    // The share of all groups of so many places for blocks in which a random pattern has a block.
    double present(double places) const { return 1 - std::pow(1 - density(), std::max(1.0, places)); }
};

// Element (t, f) of a tokens x features matrix is at t * ld + f (row-major) or f * ld + t.
struct Matrix {
    void* data;
    int64_t ld;
    Layout layout;
};

// The weights of the kept blocks; see the storages in tilesparse.h.
struct Values {
    void* data;
    const uint32_t* metadata;  // of 2:4
    const float* scales;       // of values of 8 and 4 bits
    ScalesPer scales_per;
    DType dtype;
    Storage storage;

    bool is_compressed() const { return storage == Storage::two_of_four; }
    // Bytes of the blocks of a pattern in `data`, metadata and scales.
    int64_t bytes(const Pattern& pattern) const {
        return pattern.value_count() / (is_compressed() ? 2 : 1) / values_of_element(dtype) *
               element_size(dtype);
    }
    int64_t metadata_bytes(const Pattern& pattern) const {
        return is_compressed() ? pattern.value_count() / 8 : 0;
    }
    int64_t scale_bytes(const Pattern& pattern) const {
        if (!is_quantized(dtype)) return 0;
        const int64_t count = scales_per == ScalesPer::feature ? pattern.out_features
                              : scales_per == ScalesPer::row   ? pattern.nnz * pattern.block_rows
                                                               : pattern.nnz;
        return count * int64_t{sizeof(float)};
    }
};

// Receives the gradient of a bias, the sums over tokens of y: [out_features]. data is null for none.
struct BiasGradient {
    void* data;
    DType dtype;
    bool accumulate;
};

// A kernel that finds another plan than its own writes its number there: a word of the host's memory.
struct PlanReport {
    int32_t* at;
    int32_t kernel;
};

// A product whose descriptor has been checked; see ts_matmul_desc for the meaning of every field.
struct Problem {
    Op op;
    DType input_dtype;   // of the activations that are read
    DType result_dtype;  // of what is written; of dds also of bias, residual and gate
    DeviceType device;
    Activation activation;
    Precision precision;
    bool accumulate;
    int64_t tokens;
    Pattern pattern;
    Matrix x;
    Matrix y;
    Values values;
    const float* x_scales;   // where x has 8 bits: of each token, or of each kScaleGroup of k of a token
    int64_t x_scales_ld;     // of the latter, [k / kScaleGroup][x_scales_ld]; 0: of each token
    const int32_t* offsets;  // [groups + 1] where the tokens of each group begin; null: one weight for all
    const void* bias;
    const void* plan;
    PlanReport plan_report;  // for kernels with a plan
    const void* prepacked;   // values as Kernel::prepack left them, or null
    // Added to the results, or if `gated` multiplied by them after activation and rounding: then they have no
    // activation of their own. data is null for neither; otherwise its layout is that of y.
    Matrix residual;
    bool gated;
    Activation gate_activation;
    BiasGradient bias_gradient;  // of sdd
    Skip skip;                   // with it no kernel of the registry, but elementwise/skip.h
    float threshold;             // up to which numbers count as zero then

    // Operands of dds in either direction.
    bool forward() const { return op == Op::dds_nt; }
    const Matrix& input() const { return forward() ? x : y; }
    const Matrix& output() const { return forward() ? y : x; }
    // Results and what is summed over, of each group.
    int64_t features() const { return forward() ? pattern.group_out_features() : pattern.in_features; }
    int64_t k_size() const { return forward() ? pattern.in_features : pattern.group_out_features(); }
    bool grouped() const { return offsets != nullptr; }
    int32_t row_block() const { return forward() ? pattern.block_rows : pattern.block_cols; }  // features
    int32_t k_block() const { return forward() ? pattern.block_cols : pattern.block_rows; }
    const Adjacency& block_rows() const { return forward() ? pattern.rows : pattern.cols; }  // of results

    // True if scales are inside of the sums.
    bool scales_inside() const { return x_scales_ld > 0; }

    DType x_dtype() const { return op == Op::dds_nn ? result_dtype : input_dtype; }
    DType y_dtype() const { return op == Op::dds_nt ? result_dtype : input_dtype; }
    DType accumulator_dtype() const { return accumulator_of(input_dtype); }

    // Bytes of the values as dense blocks of the input's dtype.
    int64_t dense_bytes() const { return pattern.value_count() * element_size(input_dtype); }
};

struct Device {
    DeviceType type;
    int32_t compute_capability;  // major * 10 + minor
    int32_t multiprocessors;     // cores on the CPU
    int32_t shared_memory;       // bytes a thread block may use
    int32_t max_cluster = 0;     // see ts_device_info
    int32_t gpu = 0;             // in kGpus, the one whose limits it has
};

constexpr int kMaxDevices = 64;  // CUDA devices of a process

enum class PlanKind : int32_t { tiles = 0, aligned = 1, strips = 2, lists = 3 };

// The geometry a plan is built for. Kernels of one shape share plans.
// dds: macro-tiles of `tile` output features, walked in steps of `step` elements of k; `ranks` of them
// are walked together. Steps are gathered from columns anywhere; or `aligned`, whole ones of k or halves of
// them, where `tile` counts the features of all ranks.
// sdd: macro-tiles of `tile` features of y by `step` features of x; by strips that is half a tile, and
// `ranks` counts the halves. By lists `tile` is a unit's features, and `step` those of all units of a tile.
struct PlanShape {
    int32_t tile;  // 0: the kernel needs no plan
    int32_t step;
    int32_t ranks = 1;
    PlanKind kind = PlanKind::tiles;
};

// The instructions that a kernel multiplies with, whose rates differ (common/machine.h).
enum class Instructions : int32_t { mma_sync = 0, wgmma = 1 };

// Decisions for one product beside the kernel, which the workspace and the launch follow.
struct Decision {
    int64_t parts = 1;          // at most, into which the sums of a tile over k are cut (split-K)
    bool reads_blocks = false;  // from where they lie in values, one by one, instead of packing them first
    bool sums_y = false;        // for the gradient of the bias, which ts_matmul otherwise sums on its own
};

// One row of the registry.
struct Kernel {
    const char* name;
    DeviceType device;
    int32_t min_compute_capability;
    uint32_t ops;           // see bits_of()
    uint32_t input_dtypes;  // likewise
    Precision precision;
    PlanShape plan;
    int32_t tile_tokens;
    int32_t tile_features;
    int32_t max_tokens;  // 0: any number
    // nullptr if the kernel computes the problem on the device, otherwise why not.
    const char* (*refuses)(const Problem&, const Device&);
    size_t (*workspace_size)(const Problem&, const Device&, const Decision&);
    // 0, or the CUDA error of the launch.
    int32_t (*launch)(const Problem&, const Device&, const Decision&, void* workspace, void* stream);
    bool splits = false;     // the sums of few tiles into parts, see part_count
    bool any_block = false;  // multiplies blocks with sides of any length, which need not divide the matrix
    uint32_t grouped = bits_of(0);        // bit 0: products with one weight, bit 1: grouped ones
    uint32_t scales_inside = bits_of(0);  // bit 0: scales of x outside of the sums or none, bit 1: inside
    // Storages and dtypes of values and results it computes with; dtypes are bits, 0 for the input's.
    uint32_t storages = bits_of(Storage::dense);
    uint32_t values_dtypes = 0;
    uint32_t result_dtypes = 0;
    // nullptr where there is nothing to decide.
    Decision (*decide)(const Kernel&, const Problem&, const Device&) = nullptr;
    // Properties that estimates of its time are made of (common/estimate.h). The family is that of kernels
    // that share coefficients, but for product, number format and tile; nullptr where there is no estimate:
    // then kernels go by their place in the registry.
    const char* family = nullptr;
    const char* variant = "";  // of the family's kernels of a tile, which are told apart by it
    Instructions instructions = Instructions::mma_sync;
    Accumulation accumulation = Accumulation::kept;
    int32_t cluster = 1;          // dds: multiprocessors that compute a tile together
    int32_t united_features = 0;  // whose block rows are united, in steps of dds or rows of tiles of sdd
    int32_t tile_values = 0;      // sdd: values of a tile
    int32_t step_time = 0;        // of sdd kernels that may split tiles over the tokens, see SddShares
    // A copy of the values as the kernel multiplies them, which serves until values or plan change: its
    // bytes, and how it is made. nullptr where the kernel reads values as they are.
    size_t (*prepacked_size)(const Problem&) = nullptr;
    int32_t (*prepack)(const Problem&, void* prepacked, void* stream) = nullptr;
    // How many of its clusters of two thread blocks the current device holds at a time, or the CUDA error of
    // asking. nullptr for kernels that need none, and for those that others of their architecture speak for.
    int32_t (*clusters)(int32_t& count) = nullptr;

    bool estimated() const { return family != nullptr; }
    bool covers(Op op) const { return ops >> static_cast<int>(op) & 1; }
    bool covers(DType input) const { return input_dtypes >> static_cast<int>(input) & 1; }
    bool covers(Storage storage) const { return storages >> static_cast<int>(storage) & 1; }
    // True if it multiplies such values as they are.
    bool covers(const Values& values, DType input) const {
        return is_among(values_dtypes, values.dtype, input) && covers(values.storage);
    }
    // Why it is for products of another form, or nullptr: grouped ones, or scales of x elsewhere.
    const char* refuses_form(const Problem& problem) const {
        if (!(grouped >> problem.grouped() & 1))
            return problem.grouped() ? "it computes no grouped products" : "it computes grouped products";
        if (!(scales_inside >> problem.scales_inside() & 1))
            return problem.scales_inside() ? "its scales are outside of the sums"
                                           : "its scales are inside of the sums";
        return nullptr;
    }
    bool writes(DType result, DType input) const { return is_among(result_dtypes, result, input); }

  private:
    static bool is_among(uint32_t dtypes, DType dtype, DType input) {
        return dtypes == 0 ? dtype == input : (dtypes >> static_cast<int>(dtype) & 1) != 0;
    }
};

}  // namespace ts
