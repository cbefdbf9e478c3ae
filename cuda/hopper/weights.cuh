// The weight of gemm.cuh by format: where its stages lie, how they are loaded, and their products.
#pragma once

#include <cudaTypedefs.h>
#include <cute/arch/mma_sm90_gmma_sparse.hpp>

#include <algorithm>
#include <climits>

#include "common/plan_view.cuh"
#include "common/problem.h"
#include "common/weight.h"
#include "hopper/atoms.cuh"
#include "hopper/select.h"
#include "tma/groups.cuh"
#include "tma/ring.cuh"
#include "tma/schedule.cuh"
#include "tma/tensor_map.h"

namespace ts::sm90 {

// Arguments of every dds kernel, and its view of the plan.

struct DdsArguments {
    // Left empty where nothing is read through them. Those of activations and results are row-major
    // [tokens][features], else [features][tokens].
    CUtensorMap input;       // of dds_kernel, column-major: [tokens / 64][k][64]
    CUtensorMap input_tail;  // column-major: the tokens that do not fill 64
    CUtensorMap values;      // [nnz * block_rows][block_cols]
    CUtensorMap output;
    CUtensorMap residual;    // or gate
    CUtensorMap scales_map;  // of x inside of the sums, [k / kScaleGroup][tokens]
    const PlanHeader* plan;
    const void* bias;
    const char* packed;  // the weight in the order of its products, for narrow blocks
    float4* partial;     // [tiles][spans][parts][kRanks][kWarpgroups] sums of parts of k, or nullptr
    int spans;           // of tokens
    ScheduleArguments schedule;
    Operand weight;  // as the products read it from shared memory
    Operand tokens_by_k;
    int tokens;
    int k_size;            // features summed over
    int row_block;         // features of a block
    int row_shift;         // their log2
    int row_width;         // features of a block in a warpgroup
    int warpgroup_rows;    // block rows in the features of a warpgroup, or 1
    int k_block;           // k of a block
    int64_t value_rows;    // lines of values; without any, nothing is loaded
    Layout output_layout;  // also the residual's
    Activation activation;
    Activation gate_activation;
    bool has_residual;
    bool gated;                // the residual is a gate
    int plan_key;              // that the plan must have
    int carried_products;      // of wgmma, with 32 kept values of k each, after which sums are carried
    const uint32_t* metadata;  // of compressed values
    const float* x_scales;     // of 8 bits, for each token
    const float* scales;       // likewise, for each feature of the output, or inside of the sums each block
    GroupArguments groups;     // of a grouped product, instead of `schedule`
    int group_rows;            // likewise, block rows of each weight
    PlanReport plan_report;
    int* pace;     // counters of a grouped product whose clusters keep at the same pace, or nullptr
    int exchange;  // 4 if two rows of the weight lie in a line, or 0: see ByteWeight
};

constexpr int kCarriedProducts = 16;  // 512 of k; see carry()

inline int carried_products(const Problem& problem) {
    return problem.precision == Precision::fast ? INT_MAX : kCarriedProducts;
}

// The CTAs of a cluster, each of which computes a tile of so many tokens and some block rows. Those of
// different tokens share the weight, those of different rows the activations.
template <int kTokenRanks_, int kRowRanks_, int kTileTokens_>
struct DdsRanks {
    static constexpr int kTokenRanks = kTokenRanks_, kRowRanks = kRowRanks_, kTileTokens = kTileTokens_;
    static constexpr int kRanks = kTokenRanks * kRowRanks;
    static constexpr uint16_t kAllRanks = (1 << kRanks) - 1;

