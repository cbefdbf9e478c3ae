// The weight of decode.cuh by format: how slices of it are copied, widened and multiplied.
#pragma once

#include <algorithm>

#include "ampere/async.cuh"
#include "ampere/dequantize.cuh"
#include "ampere/math.cuh"
#include "common/launch.cuh"
#include "common/problem.h"
#include "common/weight.h"

namespace ts::sm80 {

// Arguments of the decode kernel.

struct DecodeResults {
    void* output;
    const void* bias;
    const void* residual;  // or gate, in the output's layout
    int64_t output_ld, residual_ld;
    Layout layout;
    Activation activation;  // of the sums or, if gated, of the gate
    bool gated;
};

struct DecodeArguments {
    const void* input;
    int64_t input_ld;  // in bytes
    DecodeResults results;
    const void* values;
    Adjacency rows;  // of results
    int tokens;
    int row_shift;  // log2 of the rows of a block
    int k_shift;    // log2 of the k of a block
    const uint32_t* metadata;
    const float* scales;
    bool row_scales;
    int chunks;  // of tokens; the CTAs of one block row follow one another, which read the same values
    // Grouped products:
    const int32_t* offsets;
    int groups;
    int group_features;  // of results
};

// How lines lie in the shared memory of the decode kernel, and its weight format for dense blocks (see
// common/weight.h). Formats also say how activations are read, since both operands of a product
// have their k in one order:
//   - Lines: how they lie in a stage
//   - kFewBytes: whether a slice has so few that what surrounds its products has to be short
//   - kScalesSums: whether scales multiply sums, those of kBlockParts parts of a block
//   - Input: what products take of them, kParts of each kStep of k, kTiles tiles of 8 tokens at a time

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
    static constexpr bool kFewBytes = false, kScalesSums = false;
    static constexpr int kBlockParts = 1;
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

// Weight formats of the decode kernel for values in fewer bytes: 2:4, of 8 bits, or both; dds_nt alone.
// Values of 8 bits become weights in registers, rounded as ts_values_dequantize rounds them. Of dense blocks
// ldmatrix gives a thread 4 that are neighbours in memory, where products want pairs that lie apart: so k is
// permuted, and that of activations likewise. For up to 8 tokens products of dense blocks take the values
// themselves, which 16 bits hold exactly, and scales multiply their sums: a third less instructions.

__device__ inline uint32_t load_word(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ inline uint2 load_words(uint32_t address) {
    uint2 words;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
    return words;
}

// Two values of a word in 16 bits, exactly: without their scale.
template <DType kDType, class Value>
__device__ inline uint32_t exact_pair(uint32_t word, int pair) {
    if constexpr (kDType == DType::int8 && std::is_same_v<Value, __nv_bfloat16>) {
        // bfloat16 has 8 bits of fraction: 7 bits are added to 128, and then 128 or, with the sign, 256 taken
        // away.
        constexpr int kAndOr = (0xf0 & 0xcc) | 0xaa;
        const uint32_t apart = permute_bytes(word, pair == 0 ? 0x4140 : 0x4342);
        __nv_bfloat162 biased, bias;
        asm("lop3.b32 %0, %1, %2, %3, %4;"
            : "=r"(*reinterpret_cast<uint32_t*>(&biased))
            : "r"(apart), "n"(0x007f007f), "n"(0x43004300), "n"(kAndOr));
        asm("lop3.b32 %0, %1, %2, %3, %4;"
            : "=r"(*reinterpret_cast<uint32_t*>(&bias))
            : "r"(apart), "n"(0x00800080), "n"(0x43004300), "n"(kAndOr));
        const __nv_bfloat162 values = __hsub2(biased, bias);
        return *reinterpret_cast<const uint32_t*>(&values);
    } else if constexpr (std::is_same_v<Value, __half>) {
        const __half2 values = decode_pair<kDType>(word, pair);
        return *reinterpret_cast<const uint32_t*>(&values);
    } else {
        return round_pair(__half22float2(decode_pair<kDType>(word, pair)), Value());
    }
}

// Adds products of two rows of values, times the scales of these.
__device__ inline void add_scaled(float (&sums)[4], const float (&own)[4], float2 scales) {
    sums[0] += own[0] * scales.x;
    sums[1] += own[1] * scales.x;
    sums[2] += own[2] * scales.y;
    sums[3] += own[3] * scales.y;
}

// A slice has values [blocks][kRows][kBlockK of k], in DecodeLines, as they are stored; metadata
// [kSlice / 32][kRows / 16][8][2], of 2:4; scales [blocks][kRows], of 8 bits. `kExact`: products take the
// values of dense blocks themselves.
template <class Math, Storage kStorage, DType kDType, int kRows_, int kBlockK, int kSlice_,
          bool kExact = false>
struct CompressedDecodeWeight {
    static constexpr bool kSparse = kStorage == Storage::two_of_four;
    static constexpr bool kQuantized = is_quantized(kDType);
    static constexpr bool kTransposed = false;
    static constexpr int kRows = kRows_;
    static constexpr int kSlice = kSlice_;
    static constexpr int kBlockChunks = kBlockK / 8;  // of activations
    static constexpr int kBlocks = kSlice / kBlockK;  // whole ones
    static constexpr bool kHalved = kSparse || kDType == DType::int4;
    static constexpr int kShift = (kQuantized ? 0 : 1) - (kHalved ? 1 : 0);  // log2 of the bytes of a weight
    static constexpr int kLineBytes = kShift < 0 ? kBlockK / 2 : kBlockK;
    static constexpr int kChunks = kLineBytes / 16;
    static constexpr int kBlockBytes = kRows * kLineBytes;
    static constexpr int kMetadata = kBlocks * kBlockBytes;  // offset in a stage
    static constexpr int kScales = kMetadata + (kSparse ? kRows * kSlice / 8 : 0);
    static constexpr int kScaleBytes = kQuantized ? kBlocks * kRows * static_cast<int>(sizeof(float)) : 0;
    static constexpr int kBytes = (kScales + kScaleBytes + 127) / 128 * 128;

    // In k: metadata of a thread is that of 64; ldmatrix loads 32 bytes of 16 lines.
    static constexpr int kStep = kSparse ? 64 : 32, kParts = kStep / 32, kTiles = 1;
    static constexpr bool kFewBytes = true, kScalesSums = false;
    static constexpr int kBlockParts = 1;
    static_assert(kShift <= 0);

    static constexpr bool kSharesScales = kBlockK >= 32;  // all of a step

    struct Operand {
        Fragment<4> part[2];  // of 32 of k if 2:4, otherwise 16
        float2 scales[2];     // if exact
        uint32_t metadata;
    };

    template <int kThreads>
    using Lines = DecodeLines<kBlockChunks, kThreads, kSparse ? 1 : 2>;

    __device__ static constexpr int k_shift(const DecodeArguments&) { return log2_of_block(kBlockK); }

    // A thread's share in copying, of kThreads.
    template <int kThreads>
    class Loader {
        using OwnLines = DecodeLines<kChunks, kThreads>;
        static constexpr int kMetadataChunks = kRows / 4;  // of 32 of k

      public:
        // `from`: the offset in a stage that copy() counts from.
        __device__ Loader(const DecodeArguments& arguments, int feature, int thread, uint32_t from)
            : thread_(thread), line_(thread / kChunks), from_(from) {
            const int rows = 1 << arguments.row_shift;
            const int row = feature & (rows - 1);  // in the block
            offset_ = kept(OwnLines::offset(line_, thread % kChunks) - from);
            values_ = kept(static_cast<const char*>(arguments.values) + row * kLineBytes + thread * 16);
            value_step_ = kept(rows * kLineBytes);
            metadata_ =
                kept(reinterpret_cast<const char*>(arguments.metadata) +
                     (thread / kMetadataChunks * (rows / 4) + row / 4 + thread % kMetadataChunks) * 16);
            metadata_step_ = kept(rows * (kBlockK / 8));
            scales_ = kept(arguments.scales + (arguments.row_scales ? row + thread : 0));
            scale_step_ = kept(arguments.row_scales ? rows : 1);
            scale_count_ = kept(arguments.row_scales ? kRows : 1);
        }

        // The j-th block of a slice into the stage at `stage`. `bytes`: 16, or 0 for zeros.
        __device__ void copy(uint32_t stage, int j, int slot, int, int bytes) const {
            const char* from = values_ + static_cast<int64_t>(slot) * value_step_;
            const uint32_t target = stage + offset_ + j * kBlockBytes;
#pragma unroll
            for (int i = 0; i < (kRows + OwnLines::kCopyLines - 1) / OwnLines::kCopyLines; ++i)
                copy_async_if(kRows % OwnLines::kCopyLines == 0 || line_ < kRows,
                              (target ^ OwnLines::swap(i)) + i * OwnLines::kCopyBytes,
                              from + i * OwnLines::kCopyBytes, bytes);
            if constexpr (kSparse) copy_metadata(stage - from_, j, slot);
            if constexpr (kQuantized) copy_scales(stage - from_, j, slot, bytes);
        }

      private:
        // A missing block takes the metadata of another one: two indices of a group must differ.
        __device__ void copy_metadata(uint32_t stage, int j, int slot) const {
            constexpr int kAll = kBlockK / 32 * kMetadataChunks;
            static_assert(kAll <= kThreads);
            copy_async_if(kAll == kThreads || thread_ < kAll, stage + kMetadata + (j * kAll + thread_) * 16,
                          metadata_ + static_cast<int64_t>(slot) * metadata_step_);
        }

        __device__ void copy_scales(uint32_t stage, int j, int slot, int bytes) const {
            static_assert(kRows <= kThreads);
            copy_async_if<4>(thread_ < scale_count_, stage + kScales + (j * kRows + thread_) * 4,
                             scales_ + static_cast<int64_t>(slot) * scale_step_, bytes / 4);
        }

        int thread_;
        int line_;  // of those copied at a time, the one of which this thread copies a chunk
        uint32_t from_, offset_;
        const char* values_;
        const char* metadata_;
        const float* scales_;
        int value_step_, metadata_step_, scale_step_;  // from one block to the next
        int scale_count_;                              // of a block in a stage
    };

    // A warp's operands.
    class Reader {
      public:
        __device__ Reader(const DecodeArguments& arguments, int lane, int first_row)
            : odd_(lane % 2),
              scale_bytes_(arguments.row_scales ? static_cast<int>(sizeof(float)) : 0),
              values_(first_row * kLineBytes + values_offset(lane)),
              metadata_(kMetadata + first_row * 4 + lane % 4 / 2 * kRows * 4 + lane / 4 * 8 + odd_ * 4),
              scales_(kScales + (first_row + lane / 4) * scale_bytes_) {}

        // Loads rows 16 * i to 16 * i + 15 of a step of the slice.
        __device__ Operand load(uint32_t stage, int step, int i) const {
            Operand operand;
            if constexpr (!kQuantized) {
                operand.part[0] = load_pair(stage, 2 * step, i);
                operand.part[1] = load_pair(stage, 2 * step + 1, i);
            } else if constexpr (!kSparse) {
                const Fragment<4> raw = load_pair(stage, step, i);
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const float2 scales = kExact && kSharesScales && part > 0
                                              ? operand.scales[0]
                                              : load_scales(stage, 2 * step + part, i);
                    const uint32_t word = raw.value[2 * part], later_word = raw.value[2 * part + 1];
                    operand.scales[part] = scales;
                    operand.part[part] = {weights(word, 0, scales.x), weights(later_word, 0, scales.y),
                                          weights(word, 1, scales.x), weights(later_word, 1, scales.y)};
                }
            } else {
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const float2 scales = load_scales(stage, 2 * step + part, i);
                    const uint32_t words = address_of(stage, 2 * step + part, i);
                    constexpr int kLater = 8 * kLineBytes;
                    operand.part[part] = {weights(load_word(words), odd_, scales.x),
                                          weights(load_word(words + kLater), odd_, scales.y),
                                          weights(load_word(words + 8), odd_, scales.x),
                                          weights(load_word(words + kLater + 8), odd_, scales.y)};
                }
            }
            if constexpr (kSparse)
                operand.metadata = load_word(stage + metadata_ + step * kRows * 8 + i * 64);
            return operand;
        }

        // Loads the scales of two rows.
        __device__ float2 load_scales(uint32_t stage, int chunk, int i) const {
            const uint32_t scale = stage + scales_ + chunk / kChunks * kRows * 4 + i * 16 * scale_bytes_;
            return {__uint_as_float(load_word(scale)), __uint_as_float(load_word(scale + 8 * scale_bytes_))};
        }

      protected:
        // ldmatrix takes the address of a line from each lane. Of 2:4 of 8 bits each lane loads the words
        // that its groups of 4 lie in, together with its neighbour's: so k is in order, as metadata has it.
        __device__ static uint32_t values_offset(int lane) {
            using OwnLines = DecodeLines<kChunks, 32>;
            if constexpr (kSparse && kQuantized)
                return OwnLines::offset(lane / 4, 0) + lane % 4 / 2 * 4;
            else if constexpr (kChunks == 1)
                return lane / 16 * kBlockBytes + OwnLines::offset(lane % 16, 0);
            else
                return OwnLines::offset(lane % 16, lane / 16);
        }

        // Address of the lane's load of a chunk of the slice, or of it and the next.
        __device__ uint32_t address_of(uint32_t stage, int chunk, int i) const {
            return stage + (values_ ^ chunk % kChunks * 16) + chunk / kChunks * kBlockBytes +
                   i * 16 * kLineBytes;
        }

        __device__ Fragment<4> load_pair(uint32_t stage, int pair, int i) const {
            return load_matrices<false>(address_of(stage, 2 * pair, i));
        }

      private:
        __device__ static uint32_t weights(uint32_t word, int pair, float scale) {
            if constexpr (kExact)
                return exact_pair<kDType, typename Math::Value>(word, pair);
            else
                return dequantize<kDType, typename Math::Value>(word, pair, scale);
        }

        int odd_, scale_bytes_;
        uint32_t values_, metadata_, scales_;
    };

