// The weight of gemm.cuh by format: how its parts are loaded and read.
#pragma once

#include "ampere/math.cuh"
#include "ampere/tile.cuh"
#include "common/launch.cuh"
#include "common/plan.h"
#include "common/plan_view.cuh"
#include "common/problem.h"
#include "common/weight.h"

namespace ts::sm80 {

// Arguments of every dds kernel.

struct DdsArguments {
    const void* input;
    uint32_t input_ld;  // in chunks of 16 bytes
    void* output;
    int64_t output_ld;
    const void* values;
    const void* bias;
    const void* residual;  // or gate, in the output's layout
    int64_t residual_ld;
    const PlanHeader* plan;
    Layout output_layout;
    Activation activation;
    Activation gate_activation;
    bool gated;
    int tokens;
    int row_tiles;
    int row_shift;  // log2 of the features of a block
    int k_shift;    // log2 of the k of a block
    int stages;
    int lookahead;  // steps whose copies are under way while one is multiplied
    int plan_key;   // that the plan must have
    const uint32_t* metadata;
    const float* scales;    // of each feature, and
    const float* x_scales;  // of each token, of factors in 8 bits; or inside of the sums of each block, and
    int64_t x_scales_ld;    // of each kScaleGroup of k of a token, [k / kScaleGroup][x_scales_ld]
    // Grouped products:
    const int32_t* offsets;
    int groups;
    int group_features;    // of results
    int most_token_tiles;  // see most_token_tiles()
    PlanReport plan_report;
};

// The arguments that a problem gives. How x is read, and stages, are up to the launch.
inline DdsArguments arguments_of(const Problem& problem, const PlanShape& plan, int64_t row_tiles,
                                 int64_t token_tiles) {
    const Matrix& output = problem.output();
    DdsArguments arguments{};
    arguments.output = output.data;
    arguments.output_ld = output.ld;
    arguments.values = problem.values.data;
    arguments.bias = problem.bias;
    arguments.residual = problem.residual.data;
    arguments.residual_ld = problem.residual.ld;
    arguments.plan = static_cast<const PlanHeader*>(problem.plan);
    arguments.output_layout = output.layout;
    arguments.activation = problem.activation;
    arguments.gate_activation = problem.gate_activation;
    arguments.gated = problem.gated;
    arguments.tokens = static_cast<int>(problem.tokens);
    arguments.row_tiles = static_cast<int>(row_tiles);
    arguments.row_shift = log2_of_block(problem.row_block());
    arguments.k_shift = log2_of_block(problem.k_block());
    arguments.plan_key = plan_key(problem.pattern, problem.op, plan);
    arguments.metadata = problem.values.metadata;
    arguments.scales = problem.values.scales;
    arguments.x_scales = problem.x_scales;
    arguments.x_scales_ld = problem.x_scales_ld;
    arguments.offsets = problem.offsets;
    arguments.groups = problem.pattern.groups;
    arguments.group_features = static_cast<int>(problem.features());
    arguments.most_token_tiles = static_cast<int>(token_tiles);
    arguments.plan_report = problem.plan_report;
    return arguments;
}

// The weight formats of dds kernels (see common/weight.h). A stage has the weight of a tile's features in a
// step of k.

// A stage is a Tile, of lines of 128 bytes: dds_nt [kFeatures][kStep of k], as blocks are; dds_nn
// [panels][kStep of k][kFeatures / panels], as blocks are, of which warps read fragments transposed.
template <Op kOp, class Math, int kFeatures_>
struct DenseWeight : DenseStorage {
    using Value = typename Math::Value;
    static constexpr bool kTransposed = kOp == Op::dds_nn;
    static constexpr int kFeatures = kFeatures_;
    using Tile = sm80::Tile<Value, kFeatures, !kTransposed>;
    static constexpr int kBytes = Tile::kBytes;
    static constexpr bool kMayShareQuarters = Tile::kStep / kQuarters > 16;  // smaller blocks than a quarter

    // Order of products: tokens are their rows and features their columns.
    static constexpr bool kSumsByToken = true;
    static constexpr int kLoaderWarps = 0;
    template <int kTokenTiles, int kFeatureTiles>
    using Sums = Accumulators<typename Math::Accumulator, kTokenTiles, kFeatureTiles>;
    template <class InputTile, int kTiles>
    using InputReader = sm80::Reader<InputTile, typename Math::Input, Side::a, kTiles>;
    template <int kTiles>
    using Reader = sm80::Reader<Tile, Value, Side::b, kTiles>;

