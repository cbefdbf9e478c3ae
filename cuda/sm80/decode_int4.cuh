// Weight format of the decode kernel for values of int4; dds_nt alone, in blocks of 32 or more rows and
// columns. Products take the values themselves, which 16 bits hold exactly; their sums over 32 of k of a row
// of a block, times its scale, are added to those of the results. ldmatrix gives a thread 8 values that are
// neighbours in memory: so k is permuted, and that of activations likewise.
#pragma once

#include "sm80/decode_compressed.cuh"

namespace ts::sm80 {

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

    // 16 rows: for each 32 of k the operands of two products, and the scales of two rows.
    struct Operand {
        Fragment<4> values[kParts][2];
        float2 scales[kParts];
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
                operand.scales[part] = this->load_scales(stage, kParts * step + part, i);
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
        float own[4] = {};
        Math::mma(own, weight.values[part][0], {input.value[0], input.value[1]});
        Math::mma(own, weight.values[part][1], {input.value[2], input.value[3]});
        const float2 scales = weight.scales[part];
        sums[0] += own[0] * scales.x;
        sums[1] += own[1] * scales.x;
        sums[2] += own[2] * scales.y;
        sums[3] += own[3] * scales.y;
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