    // 32 of k of 8 tokens at a time.
    template <int kTokens>
    class Input {
      public:
        __device__ Input(int lane, int first_token)
            : offset_((kSparse ? Lines<32>::offset(lane % 8, lane / 8)
                               : Lines<32>::offset(lane / 4, lane % 4 / 2) + lane % 2 * 8) +
                      first_token * Lines<32>::kBytes) {}

        __device__ Fragment<4> load(uint32_t stage, int part, int tile) const {
            const uint32_t tokens = stage + kBytes + tile * 8 * Lines<32>::kBytes;
            if constexpr (kSparse) {
                constexpr int kPieces = kBlockChunks / 4;  // of a block
                return load_matrices<false>(tokens + (offset_ ^ part % kPieces * 64) +
                                            part / kPieces * kTokens * Lines<32>::kBytes);
            } else {
                const uint2 first = load_half(tokens, 2 * part), second = load_half(tokens, 2 * part + 1);
                return {first.x, first.y, second.x, second.y};
            }
        }

      private:
        __device__ uint2 load_half(uint32_t tokens, int half) const {
            constexpr int kHalves = kBlockChunks / 2;  // of a block
            return load_words(tokens + (offset_ ^ half % kHalves * 32) +
                              half / kHalves * kTokens * Lines<32>::kBytes);
        }

