// The weight formats of dds kernels (see common/weight.h), which multiply from shared memory. A stage has the
// weight of a warpgroup's features in a step of k.
#pragma once

#include <algorithm>

#include "common/weight.h"
#include "sm90/dds_arguments.cuh"
#include "sm90/select.h"
#include "tma/ring.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// Base of formats whose products read the weight from shared memory.
struct InSharedMemory {
    static constexpr bool kInRegisters = false;
    static constexpr bool kAlongK = false;        // products read both operands along k alone
    static constexpr bool kEndsProducts = false;  // multiply() waits for its products
    static constexpr int kStepProducts = 4;
    static const char* refuses(const Problem&) { return nullptr; }
    template <int kTokens>
    struct Products {};
};

// Promoted accumulation: the sums of each step are added to those of the tile. Neither is kept from one tile
// to the next.
template <class Math, int kSums>
class PromotedSums {
    using Sum = typename Math::Accumulator;
    static constexpr bool kPromotes = Math::kAccumulation != Accumulation::kept;

  public:
    __device__ void begin(Sum (&sums)[kSums]) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = step_[i] = 0.0f;
    }
    __device__ void add(Sum (&sums)[kSums]) const {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] += step_[i];
    }

  protected:
    Sum step_[kPromotes ? kSums : 1];
};

// Sums of float8 have two parts (Accumulation::carried). Beside a sum, tensor cores keep about 13 bits of
// each product that they add to it, so the sum has to stay small: after some products most of it is carried
// over to where bfloat16 holds it, two sums to a word, and tensor cores go on with the rest, which is exact.
// The second sum of a word has the bits of the first below its own; that saves instructions, and costs
// nothing, because the rest is what the word lacks as a float.
__device__ inline void add_carried(float& first, float& second, uint32_t pair) {
    first += __uint_as_float(pair << 16);
    second += __uint_as_float(pair);
}
// The carried part is the sum times `factor`, what it will be halfway to the next time if it grows as before:
// the rest then goes from below zero to above it, and is half as large at most.
__device__ inline void carry(float& first, float& second, uint32_t& pair, float factor) {
    add_carried(first, second, pair);
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(first * factor, second * factor);
    pair = reinterpret_cast<const uint32_t&>(rounded);
    first -= __uint_as_float(pair << 16);
    second -= __uint_as_float(pair);
}

// When sums are carried: after half an interval or less, and then after each. Warpgroups begin apart, so that
// others multiply meanwhile.
class CarryTimes {
  public:
    // Before the products of a tile.
    __device__ void begin(int interval, int warpgroup, int warpgroups) {
        interval_ = interval;
        done_ = 0;
        next_ = interval / (2 * warpgroups) * (warpgroups - warpgroup);
    }
    // Before some products.
    __device__ bool are_due() const { return done_ >= next_; }
    __device__ float factor() {
        next_ = done_ + interval_;
        return 1 + __fdividef(0.5f * interval_, done_);
    }
    __device__ void add(int products) { done_ += products; }

  private:
    int interval_;  // in products
    int done_;
    int next_;
};

// The carried part of a tile's sums, in registers.
template <int kSums>
class CarriedSums {
  public:
    __device__ void begin() {
#pragma unroll
        for (uint32_t& pair : pairs_) pair = 0;
    }
    __device__ void carry(float (&sums)[kSums], float factor) {
#pragma unroll
        for (int i = 0; i < kSums; i += 2) sm90::carry(sums[i], sums[i + 1], pairs_[i / 2], factor);
    }
    __device__ void add_to(float (&sums)[kSums]) const {
#pragma unroll
        for (int i = 0; i < kSums; i += 2) add_carried(sums[i], sums[i + 1], pairs_[i / 2]);
    }

  private:
    uint32_t pairs_[kSums / 2];
};
struct NoCarriedSums {};

