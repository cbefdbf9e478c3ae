// The weight formats of dds kernels (see common/weight.h). A stage has the weight of a tile's features in a
// step of k.
#pragma once

#include "common/plan_view.cuh"
#include "common/weight.h"
#include "sm80/dds_arguments.cuh"
#include "sm80/tile.cuh"

namespace ts::sm80 {

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

}  // namespace ts::sm80