        uint32_t offset_;
    };

    __device__ static void multiply(float (&sums)[4], const Operand& weight, const Fragment<4>& input,
                                    int part, int) {
        if constexpr (kExact) {
            float own[4] = {};
            Math::mma(own, weight.part[0], {input.value[0], input.value[1]});
            if constexpr (!kSharesScales) {
                add_scaled(sums, own, weight.scales[0]);
                for (float& sum : own) sum = 0;
            }
            Math::mma(own, weight.part[1], {input.value[2], input.value[3]});
            add_scaled(sums, own, weight.scales[1]);
        } else if constexpr (!kSparse) {
            Math::mma(sums, weight.part[0], {input.value[0], input.value[1]});
            Math::mma(sums, weight.part[1], {input.value[2], input.value[3]});
        } else if (part == 0) {
            multiply_add_sparse<Math, 0>(sums, weight.part[0], input, weight.metadata);
        } else {
            multiply_add_sparse<Math, 1>(sums, weight.part[1], input, weight.metadata);
        }
    }
};

// `kDType`: of values of 8 bits; others have that of the activations.
template <Storage kStorage, DType kDType = DType::bfloat16>
struct CompressedDecodeFormat {
    static constexpr bool kSparse = kStorage == Storage::two_of_four;

    // Whole blocks, whose lines are read at once (measured on an H200); teams halve the 64 of k that metadata
    // of 2:4 is loaded for.
    template <class Shape>
    static constexpr int kSlice = Shape::kBlock > 64 || (kSparse && Shape::kTokenTiles == 8) ? 128 : 64;