    // Adds the products of one step, see multiply_step, of an input and a weight in shared memory.
    template <class Sums, class InputReader, class Reader, class Release>
    __device__ static void multiply(Sums& sums, const InputReader& read_input, uint32_t input,
                                    const Reader& read_weight, uint32_t weight, uint32_t present,
                                    Release release) {
        multiply_step<Math>(sums, read_input, input, read_weight, weight, present, release);
    }

    template <int kThreads>
    class Loader;
};

// One thread's share in copying: its chunk of 16 bytes in a line is fixed, the lines are kLinesAtOnce apart.
// Offsets are in chunks, so that 32 bits reach 64 GiB.
template <Op kOp, class Math, int kFeatures_>
template <int kThreads>
class DenseWeight<kOp, Math, kFeatures_>::Loader {
    static constexpr int kChunk = Tile::kChunk;
    using Share = Shares<Tile, kThreads>;
    static constexpr int kLinesAtOnce = Share::kLinesAtOnce;
    static constexpr int kOwnLines = Share::kOwnLines;
    static constexpr int kPanels = Share::kOwnPanels;
    static constexpr int kStepShift = log2_of(Tile::kStep);

  public:
    __device__ Loader(const DdsArguments& arguments, const PlanView& plan)
        : arguments_(arguments),
          plan_(plan),
          line_(Share::line()),
          chunk_(threadIdx.x % kChunksPerLine),
          piece_shift_(min(arguments.k_shift, kStepShift)) {
        const int row_mask = (1 << arguments.row_shift) - 1;
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i) {
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const int line = line_ + i * kLinesAtOnce;
                const int feature =
                    kTransposed ? panel_at(panel) * Tile::kPanelExtent + chunk_ * kChunk : line;
                const int k = kTransposed ? line : chunk_ * kChunk;
                slot_index_[i][panel] =
                    (k >> piece_shift_) * plan.group_rows + (feature >> arguments.row_shift);
                feature_offset_[i][panel] =
                    (feature & row_mask) * (kTransposed ? 1 : 1 << arguments.k_shift) / kChunk;
            }
        }
    }

    // Reads where the weight of a step lies.
    __device__ void fetch(int step) {
        const int* k = plan_.k + step * plan_.pieces;
        const int* slots = plan_.slots + step * plan_.pieces * plan_.group_rows;
#pragma unroll
        for (int i = 0; i < kKs; ++i) k_[i] = __ldg(k + (own_k(i) >> piece_shift_));
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i)
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel)
                slots_[i][panel] = __ldg(slots + slot_index_[i][panel]);
    }

    // Starts the copies of that step.
    __device__ void copy(uint32_t tile) const {
        const int k_mask = (1 << arguments_.k_shift) - 1;
        const uint32_t block_chunks = (1 << arguments_.row_shift + arguments_.k_shift) / kChunk;
        const uint32_t target = tile + Tile::offset(line_, chunk_);
        const bool fills = kMayShareQuarters && 1 << arguments_.k_shift < Tile::kStep / kQuarters;
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i) {
            const int at = kTransposed ? i : 0;
            const int k = k_[at] + (own_k(at) & (1 << piece_shift_) - 1) & k_mask;
            const int k_offset = (kTransposed ? k << arguments_.row_shift : k) / kChunk;
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const bool exists = slots_[i][panel] >= 0;
                const int slot = kMayShareQuarters ? max(slots_[i][panel], 0) : slots_[i][panel];
                const uint32_t chunk = slot * block_chunks + feature_offset_[i][panel] + k_offset;
                copy_async_if(exists || fills,
                              target + panel_at(panel) * Tile::kPanelBytes + i * kLinesAtOnce * kLineBytes,
                              static_cast<const char*>(arguments_.values) + uint64_t{chunk} * kChunkBytes,
                              kMayShareQuarters && !exists ? 0 : kChunkBytes);
            }
        }
    }

  private:
    static constexpr int kKs = kTransposed ? kOwnLines : 1;  // of k in a thread's share, each of one piece

    __device__ static int panel_at(int i) { return Share::panel() + i * Share::kPanelsAtOnce; }

    // k in the step: of a line where lines run along k, otherwise of the thread's chunk.
    __device__ int own_k(int i) const { return kTransposed ? line_ + i * kLinesAtOnce : chunk_ * kChunk; }

    const DdsArguments& arguments_;
    const PlanView& plan_;
    int line_, chunk_;
    int piece_shift_;  // log2 of the k that one piece contributes to a step
    int slot_index_[kOwnLines][kPanels];
    int feature_offset_[kOwnLines][kPanels];
    // The next step, -1 where there is none:
    int k_[kKs];  // of the pieces in which the thread's chunk or lines lie
    int slots_[kOwnLines][kPanels];
};

