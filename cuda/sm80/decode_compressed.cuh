// Weight formats of the decode kernel for values in fewer bytes: 2:4, of 8 bits, or both; dds_nt alone.
// Values of 8 bits become weights in registers, rounded as ts_values_dequantize rounds them. Of dense blocks
// ldmatrix gives a thread 4 that are neighbours in memory, where products want pairs that lie apart: so k is
// permuted, and that of activations likewise. For up to 8 tokens products of dense blocks take the values
// themselves, which 16 bits hold exactly, and scales multiply their sums: a third less instructions.
#pragma once

#include "common/launch.cuh"
#include "sm80/decode_weight.cuh"
#include "sm80/dequantize.cuh"
#include "sm80/sparse_math.cuh"

namespace ts::sm80 {

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
    static constexpr bool kFewBytes = true;
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

        // Loads the scales of two rows.
        __device__ float2 load_scales(uint32_t stage, int chunk, int i) const {
            const uint32_t scale = stage + scales_ + chunk / kChunks * kRows * 4 + i * 16 * scale_bytes_;
            return {__uint_as_float(load_word(scale)), __uint_as_float(load_word(scale + 8 * scale_bytes_))};
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

}  // namespace ts::sm80