    template <class Math, class Shape>
    using Weight = CompressedDecodeWeight<Math, kStorage, kDType, Shape::kRows, Shape::kBlock, kSlice<Shape>,
                                          !kSparse && Shape::kTokenTiles == 1>;

    // `features`: of a multiprocessor. Warps of 32 rows do not share tokens: each would make its own weights.
    template <class Start>
    static int32_t with_shape(const Problem& problem, int64_t features, Start start) {
        if constexpr (!kSparse)
            if (problem.k_block() == 16) return with_tokens<16>(problem, start);
        if (problem.tokens > 32 && problem.row_block() >= 64 && features >= 64)
            return with_block<64, 8>(problem, start);
        return with_tokens<32>(problem, start);
    }

    // Starts a grouped product.
    template <class Start>
    static int32_t with_group_shape(const Problem& problem, Start start) {
        if constexpr (!kSparse)
            if (problem.k_block() == 16) return with_block<16, 2>(problem, start);
        return with_block<32, 2>(problem, start);
    }

  private:
    template <int kRows, class Start>
    static int32_t with_tokens(const Problem& problem, Start start) {
        if (problem.tokens > 16) return with_block<kRows, 4>(problem, start);
        if (problem.tokens > 8) return with_block<kRows, 2>(problem, start);
        return with_block<kRows, 1>(problem, start);
    }