// The weight format of dds_nt kernels for values of which two of four neighbours are kept, TS_STORAGE_2_4.

// Holds on to a number that would otherwise be worked out anew in each step, as it follows from the thread
// alone.
__device__ inline void keep(uint32_t& number) { asm volatile("" : "+r"(number)); }

// A stage has the kept values [kFeatures][kStep / 2 of k], two features to a line of 128 bytes, and behind
// them the metadata of 16 features by 32 of k at a time [kFeatures / 16][kStep / 32][16 words].
//
// The sparse operand of a product is its first, so its rows are features and its columns tokens.
template <Op kOp, class Math, int kFeatures_>
struct CompressedWeight {
    static_assert(kOp == Op::dds_nt,
                  "products with the transposed weight have compressed values of their own");
    static_assert(sizeof(typename Math::Value) == 2);
    static constexpr uint32_t kStorages = 1u << static_cast<int>(Storage::two_of_four);
    static constexpr uint32_t kDTypes = 0;
    static constexpr int kFeatures = kFeatures_;
    static constexpr bool kSumsByToken = false;
    static constexpr bool kMayShareQuarters = false;
    static constexpr int kLoaderWarps = 4;
    using Lines = Tile<typename Math::Value, kFeatures / 2, true>;
    static constexpr int kUnitBytes = 64;               // of the metadata of 16 features by 32 of k
    static constexpr int kRowsBytes = 2 * kUnitBytes;   // of that of 16 features
    static constexpr int kChunks = kChunksPerLine / 2;  // of a feature's values
    static constexpr int kBytes = Lines::kBytes + kFeatures / 16 * kRowsBytes;

    // Offset of a feature's chunk, which has the kept ones of 16 of k.
    __device__ static uint32_t offset(int feature, int chunk) {
        return Lines::offset(feature / 2, feature % 2 * kChunks + chunk);
    }

    template <int kTokenTiles, int kFeatureTiles>
    using Sums = Accumulators<typename Math::Accumulator, kFeatureTiles, kTokenTiles>;
    template <class InputTile, int kTiles>
    class InputReader;
    template <int kTiles>
    class Reader;

    // Adds the products of one step of an input and a weight in shared memory. `present` has bit 4 * tile +
    // quarter for each 16 features and quarter of the step; blocks are at least two quarters wide. `ask` is
    // called where what it asks for arrives before the last product. Metadata is loaded behind the branch,
    // which would wait for it.
    template <class Sum, int kFeatureTiles, int kTokenTiles, class InputReader, class Ask>
    __device__ static void multiply(Accumulators<Sum, kFeatureTiles, kTokenTiles>& sums,
                                    const InputReader& read_input, uint32_t input,
                                    const Reader<kFeatureTiles>& read_weight, uint32_t weight,
                                    uint32_t present, Ask ask) {
        if (present == 0) return ask();
        uint32_t metadata[kFeatureTiles];
        const auto nothing = [] {};
        if (present == kAllPresent<kFeatureTiles>) {
            read_weight.load_metadata(metadata, weight);
            multiply_half<true, 0>(sums, read_input, input, read_weight, weight, metadata, 0, nothing);
            multiply_half<true, 1>(sums, read_input, input, read_weight, weight, metadata, 0, ask);
        } else {
            read_weight.load_metadata(metadata, weight);
            ask();
            constexpr uint32_t kQuarter = kAllPresent<kFeatureTiles> & 0x11111111u;
            if (present & kQuarter)
                multiply_half<false, 0>(sums, read_input, input, read_weight, weight, metadata, present,
                                        nothing);
            if (present >> 2 & kQuarter)
                multiply_half<false, 1>(sums, read_input, input, read_weight, weight, metadata, present >> 2,
                                        nothing);
        }
    }

