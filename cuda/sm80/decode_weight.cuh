// How lines lie in the shared memory of the decode kernel, and its weight format for dense blocks (see
// common/weight.h). Formats also say how activations are read, since both operands of a product
// have their k in one order:
//   - Lines: how they lie in a stage
//   - kFewBytes: whether a slice has so few that what surrounds its products has to be short
//   - Input: what products take of them, kParts of each kStep of k, kTiles tiles of 8 tokens at a time
#pragma once

#include <algorithm>

#include "common/problem.h"
#include "common/weight.h"
#include "sm80/async.cuh"
#include "sm80/decode_arguments.cuh"
#include "sm80/math.cuh"

namespace ts::sm80 {

// Lines of so many chunks of 16 bytes, copied by so many threads at a time. Chunks are permuted among the 128
// bytes around them, so that ldmatrix finds the same chunk of 8 lines in different banks; or loads of 8 bytes
// a thread, of half a warp, the same two chunks of 4 lines; or of 16 bytes, of a quarter, the same four of 2.
// `kUnit`: chunks that stay together.
template <int kChunks, int kThreads, int kUnit = 1>
struct DecodeLines {
    static constexpr int kBytes = 16 * kChunks;
    static constexpr int kCopyLines = kThreads / kChunks;  // that are copied at a time
    static constexpr int kCopyBytes = kThreads * 16;

    __device__ static uint32_t offset(int line, int chunk) {
        return (line * kChunks + (chunk ^ permutation(line))) * 16;
    }
    // Exclusive or of the offset of a line of the i-th copy after the first.
    __device__ static constexpr uint32_t swap(int i) { return permutation(i * kCopyLines) * 16; }

  private:
    __device__ static constexpr int permutation(int line) {
        constexpr int kPermuted = kChunks < 8 ? kChunks : 8;
        return (line * kPermuted / 8 & (kPermuted / kUnit - 1)) * kUnit;
    }
};

// Keeps the compiler from computing a value anew in every round of a loop.
template <class T>
__device__ inline T kept(T value) {
    if constexpr (sizeof(T) == 8)
        asm volatile("" : "+l"(value));
    else
        asm volatile("" : "+r"(value));
    return value;
}

// A slice has its blocks one after another: dds_nt [kRows][kBlockChunks * 8 of k], dds_nn [k of a block in
// the slice][kRows], in DecodeLines, as they are stored. `kBlockChunks`: of 16 bytes, of a block's k in a
// slice.
template <class Math, bool kTransposed_, int kRows_, int kBlockChunks_>
struct DenseDecodeWeight {
    using Value = typename Math::Value;
    static constexpr bool kTransposed = kTransposed_;
    static constexpr int kRows = kRows_;
    static constexpr int kBlockChunks = kBlockChunks_;
    static constexpr int kValueBytes = sizeof(Value);
    static constexpr int kSlice = 64;
    static constexpr int kBytes = kRows * kSlice * kValueBytes;
    static constexpr int kChunks = kTransposed ? kRows / 8 : kBlockChunks;
    static constexpr int kLines = kTransposed ? 8 * kBlockChunks : kRows;  // of a block
    static constexpr int kLineBytes = 16 * kChunks;
    static constexpr int kStep = 16, kParts = 1, kTiles = 2;
    static constexpr bool kFewBytes = false;
    static_assert(kValueBytes == 2);

    template <int kThreads>
    using Lines = DecodeLines<kBlockChunks, kThreads>;

    __device__ static int k_shift(const DecodeArguments& arguments) { return arguments.k_shift; }

    // A thread's share in copying, of kThreads.
    template <int kThreads>
    class Loader {
        using OwnLines = DecodeLines<kChunks, kThreads>;

      public:
        // `from`: the offset in a stage that copy() counts from.
        __device__ Loader(const DecodeArguments& arguments, int feature, int thread, uint32_t from)
            : arguments_(arguments),
              line_(thread / kChunks),
              offset_(OwnLines::offset(line_, thread % kChunks) - from) {
            const int64_t row_in_block = feature & ((1 << arguments.row_shift) - 1);
            const int64_t first = kTransposed
                                      ? (static_cast<int64_t>(line_) << arguments.row_shift) + row_in_block
                                      : (row_in_block + line_) << arguments.k_shift;
            values_ =
                static_cast<const char*>(arguments.values) + first * kValueBytes + thread % kChunks * 16;
        }