    template <int kRows, int kTokenTiles, class Start>
    static int32_t with_block(const Problem& problem, Start start) {
        if constexpr (kRows == 16) {
            return start(DecodeShape<kRows, kTokenTiles, 16>{});
        } else {
            switch (problem.k_block()) {
                case 32:
                    return start(DecodeShape<kRows, kTokenTiles, 32>{});
                case 64:
                    return start(DecodeShape<kRows, kTokenTiles, 64>{});
                default:
                    return start(DecodeShape<kRows, kTokenTiles, 128>{});
            }
        }
    }
};

struct two_of_four {
    static constexpr const char* kFamily = "sm80_decode_2_4";
    static constexpr uint32_t kOps = 1u << static_cast<int>(Op::dds_nt);
    static constexpr uint32_t kStorages = 1u << static_cast<int>(Storage::two_of_four);
    static constexpr uint32_t kDTypes = 0;

    static const char* refuses(const Problem& problem) {
        return problem.row_block() < 32 ? "its blocks of 2:4 have 16 rows" : nullptr;
    }

    template <class Launch>
    static int32_t with_format(const Problem&, Launch launch) {
        return launch(CompressedDecodeFormat<Storage::two_of_four>{});
    }
};

struct quantized {
    static constexpr const char* kFamily = "sm80_decode_8_bits";
    static constexpr uint32_t kOps = two_of_four::kOps;
    static constexpr uint32_t kStorages = two_of_four::kStorages | DenseStorage::kStorages;
    static constexpr uint32_t kDTypes =
        1u << static_cast<int>(DType::int8) | 1u << static_cast<int>(DType::float8_e4m3fn);