    template <int kThreads>
    class Loader;

  private:
    // For the tiles of 16 features whose bit 4 * tile is set in `present`. `ask` is called behind all that is
    // read.
    template <bool kAll, int kHalf, class Sum, int kFeatureTiles, int kTokenTiles, class InputReader,
              class Ask>
    __device__ static void multiply_half(Accumulators<Sum, kFeatureTiles, kTokenTiles>& sums,
                                         const InputReader& read_input, uint32_t input,
                                         const Reader<kFeatureTiles>& read_weight, uint32_t weight,
                                         const uint32_t (&metadata)[kFeatureTiles], uint32_t present,
                                         Ask ask) {
        Fragment<4> b[2 * kTokenTiles];
#pragma unroll
        for (int n = 0; n < 2 * kTokenTiles; ++n) b[n] = read_input.load(input, n, kHalf);
#pragma unroll
        for (int m = 0; m < kFeatureTiles; ++m) {
            if (!kAll && !(present >> 4 * m & 1)) continue;
            const Fragment<4> a = read_weight.load_values(weight, m, kHalf);
            if (m == kFeatureTiles - 1) ask();
#pragma unroll
            for (int n = 0; n < 2 * kTokenTiles; ++n)
                multiply_add_sparse<Math, kHalf>(sums[m][n / 2][n % 2], a, b[n], metadata[m]);
        }
    }
};

// Reads a warp's fragments of the input, kTiles of 16 tokens. One has 8 tokens and half a step of k, in the
// registers that a product takes.
template <Op kOp, class Math, int kFeatures_>
template <class InputTile, int kTiles>
class CompressedWeight<kOp, Math, kFeatures_>::InputReader {
    static constexpr bool kContiguousK = InputTile::kIsContiguousK;
    static constexpr int kHalfStep = 32;
    static constexpr int kChunk = InputTile::kChunk;

  public:
    __device__ InputReader(int first, int lane)
        : first_chunk_(first / kChunk),
          offset_(kContiguousK ? InputTile::offset(first + lane % 8, lane / 8) : InputTile::offset(lane, 0)) {
        keep(offset_);
    }

    // The fragment of tokens 8 * i to 8 * i + 7 after the warp's first. Other chunks of a line are reached by
    // exclusive or, as the lines' permutation is one: here of the other half, there of other tokens.
    __device__ Fragment<4> load(uint32_t input, int i, int half) const {
        if constexpr (kContiguousK) {
            return load_matrices<false>((input + offset_ ^ half * kLineBytes / 2) + 8 * i * kLineBytes);
        } else {
            const uint32_t chunk = first_chunk_ + i;
            return load_matrices<true>((input + offset_ ^ chunk % kChunksPerLine * kChunkBytes) +
                                       chunk / kChunksPerLine * InputTile::kPanelBytes +
                                       half * kHalfStep * kLineBytes);
        }
    }

  private:
    uint32_t first_chunk_;  // of tokens, where they run along lines
    uint32_t offset_;
};

// Reads a warp's fragments of the weight, kTiles of 16 features.
template <Op kOp, class Math, int kFeatures_>
template <int kTiles>
class CompressedWeight<kOp, Math, kFeatures_>::Reader {
  public:
    __device__ Reader(int first, int lane)
        : values_(offset(first + lane % 16, lane / 16)),
          metadata_(Lines::kBytes + first / 16 * kRowsBytes + lane / 2 % 2 * kUnitBytes + lane / 4 * 8 +
                    lane % 2 * 4) {
        keep(values_);
        keep(metadata_);
    }

    // The kept values of features 16 * i to 16 * i + 15 after the warp's first, in a half of the step.
    __device__ Fragment<4> load_values(uint32_t weight, int i, int half) const {
        return load_matrices<false>((weight + values_ ^ 2 * half * kChunkBytes) + i * offset(16, 0));
    }

    // The lane's share of their metadata, of both halves.
    __device__ void load_metadata(uint32_t (&to)[kTiles], uint32_t weight) const {
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[i]) : "r"(weight + metadata_ + i * kRowsBytes));
    }

  private:
    uint32_t values_, metadata_;  // where the lane reads of the first 16 features
};

