// How the operands of the steps of a dds kernel come into the ring.
#pragma once

#include <type_traits>

#include "common/plan_view.cuh"
#include "sm80/dds_schedule.cuh"
#include "sm80/dds_traits.cuh"

namespace ts::sm80 {

// One thread's share in filling the ring: of the input, its chunk of 16 bytes in a line is fixed, the lines
// are kLinesAtOnce apart; of the weight see its format. What does not depend on the step is computed once.
template <class Traits, bool kRowMajorInput, class Schedule>
class DdsLoader {
    using Input = typename Traits::Input;
    using InputTile = typename Traits::template InputTile<kRowMajorInput>;
    static constexpr int kChunk = Traits::kChunk;
    using Share = Shares<InputTile, Traits::kLoaders>;
    static constexpr int kLinesAtOnce = Share::kLinesAtOnce;
    static constexpr int kOwnLines = Share::kOwnLines;

    // One of two blocks of 16 that share a quarter of a step and its products may be missing. Its weights
    // are zeros, and the input must be, which otherwise could be NaN.
    static constexpr bool kFillsInput = Traits::Weight::kMayShareQuarters;

    // Threads that only load have the registers to keep where their lines of a tile begin.
    static constexpr bool kKeepsLines = Traits::kOnlyLoad && kRowMajorInput;
    struct KeptLines {
        int first_token = -1;
        const char* lines[kOwnLines];
    };
    struct Nothing {};

  public:
    __device__ DdsLoader(const DdsArguments& arguments, const Schedule& schedule, const PlanView& plan,
                         const Ring& ring, uint32_t stages)
        : arguments_(arguments),
          plan_(plan),
          ring_(ring),
          stages_(stages),
          cursor_(schedule, plan),
          line_(Share::line()),
          chunk_(threadIdx.x % kChunksPerLine),
          piece_shift_(min(arguments.k_shift, Traits::kStepShift)),
          weight_(arguments, plan) {
        if (!cursor_.done()) fetch();
    }

    // Starts the copies of the next step, if there is one, as soon as its stage is free.
    __device__ void load() {
        if (cursor_.done()) return;
        ring_.empty(position_.stage).wait(position_.parity ^ 1);
        const uint32_t stage = stages_ + position_.stage * Traits::kStageBytes;
        if constexpr (kRowMajorInput)
            copy_row_major(stage);
        else
            copy_column_major(stage);
        weight_.copy(stage + Traits::kInputBytes);
        ring_.full(position_.stage).arrive_after_copies();
        position_.advance(ring_.stages());
        cursor_.next();
        if (!cursor_.done()) fetch();
    }

    // Loads all steps, for a thread that does nothing else.
    __device__ void load_all() {
        while (!cursor_.done()) load();
        wait_for_copies();
    }

  private:
    // Reads where the operands of the step lie; done one step ahead, to hide its latency.
    __device__ void fetch() {
        const int* k = plan_.k + cursor_.step() * plan_.pieces;
        if constexpr (kKeepsLines) find_lines();
        if constexpr (kRowMajorInput) {
            chunk_k_ = __ldg(k + (chunk_ * kChunk >> piece_shift_));
        } else {
#pragma unroll
            for (int i = 0; i < kOwnLines; ++i)
                line_k_[i] = __ldg(k + (line_ + i * kLinesAtOnce >> piece_shift_));
        }
        weight_.fetch(cursor_.step());
    }

    // Position of this thread's chunk or line in its piece.
    __device__ int chunk_in_piece() const { return chunk_ * kChunk & ((1 << piece_shift_) - 1); }
    __device__ int line_in_piece(int i) const { return line_ + i * kLinesAtOnce & ((1 << piece_shift_) - 1); }