    static const char* refuses(const Problem& problem) {
        if (problem.values.is_compressed()) return two_of_four::refuses(problem);
        return problem.row_block() < 32 && problem.k_block() > 16
                   ? "its blocks have 16 rows, but more columns"
                   : nullptr;
    }

    template <class Launch>
    static int32_t with_format(const Problem& problem, Launch launch) {
        return problem.values.dtype == DType::int8 ? with_dtype<DType::int8>(problem, launch)
                                                   : with_dtype<DType::float8_e4m3fn>(problem, launch);
    }

  private:
    template <DType kDType, class Launch>
    static int32_t with_dtype(const Problem& problem, Launch launch) {
        return problem.values.is_compressed() ? launch(CompressedDecodeFormat<Storage::two_of_four, kDType>{})
                                              : launch(CompressedDecodeFormat<Storage::dense, kDType>{});
    }
};

// Weight format of the decode kernel for values of int4; dds_nt alone, in blocks of 32 or more rows and
// columns. Products take the values themselves, which 16 bits hold exactly; their sums over a row of a block,
// times its scale, are added to those of the results. ldmatrix gives a thread 8 values that are
// neighbours in memory: so k is permuted, and that of activations likewise.

__device__ inline uint32_t subtract(uint32_t pair, float number, __half) {
    const __half2 result = __hsub2(as_half2(pair), __float2half2_rn(number));
    return *reinterpret_cast<const uint32_t*>(&result);
}
__device__ inline uint32_t subtract(uint32_t pair, float number, __nv_bfloat16) {
    const __nv_bfloat162 result =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&pair), __float2bfloat162_rn(number));
    return *reinterpret_cast<const uint32_t*>(&result);
}

// Decodes two neighbours of the 8 values of a word; `later`: the word four bits lower, which has the second
// of each two where the word has the first.
template <class Value>
__device__ inline uint32_t decode_int4(uint32_t word, uint32_t later, int pair) {
    // Four bits with their sign turned, which are 8 more, in the lowest ones of the first number from which
    // on 16 bits have all integers. One instruction, which has room for one constant: the compiler would take
    // two.
    constexpr bool kHalf = std::is_same_v<Value, __half>;
    constexpr uint32_t kFours = 0x000f000f, kBiased = kHalf ? 0x64086408 : 0x43084308;
    constexpr int kAndXor = (0xf0 & 0xcc) ^ 0xaa;
    uint32_t biased;
    asm("lop3.b32 %0, %1, %2, %3, %4;"
        : "=r"(biased)
        : "r"(__byte_perm(word, later, 0x0400 + 0x0101 * pair)), "n"(kFours), "r"(kBiased), "n"(kAndXor));
    return subtract(biased, kHalf ? 1024 + 8 : 128 + 8, Value());
}

template <class Math, int kRows, int kBlockK>
struct Int4DecodeWeight : CompressedDecodeWeight<Math, Storage::dense, DType::int4, kRows, kBlockK, 128> {
    using Base = CompressedDecodeWeight<Math, Storage::dense, DType::int4, kRows, kBlockK, 128>;
    static constexpr int kStep = 64, kParts = 2;  // of k: ldmatrix loads 32 bytes of 16 lines
    static constexpr int kBlockParts = kBlockK / 32;
    static constexpr bool kScalesSums = true;

    // 16 rows: for each 32 of k the operands of two products.
    struct Operand {
        Fragment<4> values[kParts][2];
    };

    template <int kThreads>
    using Lines = DecodeLines<Base::kBlockChunks, kThreads, 4>;