// A stage holds boxes of blocks, or of what it takes of larger ones, which are row_width features by k_width
// of k; their lines of row_width or k_width values are swizzled over that width:
//   dds_nt: [pieces][kFeatures][k_width], as blocks are
//   dds_nn: [warpgroup_rows][kStep][row_width], as blocks are, which wgmma transposes
template <Op kOp, class Math>
struct DenseWeight : DenseStorage, InSharedMemory {
    static constexpr bool kTransposed = kOp == Op::dds_nn;
    static constexpr int kFeatures = 64;
    static constexpr int kValueBytes = sizeof(typename Math::Value);
    static constexpr int kStep = 128 / kValueBytes;
    static constexpr int kBoxBytes = kFeatures * kStep * kValueBytes;
    static constexpr int kStageBytes = kBoxBytes;

    static constexpr int most_stages(int tile_tokens) { return tile_tokens == 64 ? 6 : 3; }

    // Lines of values, which are [nnz * block_rows, block_cols].
    static int64_t value_rows(const Pattern& pattern) { return pattern.nnz * pattern.block_rows; }

    static cudaError_t map(DdsArguments& arguments, const Problem& problem) {
        const int width = k_width(arguments), rows = arguments.row_width;
        const int64_t columns = problem.pattern.block_cols;
        return encode(arguments.values, Math::kMapType, problem.values.data,
                      {{columns, 1, kTransposed ? rows : width},
                       {arguments.value_rows, columns, kTransposed ? width : rows}});
    }

    // How the products read a stage.
    static Operand operand(const DdsArguments& arguments) {
        const int width = k_width(arguments), rows = arguments.row_width;
        Operand result = kTransposed ? sm90::operand(kValueBytes * rows, kStep * kValueBytes * rows)
                                     : line_operand(kValueBytes * width, kValueBytes * width * kFeatures);
        constexpr int kProduct = 32 / kValueBytes;  // of k
        for (int i = 0; i < 4; ++i) {
            const int piece = kProduct * i / width, within = kProduct * i % width;
            const int elements = kTransposed ? kProduct * i * rows : piece * width * kFeatures + within;
            result.step[i] = static_cast<uint32_t>(elements * kValueBytes / 16);
        }
        return result;
    }

    // Offset in a stage of the box of a block row of the warpgroup and a piece of k.
    __device__ static int offset(const DdsArguments& arguments, int row, int piece) {
        const int width = k_width(arguments);
        const int line = kValueBytes * (kTransposed ? arguments.row_width : width);
        return kTransposed ? (row * kStep + piece * width) * line
                           : (piece * kFeatures + row * arguments.row_block) * line;
    }

    // Corner in values of the box that begins at a feature and k of a block: outside, which reads as zero,
    // if there is no block.
    __device__ static int2 corner(const DdsArguments& arguments, int slot, int feature, int k) {
        const int block = kTransposed ? arguments.k_block : arguments.row_block;
        const int first = slot < 0 ? static_cast<int>(arguments.value_rows) : slot * block;
        return make_int2(kTransposed ? feature : k, first + (kTransposed ? k : feature));
    }

    // One thread: the box at an offset in a stage.
    __device__ static void load(const DdsArguments& arguments, const Barrier& full, Multicast to, char* stage,
                                int offset, int2 corner) {
        load_box(&arguments.values, full, to, stage + offset, corner.x, corner.y);
    }

    // Starts the products of a step, sums (+)= weight tokens. `tokens`: where their operand is.
    template <bool kRowMajorTokens, int kTokens, class Sum, int kSums>
    __device__ static void multiply(Sum (&sums)[kSums], const DdsArguments& arguments, const char* stage,
                                    uint32_t tokens, bool add) {
        using cute::SM90::GMMA::Major;
        using Atom = typename Math::template Atom<kTransposed ? Major::MN : Major::K,
                                                  kRowMajorTokens ? Major::K : Major::MN, kTokens>;
        multiply_step<Atom>(sums, arguments.weight, operand_address(stage), arguments.tokens_by_k, tokens,
                            add);
    }

  private:
    __host__ __device__ static int k_width(const DdsArguments& arguments) {
        return arguments.k_block < kStep ? arguments.k_block : kStep;
    }
};

}  // namespace ts::sm90