    // Lines beyond the last token repeat it, and those of other groups are multiplied: neither results are
    // stored.
    __device__ void copy_row_major(uint32_t tile) const {
        if constexpr (kKeepsLines) return copy_lines(tile);
        const int token = cursor_.first_token() + line_, last = arguments_.tokens - 1;
        const int first_k = kFillsInput ? max(chunk_k_, 0) : chunk_k_;  // to zeros, too, belongs an address
        const char* source = address(arguments_.input, min(token, last), arguments_.input_ld) +
                             (first_k + chunk_in_piece()) * static_cast<int>(sizeof(Input));
        const uint32_t target = tile + InputTile::offset(line_, chunk_);
        const bool exists = !kFillsInput || chunk_k_ >= 0;
        const int left = max(last - token, 0);
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i) {
            const uint32_t chunks = min(i * kLinesAtOnce, left) * kChunkBytes;
            copy_async_if(kFillsInput || chunk_k_ >= 0, target + i * kLinesAtOnce * kLineBytes,
                          source + uint64_t{chunks} * arguments_.input_ld, exists ? kChunkBytes : 0);
        }
    }

    __device__ void copy_lines(uint32_t tile) const {
        const uint32_t offset = (chunk_k_ + chunk_in_piece()) * static_cast<int>(sizeof(Input));
        const uint32_t target = tile + InputTile::offset(line_, chunk_);
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i)
            copy_async_if(chunk_k_ >= 0, target + i * kLinesAtOnce * kLineBytes, kept_.lines[i] + offset);
    }
    __device__ void find_lines() {
        if (cursor_.first_token() == kept_.first_token) return;
        kept_.first_token = cursor_.first_token();
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i) {
            const int token = min(kept_.first_token + line_ + i * kLinesAtOnce, arguments_.tokens - 1);
            kept_.lines[i] = address(arguments_.input, token, arguments_.input_ld);
        }
    }

    __device__ void copy_column_major(uint32_t tile) const {
#pragma unroll
        for (int i = 0; i < kOwnLines; ++i) {
            const char* source =
                address(arguments_.input, line_k_[i] + line_in_piece(i), arguments_.input_ld);
#pragma unroll
            for (int j = 0; j < Share::kOwnPanels; ++j) {
                const int panel = Share::panel() + j * Share::kPanelsAtOnce;
                const int within = panel * InputTile::kPanelExtent + chunk_ * kChunk;
                if (InputTile::kPanelExtent > Traits::kTileTokens && within >= Traits::kTileTokens) continue;
                const int token = cursor_.first_token() + within;
                const int bytes =
                    min(max(arguments_.tokens - token, 0), kChunk) * static_cast<int>(sizeof(Input));
                const uint32_t target = tile + panel * InputTile::kPanelBytes +
                                        InputTile::offset(line_ + i * kLinesAtOnce, chunk_);
                copy_async_if(line_k_[i] >= 0 && bytes > 0, target,
                              source + token * static_cast<int64_t>(sizeof(Input)), bytes);
            }
        }
    }

    __device__ static const char* address(const void* matrix, int line, uint32_t ld) {
        return static_cast<const char*>(matrix) + static_cast<uint64_t>(line) * ld * kChunkBytes;
    }

    const DdsArguments& arguments_;
    const PlanView& plan_;
    const Ring& ring_;
    uint32_t stages_;
    RingPosition position_;
    DdsCursor<Schedule> cursor_;
    int line_, chunk_;
    int piece_shift_;  // log2 of the k that one piece contributes to a step
    // The next step, -1 where there is none:
    int chunk_k_;  // k of the piece this thread's chunk lies in, where k runs along lines
    int line_k_[kRowMajorInput ? 1 : kOwnLines];  // k of the pieces this thread's lines lie in, where they
                                                  // run along k
    typename Traits::Weight::template Loader<Traits::kLoaders> weight_;
    std::conditional_t<kKeepsLines, KeptLines, Nothing> kept_;
};

// In the place of the loader of threads that only compute.
struct NoLoader {
    template <class... Arguments>
    __device__ explicit NoLoader(const Arguments&...) {}
    __device__ void load() const {}
};

}  // namespace ts::sm80