        // The j-th block of a slice, from its k on, into the stage at `stage`. `bytes`: 16, or 0 for zeros.
        __device__ void copy(uint32_t stage, int j, int64_t slot, int k, int bytes) const {
            const int k_shift = arguments_.k_shift, line_shift = kTransposed ? arguments_.row_shift : k_shift;
            const int64_t k_value = kTransposed ? static_cast<int64_t>(k) << line_shift : k;
            const char* from = values_ + ((slot << (arguments_.row_shift + k_shift)) + k_value) * kValueBytes;
            const int64_t step = (int64_t{OwnLines::kCopyLines} << line_shift) * kValueBytes;
            const uint32_t target = stage + (kTransposed ? offset_ : 0) + j * kLines * kLineBytes;
#pragma unroll
            for (int i = 0; i < (kLines + OwnLines::kCopyLines - 1) / OwnLines::kCopyLines; ++i)
                copy_async_if(kLines % OwnLines::kCopyLines == 0 || line_ < kLines,
                              (target ^ OwnLines::swap(i)) + i * OwnLines::kCopyBytes, from + i * step,
                              bytes);
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
        __device__ Reader(const DecodeArguments&, int lane, int first_row)
            : offset_(kTransposed
                          ? lines_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ first_row * kValueBytes
                          : lines_offset(lane % 16, lane / 16) + first_row * kLineBytes) {}

        // Loads rows 16 * i to 16 * i + 15 of a quarter of a step of the slice.
        __device__ Fragment<4> load(uint32_t stage, int quarter, int i) const {
            if constexpr (kTransposed) {
                return load_matrices<true>(stage + quarter * 16 * kLineBytes +
                                           (offset_ ^ i * 16 * kValueBytes));
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

    template <int kTokens>
    class Input {
      public:
        __device__ Input(int lane, int first_token)
            : offset_(Lines<32>::offset((kTokens > 8 ? lane / 16 * 8 : 0) + lane % 8, lane / 8 % 2) +
                      first_token * Lines<32>::kBytes + kBytes) {}

        // Loads tokens 16 * i to 16 * i + 7 in the first half, and 8 more in the second.
        __device__ Fragment<4> load(uint32_t stage, int quarter, int i) const {
            constexpr int kQuarters = kBlockChunks / 2;  // of a block
            return load_matrices<false>(stage + (offset_ ^ quarter % kQuarters * 32) +
                                        quarter / kQuarters * kTokens * Lines<32>::kBytes +
                                        i * 16 * Lines<32>::kBytes);
        }

      private:
        uint32_t offset_;
    };

    // `part` of a step, `tile` of the tokens that Input reads at a time.
    __device__ static void multiply(typename Math::Accumulator (&sums)[4], const Fragment<4>& weight,
                                    const Fragment<4>& input, int, int tile) {
        Math::mma(sums, weight, {input.value[tile * 2], input.value[tile * 2 + 1]});
    }
};

// The shape of a CTA: its features, its tiles of 8 tokens, and the k of blocks.
template <int kRows_, int kTokenTiles_, int kBlock_>
struct DecodeShape {
    static constexpr int kRows = kRows_, kTokenTiles = kTokenTiles_, kBlock = kBlock_;
};

// `start` is called with the shape for the blocks of a problem.
template <int kRows, int kTokenTiles, class Start>
int32_t with_block(const Problem& problem, Start start) {
    switch (problem.k_block()) {
        case 16:
            return start(DecodeShape<kRows, kTokenTiles, 16>{});
        case 32:
            return start(DecodeShape<kRows, kTokenTiles, 32>{});
        case 64:
            return start(DecodeShape<kRows, kTokenTiles, 64>{});
        default:
            return start(DecodeShape<kRows, kTokenTiles, 128>{});
    }
}

template <bool kTransposed>
struct DenseDecodeFormat {
    template <class Math, class Shape>
    using Weight = DenseDecodeWeight<Math, kTransposed, Shape::kRows, std::min(Shape::kBlock, 64) / 8>;

    // `features`: of a multiprocessor. More features in a CTA read x less often; fewer give every
    // multiprocessor something to do.
    template <class Start>
    static int32_t with_shape(const Problem& problem, int64_t features, Start start) {
        const int32_t row_block = problem.row_block();
        if (problem.tokens > 32 && row_block >= 64 && features >= 64)
            return with_block<64, 8>(problem, start);
        if (problem.tokens > 8 && row_block >= 32 && features >= 32) return with_tokens<32>(problem, start);
        if (problem.tokens > 8) return with_tokens<16>(problem, start);
        return with_block<16, 1>(problem, start);
    }

    // Starts a grouped product.
    template <class Start>
    static int32_t with_group_shape(const Problem& problem, Start start) {
        return problem.row_block() < 32 ? with_block<16, 2>(problem, start)
                                        : with_block<32, 2>(problem, start);
    }

  private:
    template <int kRows, class Start>
    static int32_t with_tokens(const Problem& problem, Start start) {
        if (problem.tokens > 32) return with_block<kRows, 8>(problem, start);
        if (problem.tokens > 16) return with_block<kRows, 4>(problem, start);
        return with_block<kRows, 2>(problem, start);
    }
};

// Argument of rows of the registry: a format for each problem.
struct dense : DenseStorage {
    static constexpr const char* kFamily = "sm80_decode";
    static constexpr uint32_t kOps = bits_of(Op::dds_nt, Op::dds_nn);

    static const char* refuses(const Problem&) { return nullptr; }

    template <class Launch>
    static int32_t with_format(const Problem& problem, Launch launch) {
        return problem.forward() ? launch(DenseDecodeFormat<false>{}) : launch(DenseDecodeFormat<true>{});
    }
};

}  // namespace ts::sm80