    // A CTA's places in the cluster along the block rows and along the tokens.
    __device__ static int row_rank(int rank) { return kRowRanks > 1 ? rank : 0; }
    __device__ static int token_rank(int rank) { return kTokenRanks > 1 ? rank : 0; }
    // The place in the plan of what a CTA has of a tile or step.
    __device__ static int plan_index(int index, int rank) { return index * kRowRanks + row_rank(rank); }
    __device__ static int first_token(const Work& work, int rank) {
        return (work.span * kTokenRanks + token_rank(rank)) * kTileTokens;
    }
    __device__ static int first_token(const GroupWork& work, int rank) {
        return work.token + token_rank(rank) * kTileTokens;
    }
};

// Place of a warpgroup's sums of a part of k among the partial sums.
template <class Traits>
__device__ int64_t partial_place(const DdsArguments& arguments, const Work& work, int rank, int warpgroup) {
    const int64_t first_part =
        (int64_t{work.tile} * arguments.spans + work.span) * arguments.schedule.by_parts.divisor;
    return ((first_part + work.part) * Traits::kRanks + rank) * Traits::kWarpgroups + warpgroup;
}

// See common/plan.h. Tiles are found without waiting for the header.
struct DdsPlan : PlanView {
    bool is_own;  // the plan of this launch

    __device__ DdsPlan(const PlanHeader* header, int key) {
        read_places(header);
        tiles = reinterpret_cast<const int*>(header + 1);
        read_numbers(header);
        is_own = header->key == key;
    }
    __device__ int step() const { return pieces; }  // of aligned steps
};

// The weight formats of dds kernels (see common/weight.h), which multiply from shared memory. A stage has the
// weight of a warpgroup's features in a step of k.

// Base of formats whose products read the weight from shared memory.
struct InSharedMemory {
    static constexpr bool kInRegisters = false;
    static constexpr bool kAlongK = false;        // products read both operands along k alone
    static constexpr bool kStartsSingly = false;  // the two products of a step start one by one
    static constexpr bool kPairsRows = false;     // see ByteWeight
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

    // Lines of values are [nnz * block_rows, block_cols].
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

// The weight format of dds_nt kernels for values that are 2:4 inside their blocks (TS_STORAGE_2_4), which
// multiply by wgmma for sparse operands.

// Products of 64 x kColumns sums by 32 of k, half of them kept. `kSelector`: which threads give metadata.
template <class Math, cute::SM90::GMMA::Major kTokens, int kColumns, cute::SM90::GMMA::SparseSel kSelector>
struct SparseAtom;

#define TS_SPARSE_ATOM(math, columns, atom)                                                              \
    template <cute::SM90::GMMA::Major kTokens, cute::SM90::GMMA::SparseSel kSelector>                    \
    struct SparseAtom<math, kTokens, columns, kSelector>                                                 \
        : cute::SM90::GMMA::SPARSE::atom<cute::SM90::GMMA::Major::K, kTokens,                            \
                                         cute::SM90::GMMA::ScaleIn::One, cute::SM90::GMMA::ScaleIn::One, \
                                         kSelector> {};
TS_SPARSE_ATOM(bf16, 128, GMMA_64x128x32_F32BF16BF16_SS)
TS_SPARSE_ATOM(bf16, 256, GMMA_64x256x32_F32BF16BF16_SS)
TS_SPARSE_ATOM(f16, 128, GMMA_64x128x32_F32F16F16_SS)
TS_SPARSE_ATOM(f16, 256, GMMA_64x256x32_F32F16F16_SS)
#undef TS_SPARSE_ATOM

// A stage holds boxes of kept values as the dense format does, [pieces][kFeatures][k_width / 2], in lines of
// k_width bytes. Behind them is the metadata, [kStep / 32][kFeatures / 16] units of 16 words as they are in
// memory, where those of 32 of k of a block lie one after another.
template <class Math>
struct CompressedWeight : InSharedMemory {
    static constexpr uint32_t kStorages = bits_of(Storage::two_of_four);
    static constexpr uint32_t kDTypes = 0;
    static constexpr int kFeatures = 64;
    static constexpr int kStep = 64;
    static constexpr int kBoxBytes = kFeatures * kStep / 2 * 2;
    static constexpr int kStageBytes = kBoxBytes + kFeatures * kStep / 8;

