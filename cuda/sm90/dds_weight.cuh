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
    static constexpr int kResultBuffers = 3;      // of a warpgroup, at most
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