    class Reader : public Base::Reader {
      public:
        using Base::Reader::Reader;

        // Loads rows 16 * i to 16 * i + 15 of a step of the slice.
        __device__ Operand load(uint32_t stage, int step, int i) const {
            Operand operand;
            const Fragment<4> raw = this->load_pair(stage, step, i);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const uint32_t rows = raw.value[2 * part], later_rows = raw.value[2 * part + 1];
                const auto weights = [](uint32_t word, int pair) {
                    return decode_int4<typename Math::Value>(word, word >> 4, pair);
                };
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    operand.values[part][j] = {weights(rows, 2 * j), weights(later_rows, 2 * j),
                                               weights(rows, 2 * j + 1), weights(later_rows, 2 * j + 1)};
            }
            return operand;
        }
    };

    // 32 of k of 8 tokens at a time, of which a thread has 8.
    template <int kTokens>
    class Input {
      public:
        __device__ Input(int lane, int first_token)
            : offset_(Lines<32>::offset(lane / 4, lane % 4) + first_token * Lines<32>::kBytes) {}

        __device__ Fragment<4> load(uint32_t stage, int part, int tile) const {
            constexpr int kPieces = Base::kBlockChunks / 4;  // of a block
            const uint32_t address = stage + Base::kBytes + tile * 8 * Lines<32>::kBytes +
                                     (offset_ ^ part % kPieces * 64) +
                                     part / kPieces * kTokens * Lines<32>::kBytes;
            Fragment<4> input;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(input.value[0]), "=r"(input.value[1]), "=r"(input.value[2]),
                           "=r"(input.value[3])
                         : "r"(address)
                         : "memory");
            return input;
        }

      private:
        uint32_t offset_;
    };

    __device__ static void multiply(float (&sums)[4], const Operand& weight, const Fragment<4>& input,
                                    int part, int) {
        Math::mma(sums, weight.values[part][0], {input.value[0], input.value[1]});
        Math::mma(sums, weight.values[part][1], {input.value[2], input.value[3]});
    }
};

struct Int4DecodeFormat {
    template <class Math, class Shape>
    using Weight = Int4DecodeWeight<Math, Shape::kRows, Shape::kBlock>;

    // `features`: of a multiprocessor. For 16 tokens activations have as many bytes as the values of 64 rows,
    // which therefore share them.
    template <class Start>
    static int32_t with_shape(const Problem& problem, int64_t features, Start start) {
        if (problem.tokens <= 8) return with_block<32, 1>(problem, start);
        if (problem.tokens <= 16 && problem.row_block() >= 64 && features >= 64)
            return with_block<64, 2>(problem, start);
        return with_block<32, 4>(problem, start);
    }

    // Starts a grouped product.
    template <class Start>
    static int32_t with_group_shape(const Problem& problem, Start start) {
        return with_block<32, 2>(problem, start);
    }

  private:
    template <int kRows, int kTokenTiles, class Start>
    static int32_t with_block(const Problem& problem, Start start) {
        switch (problem.k_block()) {
            case 32:
                return start(DecodeShape<kRows, kTokenTiles, 32>{});
            case 64:
                return start(DecodeShape<kRows, kTokenTiles, 64>{});
            default:
                return start(DecodeShape<kRows, kTokenTiles, 128>{});
        }
    }
};

struct four_bits {
    static constexpr const char* kFamily = "sm80_decode_4_bits";
    static constexpr uint32_t kOps = two_of_four::kOps;
    static constexpr uint32_t kStorages = DenseStorage::kStorages;
    static constexpr uint32_t kDTypes = 1u << static_cast<int>(DType::int4);

    static const char* refuses(const Problem& problem) {
        return problem.row_block() < 32 || problem.k_block() < 32 ? "its blocks have 16 rows or columns"
                                                                  : nullptr;
    }

    template <class Launch>
    static int32_t with_format(const Problem&, Launch launch) {
        return launch(Int4DecodeFormat{});
    }
};

}  // namespace ts::sm80