    // As many as fit: steps are short.
    static constexpr int most_stages(int) { return INT_MAX; }

    // Lines of values are [nnz * block_rows, block_cols / 2].
    static cudaError_t map(DdsArguments& arguments, const Problem& problem) {
        arguments.metadata = problem.values.metadata;
        const int64_t columns = problem.pattern.block_cols / 2;
        return encode(
            arguments.values, problem.values.dtype, problem.values.data,
            {{columns, 1, k_width(arguments) / 2}, {arguments.value_rows, columns, arguments.row_width}});
    }

    // How the products read a stage.
    static Operand operand(const DdsArguments& arguments) {
        const int width = k_width(arguments);
        Operand result = sm90::operand(width, 0);
        for (int k32 = 0; k32 < kStep / 32; ++k32) {
            const int piece = 32 * k32 / width, within = 32 * k32 % width;
            result.step[k32] = static_cast<uint32_t>((piece * width * kFeatures + within) / 16);
        }
        return result;
    }

    // Offset in a stage of the box of a block row of the warpgroup and a piece of k.
    __device__ static int offset(const DdsArguments& arguments, int row, int piece) {
        return (piece * kFeatures + row * arguments.row_block) * k_width(arguments);
    }

    // Corner in values of the box that begins at a feature and k of a block: outside, which reads as zero,
    // if there is no block.
    __device__ static int2 corner(const DdsArguments& arguments, int slot, int feature, int k) {
        const int first = slot < 0 ? static_cast<int>(arguments.value_rows) : slot * arguments.row_block;
        return make_int2(k / 2, first + feature);
    }

    // One thread: the box at an offset in a stage, and its metadata.
    __device__ static void load(const DdsArguments& arguments, const Barrier& full, Multicast to, char* stage,
                                int offset, int2 corner) {
        load_box(&arguments.values, full, to, stage + offset, corner.x, corner.y);
        load_metadata(arguments, full, to, stage + kBoxBytes, offset >> __ffs(k_width(arguments)) - 1, corner,
                      k_width(arguments));
    }

    // Starts the products of a step, sums (+)= weight tokens. `tokens`: where their operand is.
    template <bool kRowMajorTokens, int kTokens, class Sum, int kSums>
    __device__ static void multiply(Sum (&sums)[kSums], const DdsArguments& arguments, const char* stage,
                                    uint32_t tokens, bool add) {
        using cute::SM90::GMMA::SparseSel;
        constexpr auto kMajor = kRowMajorTokens ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;
        const uint32_t metadata = reinterpret_cast<const uint32_t*>(stage + kBoxBytes)[metadata_place()];
        const uint32_t weight = operand_address(stage);
        const Operand &a = arguments.weight, &b = arguments.tokens_by_k;
        cute::warpgroup_arrive();
        wgmma<SparseAtom<Math, kMajor, kTokens, SparseSel::Zero>>(sums, a.at(weight, 0), b.at(tokens, 0), add,
                                                                  metadata);
        wgmma<SparseAtom<Math, kMajor, kTokens, SparseSel::One>>(sums, a.at(weight, 1), b.at(tokens, 2), true,
                                                                 metadata);
        cute::warpgroup_commit_batch();
    }

  protected:
    // The metadata of a box, which begins at a line of the stage and has `width` of k.
    __device__ static void load_metadata(const DdsArguments& arguments, const Barrier& full, Multicast to,
                                         char* metadata, int line, int2 corner, int width) {
        constexpr int kUnitBytes = 64, kUnits = kFeatures / 16;
        const int row_units = arguments.row_block / 16, bytes = arguments.row_width / 16 * kUnitBytes;
        const int slot = corner.y >> arguments.row_shift, feature = corner.y & arguments.row_block - 1;
        // Without a block the weight is zero, whatever is kept of it: any metadata will do.
        const bool exists = corner.y < arguments.value_rows;
        int unit = exists ? (slot * (arguments.k_block / 32) + corner.x / 16) * row_units + feature / 16 : 0;
        char* target =
            metadata + (line / kFeatures * width / 32 * kUnits + line % kFeatures / 16) * kUnitBytes;
        for (int k = 0; k < width; k += 32) {
            load_bytes(arguments.metadata + int64_t{unit} * (kUnitBytes / 4), full, to, target, bytes);
            if (exists) unit += row_units;
            target += kUnits * kUnitBytes;
        }
    }

