// The arguments of the decode kernel, how lines lie in its shared memory, and its weight formats (see
// common/weight.h).
#pragma once

#include "common/problem.h"
#include "common/weight.h"
#include "sm80/async.cuh"
#include "sm80/math.cuh"

namespace ts::sm80 {

struct DecodeArguments {
    const void* input;
    int64_t input_ld;  // in bytes
    void* output;
    int64_t output_ld;
    const void* values;
    const void* bias;
    const void* residual;  // in the output's layout
    int64_t residual_ld;
    Adjacency rows;  // of results
    Layout output_layout;
    Activation activation;
    int tokens;
    int row_shift;  // log2 of the rows of a block
    int k_shift;    // log2 of the k of a block
};

constexpr int kDecodeSlice = 64;  // elements of k

// Lines of so many chunks of 16 bytes, copied by so many threads at a time. Chunks are permuted among the 128
// bytes around them, so that ldmatrix finds the same chunk of 8 lines in different banks.
template <int kChunks, int kThreads>
struct DecodeLines {
    static constexpr int kBytes = 16 * kChunks;
    static constexpr int kCopyLines = kThreads / kChunks;  // that are copied at a time
    static constexpr int kCopyBytes = kThreads * 16;

    __device__ static uint32_t offset(int line, int chunk) {
        return (line * kChunks + (chunk ^ (line * kChunks / 8 & (kChunks - 1)))) * 16;
    }
    // What is to be added by exclusive or to the offset of a line of the i-th copy after the first.
    __device__ static constexpr uint32_t swap(int i) { return i * (kCopyBytes / 128) % kChunks * 16; }
};

template <bool kTransposed>
__device__ inline Fragment<4> load_matrices(uint32_t address) {
    Fragment<4> to;
    if constexpr (kTransposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to.value[0]), "=r"(to.value[1]), "=r"(to.value[2]), "=r"(to.value[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to.value[0]), "=r"(to.value[1]), "=r"(to.value[2]), "=r"(to.value[3])
                     : "r"(address)
                     : "memory");
    return to;
}

// A slice has its blocks one after another: dds_nt [kRows][kBlockChunks * 8 of k], dds_nn [k of a block in
// the slice][kRows], in DecodeLines, as they are stored. `kBlockChunks`: of 16 bytes, of a block's k in a
// slice.
template <class Math, bool kTransposed_, int kRows_, int kBlockChunks_>
struct PlainDecodeWeight : PlainStorage {
    using Element = typename Math::Element;  // of values
    static constexpr bool kTransposed = kTransposed_;
    static constexpr int kRows = kRows_;
    static constexpr int kBlockChunks = kBlockChunks_;
    static constexpr int kElement = sizeof(Element);
    static constexpr int kBytes = kRows * kDecodeSlice * kElement;  // of a slice
    static constexpr int kChunks = kTransposed ? kRows / 8 : kBlockChunks;
    static constexpr int kLines = kTransposed ? 8 * kBlockChunks : kRows;  // of a block
    static constexpr int kLineBytes = 16 * kChunks;
    static_assert(kElement == 2);

    // A thread's share in copying, of kThreads.
    template <int kThreads>
    class Loader {
        using Lines = DecodeLines<kChunks, kThreads>;

      public:
        // `from`: the offset in a stage that copy() counts from.
        __device__ Loader(const DecodeArguments& arguments, int feature, int thread, uint32_t from)
            : arguments_(arguments),
              line_(thread / kChunks),
              offset_(Lines::offset(line_, thread % kChunks) - from) {
            const int64_t row_in_block = feature & ((1 << arguments.row_shift) - 1);
            const int64_t first = kTransposed
                                      ? (static_cast<int64_t>(line_) << arguments.row_shift) + row_in_block
                                      : (row_in_block + line_) << arguments.k_shift;
            values_ = static_cast<const char*>(arguments.values) + first * kElement + thread % kChunks * 16;
        }

        // The j-th block of a slice, from its k on, into the stage at `stage`. `bytes`: 16, or 0 for zeros.
        __device__ void copy(uint32_t stage, int j, int64_t slot, int k, int bytes) const {
            const int k_shift = arguments_.k_shift, line_shift = kTransposed ? arguments_.row_shift : k_shift;
            const int64_t k_value = kTransposed ? static_cast<int64_t>(k) << line_shift : k;
            const char* from = values_ + ((slot << (arguments_.row_shift + k_shift)) + k_value) * kElement;
            const int64_t step = (int64_t{Lines::kCopyLines} << line_shift) * kElement;
            const uint32_t target = stage + (kTransposed ? offset_ : 0) + j * kLines * kLineBytes;
#pragma unroll
            for (int i = 0; i < (kLines + Lines::kCopyLines - 1) / Lines::kCopyLines; ++i)
                copy_async_if(kLines % Lines::kCopyLines == 0 || line_ < kLines,
                              (target ^ Lines::swap(i)) + i * Lines::kCopyBytes, from + i * step, bytes);
        }

      private:
        const DecodeArguments& arguments_;
        int line_;  // of those copied at a time, the one of which this thread copies a chunk
        uint32_t offset_;
        const char* values_;
    };

    // A warp's fragments.
    class Reader {
      public:
        __device__ Reader(int lane, int first_row)
            : offset_(kTransposed
                          ? lines_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ first_row * kElement
                          : lines_offset(lane % 16, lane / 16) + first_row * kLineBytes) {}

        // Of the rows 16 * i to 16 * i + 15 and a quarter of the slice.
        __device__ Fragment<4> load(uint32_t stage, int quarter, int i) const {
            if constexpr (kTransposed) {
                return load_matrices<true>(stage + quarter * 16 * kLineBytes + (offset_ ^ i * 16 * kElement));
            } else {
                constexpr int kQuarters = kBlockChunks / 2;  // of a block
                return load_matrices<false>(stage + (offset_ ^ quarter % kQuarters * 32) +
                                            quarter / kQuarters * kRows * kLineBytes + i * 16 * kLineBytes);
            }
        }

      private:
        __device__ static uint32_t lines_offset(int line, int chunk) {
            return DecodeLines<kChunks, 32>::offset(line, chunk);
        }

        uint32_t offset_;
    };
};

}  // namespace ts::sm80