// One thread's share in copying: its chunk of a feature's values is fixed, the features are kFeaturesAtOnce
// apart. The first threads copy a chunk of metadata each.
template <Op kOp, class Math, int kFeatures_>
template <int kThreads>
class CompressedWeight<kOp, Math, kFeatures_>::Loader {
    static constexpr int kStepShift = 6;
    static constexpr int kFeaturesAtOnce = kThreads / kChunks;
    static constexpr int kOwnFeatures = kFeatures / kFeaturesAtOnce;
    static constexpr int kMetadataChunks = kFeatures / 16 * kRowsBytes / kChunkBytes;
    static_assert(kFeaturesAtOnce % 16 == 0 && kMetadataChunks <= kThreads);

  public:
    __device__ Loader(const DdsArguments& arguments, const PlanView& plan)
        : arguments_(arguments), plan_(plan), piece_shift_(min(arguments.k_shift, kStepShift)) {}

    // Reads where the weight of a step lies.
    __device__ void fetch(int step) {
        const int first = step * plan_.pieces, piece = first + (own_k() >> piece_shift_),
                  metadata_piece = first + (metadata_k() >> piece_shift_);
        k_ = __ldg(plan_.k + piece);
#pragma unroll
        for (int i = 0; i < kOwnFeatures; ++i) slots_[i] = slot(piece, feature(i));
        if (threadIdx.x >= kMetadataChunks) return;
        metadata_piece_k_ = __ldg(plan_.k + metadata_piece);
        metadata_slot_ = slot(metadata_piece, metadata_feature());
    }

    // Starts the copies of that step.
    __device__ void copy(uint32_t stage) const {
        const int k = in_block(k_, own_k());
        const uint32_t target = stage + offset(feature(0), chunk());
        const int block_shift = arguments_.row_shift + arguments_.k_shift - 4;
#pragma unroll
        for (int i = 0; i < kOwnFeatures; ++i) {
            const uint32_t at =
                (slots_[i] << block_shift) + ((row_in_block(feature(i)) << arguments_.k_shift) + k >> 4);
            copy_async_if(slots_[i] >= 0, target + i * offset(kFeaturesAtOnce, 0),
                          static_cast<const char*>(arguments_.values) + uint64_t{at} * kChunkBytes);
        }
        copy_metadata(stage + Lines::kBytes + threadIdx.x * kChunkBytes);
    }

  private:
    // In a block, units of 16 rows by 32 of k follow each other by rows first.
    __device__ void copy_metadata(uint32_t target) const {
        const int k = in_block(metadata_piece_k_, metadata_k());
        const int unit = (k >> 5 << arguments_.row_shift - 4) + (row_in_block(metadata_feature()) >> 4);
        const int block_shift = arguments_.row_shift + arguments_.k_shift - 7;
        const uint32_t at = (metadata_slot_ << block_shift) + unit * 4 + threadIdx.x % 4;
        copy_async_if(metadata_slot_ >= 0, target,
                      reinterpret_cast<const char*>(arguments_.metadata) + uint64_t{at} * kChunkBytes);
    }

    // Feature of the thread's i-th copy.
    __device__ static int feature(int i) { return threadIdx.x / kChunks + i * kFeaturesAtOnce; }
    __device__ static int chunk() { return threadIdx.x % kChunks; }
    __device__ static int own_k() { return chunk() * 16; }  // in the step
    __device__ static int metadata_feature() { return threadIdx.x / 8 * 16; }
    __device__ static int metadata_k() { return threadIdx.x / 4 % 2 * 32; }

    __device__ int slot(int piece, int feature) const {
        return __ldg(plan_.slots + piece * plan_.group_rows + (feature >> arguments_.row_shift));
    }
    __device__ int in_block(int piece_k, int k) const {
        return piece_k + (k & (1 << piece_shift_) - 1) & (1 << arguments_.k_shift) - 1;
    }
    __device__ int row_in_block(int feature) const { return feature & (1 << arguments_.row_shift) - 1; }

    const DdsArguments& arguments_;
    const PlanView& plan_;
    int piece_shift_;  // log2 of the k that one piece contributes to a step
    // The next step, slots -1 where there is nothing to copy:
    int k_, metadata_piece_k_ = 0;  // of the pieces in which the thread's chunks lie
    int slots_[kOwnFeatures], metadata_slot_ = -1;
};

}  // namespace ts::sm80