  private:
    __host__ __device__ static int k_width(const DdsArguments& arguments) {
        return arguments.k_block < kStep ? arguments.k_block : kStep;
    }

    // The word of a thread: of each four lanes two have the metadata of the first 32 of k, two of the others.
    __device__ static int metadata_place() {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        return lane % 4 / 2 * kFeatures + warp * 16 + lane / 4 * 2 + lane % 2;
    }
};

// The weight format of dds_nt kernels for 8-bit values that are 2:4 inside their blocks.

// Products of 64 x kColumns sums by 64 of k, half of them kept. All threads give metadata.
template <class Input, int kColumns>
struct SparseByteAtom;

#define TS_SPARSE_ATOM(input, columns, ...) \
    template <>                             \
    struct SparseByteAtom<input, columns> : cute::SM90::GMMA::SPARSE::__VA_ARGS__ {};
TS_SPARSE_ATOM(int8_t, 64, GMMA_64x64x64_S32S8S8_SS_TN<>)
TS_SPARSE_ATOM(int8_t, 128, GMMA_64x128x64_S32S8S8_SS_TN<>)
TS_SPARSE_ATOM(int8_t, 256, GMMA_64x256x64_S32S8S8_SS_TN<>)
TS_SPARSE_ATOM(__nv_fp8_e4m3, 64, GMMA_64x64x64_F32E4M3E4M3_SS_TN<>)
TS_SPARSE_ATOM(__nv_fp8_e4m3, 128, GMMA_64x128x64_F32E4M3E4M3_SS_TN<>)
TS_SPARSE_ATOM(__nv_fp8_e4m3, 256, GMMA_64x256x64_F32E4M3E4M3_SS_TN<>)
#undef TS_SPARSE_ATOM

// A stage is that of CompressedWeight: boxes [pieces][kFeatures][k_width / 2], in lines of k_width / 2 bytes,
// and behind them the metadata, [kStep / 32][kFeatures / 16] units of 16 words as they are in memory. These
// have 16 of k of two features, and products want 32 of k of one: threads join halves of two words.
template <class Math>
struct CompressedByteWeight : CompressedWeight<Math> {
    using Base = CompressedWeight<Math>;
    using Base::kFeatures;
    static constexpr bool kAlongK = true;
    static constexpr bool kStartsSingly = true;
    static constexpr int kStep = 128;
    static constexpr int kStepProducts = 2;
    static constexpr int kBoxBytes = kFeatures * kStep / 2;
    static constexpr int kStageBytes = kBoxBytes + kFeatures * kStep / 8;

    // A product reads 64 of k of a token, which are one line.
    static const char* refuses(const Problem& problem) {
        constexpr int kLeastRows = 32;  // of float32 results, see FloatStaging
        if (problem.k_block() < 64) return "its blocks have 64 columns at least";
        return sizeof(typename Math::Result) == 4 && problem.row_block() < kLeastRows
                   ? "its results in float32 are of blocks with 32 rows at least"
                   : nullptr;
    }

    static cudaError_t map(DdsArguments& arguments, const Problem& problem) {
        arguments.metadata = problem.values.metadata;
        const int64_t columns = problem.pattern.block_cols / 2;
        return encode(arguments.values, Math::kMapType, problem.values.data,
                      {{columns, 1, line(arguments)}, {arguments.value_rows, columns, arguments.row_width}});
    }

    // See CompressedWeight for these.
    static Operand operand(const DdsArguments& arguments) {
        constexpr int kProduct = 32;  // bytes of a line
        const int width = line(arguments);
        Operand result = sm90::operand(width, 0);
        for (int i = 0; i < kStep / 2 / kProduct; ++i) {
            const int piece = kProduct * i / width, within = kProduct * i % width;
            result.step[i] = static_cast<uint32_t>((piece * width * kFeatures + within) / 16);
        }
        return result;
    }
    __device__ static int offset(const DdsArguments& arguments, int row, int piece) {
        return (piece * kFeatures + row * arguments.row_block) * line(arguments);
    }

    __device__ static void load(const DdsArguments& arguments, const Barrier& full, Multicast to, char* stage,
                                int offset, int2 corner) {
        load_box(&arguments.values, full, to, stage + offset, corner.x, corner.y);
        Base::load_metadata(arguments, full, to, stage + kBoxBytes, offset >> __ffs(line(arguments)) - 1,
                            corner, 2 * line(arguments));
    }

    // Products with metadata from registers, which they read while they run. That the compiler does not know,
    // and it would put other numbers there. So a product's register stays in use, as far as it can see, until
    // the metadata of the same product of the next step is put there.
    template <int kTokens>
    class Products {
      public:
        // Starts one product of a step, sums (+)= weight tokens. Of those before it only the last may be
        // under way.
        template <int kProduct, class Sum, int kSums>
        __device__ void start(Sum (&sums)[kSums], const DdsArguments& arguments, const char* stage,
                              uint32_t tokens, bool add) {
            using Atom = SparseByteAtom<typename Math::Input, kTokens>;
            const uint32_t zero = arguments.tokens >> 31;
            uint32_t& metadata = metadata_[kProduct];
            metadata = metadata & zero | metadata_of(stage + kBoxBytes, kProduct);
            cute::warpgroup_arrive();
            wgmma<Atom>(sums, arguments.weight.at(operand_address(stage), kProduct),
                        arguments.tokens_by_k.at(tokens, 2 * kProduct), add, metadata);
            cute::warpgroup_commit_batch();
        }

      private:
        uint32_t metadata_[kStepProducts] = {};
    };

  private:
    // Bytes of a line of values.
    __host__ __device__ static int line(const DdsArguments& arguments) {
        return (arguments.k_block < kStep ? arguments.k_block : kStep) / 2;
    }

    // Metadata of a thread in a product of 64 k: two of four lanes have its first 32 of k, of features g and
    // g + 8.
    __device__ static uint32_t metadata_of(const char* stage, int product) {
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const int unit = (2 * product + lane % 4 / 2) * (kFeatures / 16) + warp;
        const uint2 words = reinterpret_cast<const uint2*>(stage)[unit * 8 + lane / 4];
        return __byte_perm(words.x, words.y, lane % 2 == 0 ? 0x5410 : 0x7632);
    }
};

// The weight formats of dds kernels for 8 bits: dense blocks, which wgmma reads along k alone.

// A stage is that of DenseWeight, in lines of 16 to 128 bytes. Lines of 16 are not swizzled.
template <class Math, bool kPairsRows_ = true>
struct ByteWeight : DenseWeight<Op::dds_nt, Math> {
    using Base = DenseWeight<Op::dds_nt, Math>;
    static constexpr bool kAlongK = true;
    static constexpr bool kPairsRows = kPairsRows_;

    template <int kTokens>
    using Atom = typename Math::template ByteAtom<kTokens>;

    static const char* refuses(const Problem& problem) {
        constexpr int kLeastRows = 32;  // of float32 results, see FloatStaging
        return sizeof(typename Math::Result) == 4 && problem.row_block() < kLeastRows
                   ? "its results in float32 are of blocks with 32 rows at least"
                   : nullptr;
    }

    // Blocks with 64 of k are loaded in lines of 128 bytes, two rows in each, which takes less time. TMA
    // swizzles these by bits 7 to 9 of an address, wgmma, which reads lines of 64 bytes, by 7 and 8: bit 9
    // exchanges the rows of a line. So the last 8 of 16 rows have changed places in pairs, and their sums
    // have.
    static cudaError_t map(DdsArguments& arguments, const Problem& problem) {
        return map_rows(arguments, problem, arguments.row_width);
    }
    __device__ static int2 corner(const DdsArguments& arguments, int slot, int feature, int k) {
        const int2 corner = Base::corner(arguments, slot, feature, k);
        return kPairsRows && arguments.exchange != 0 ? make_int2(corner.x, corner.y / 2) : corner;
    }

    // Starts the products of a step, sums (+)= weight tokens. `tokens`: where their operand is.
    template <bool kRowMajorTokens, int kTokens, class Sum, int kSums>
    __device__ static void multiply(Sum (&sums)[kSums], const DdsArguments& arguments, const char* stage,
                                    uint32_t tokens, bool add) {
        static_assert(kRowMajorTokens);
        multiply_step<Atom<kTokens>>(sums, arguments.weight, operand_address(stage), arguments.tokens_by_k,
                                     tokens, add);
    }

  protected:
    // In boxes of so many rows.
    static cudaError_t map_rows(DdsArguments& arguments, const Problem& problem, int rows) {
        const int width = std::min<int>(arguments.k_block, Base::kStep);
        const int paired = kPairsRows && arguments.k_block == 64 ? 2 : 1;
        arguments.exchange = paired == 2 ? 4 : 0;
        const int64_t columns = paired * problem.pattern.block_cols;
        return encode(
            arguments.values, Math::kMapType, problem.values.data,
            {{columns, 1, paired * width}, {arguments.value_rows / paired, columns, rows / paired}});
    }
};

// The same with scales inside of the sums: a step is one block, with a scale of its own, by as many k of each
// token as have one scale.
template <class Math>
struct ScaledByteWeight : ByteWeight<Math, false> {
    static_assert(ByteWeight<Math>::kStep == kScaleGroup);

    static constexpr int most_stages(int) { return 6; }

    template <int kTokens>
    class Products : public PromotedSums<Math, ByteWeight<Math>::kFeatures * kTokens / 128> {
        using Sum = typename Math::Accumulator;
        static constexpr int kSums = ByteWeight<Math>::kFeatures * kTokens / 128;
        using PromotedSums<Math, kSums>::step_;

      public:
        // Starts the products of a step: all but the last, and the last apart.
        __device__ void start(const char* stage, const DdsArguments& arguments, uint32_t tokens) {
            using Atom = typename ByteWeight<Math>::template Atom<kTokens>;
            const uint32_t weight = operand_address(stage);
            cute::warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                wgmma<Atom>(step_, arguments.weight.at(weight, i), arguments.tokens_by_k.at(tokens, i),
                            i > 0);
                if (i >= 2) cute::warpgroup_commit_batch();
            }
        }
        // While the products are under way: the scales of the step's tokens, of which a thread has two
        // neighbours of each eight, times that of its block.
        __device__ void scale(const float (&tokens)[kTokens], float block) {
            const auto* const pairs = reinterpret_cast<const float2*>(tokens) + threadIdx.x % 4;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                const float2 pair = pairs[4 * i];
                factors_[i] = {pair.x * block, pair.y * block};
            }
        }
        __device__ void add(Sum (&sums)[kSums]) const {
#pragma unroll
            for (int i = 0; i < kSums; i += 2) {
                sums[i] = fmaf(step_[i], factors_[i / 4].x, sums[i]);
                sums[i + 1] = fmaf(step_[i + 1], factors_[i / 4].y, sums[i + 1]);
            }
        }

      private:
        static constexpr int kPairs = kTokens / 8;
        float2 factors_[kPairs];
    };
};

}  // namespace ts::sm90
