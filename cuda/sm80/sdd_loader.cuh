// Which tiles and tokens a CTA of an sdd kernel walks, and how the operands of a step come into the ring.
#pragma once

#include "common/plan_view.cuh"
#include "common/token_groups.h"
#include "sm80/sdd_traits.cuh"

namespace ts::sm80 {

// A tile and the tokens to sum over.
struct SddWork {
    int tile;
    int part;
    int first_token;
    int last_token;
    int first_row;  // block row at which y begins: that of the group
};

// All tiles of one part come before the next; of grouped products there is one, and tokens are the group's.
template <bool kGrouped>
__device__ inline SddWork sdd_work(const SddArguments& arguments, const PlanView& plan, int index) {
    if constexpr (kGrouped) {
        const int group = max(__ldg(plan.rows + index * plan.group_rows), 0) / arguments.group_rows;
        const TokenGroups groups{arguments.offsets, arguments.groups, arguments.tokens};
        const TokenSpan span = groups.span(group);
        return {index, 0, span.first, span.last, group * arguments.group_rows};
    } else {
        const int tile = index % plan.tile_count, part = index / plan.tile_count;
        const int first = min(part * arguments.part_tokens, arguments.tokens);
        return {tile, part, first, min(first + arguments.part_tokens, arguments.tokens), 0};
    }
}

// One thread's share in copying one operand: its chunk of 16 bytes in a line is fixed, the lines are
// kLinesAtOnce apart.
template <class Tile, class Input, bool kRowMajor, int kThreads>
class SddOperand {
    static constexpr int kChunk = Tile::kChunk;
    using Share = Shares<Tile, kThreads>;
    static constexpr int kLinesAtOnce = Share::kLinesAtOnce;
    static constexpr int kOwnLines = Share::kOwnLines;
    // Row-major: lines are tokens, and each panel's chunk lies in some block.
    // Column-major: lines are features, and each lies in some block.
    static constexpr int kOwnFeatures = kRowMajor ? Share::kOwnPanels : kOwnLines;

  public:
    __device__ SddOperand(const void* data, int64_t ld)
        : data_(static_cast<const Input*>(data)),
          ld_(ld),
          line_(Share::line()),
          chunk_(threadIdx.x % kChunksPerLine) {}

    // `first` gives the first feature of each block of a tile, -1 where there is none.
    template <class First>
    __device__ void begin(int block_shift, First first) {
#pragma unroll
        for (int i = 0; i < kOwnFeatures; ++i) {
            const int within =
                kRowMajor ? panel_at(i) * Tile::kPanelExtent + chunk_ * kChunk : i * kLinesAtOnce + line_;
            const int start = first(within >> block_shift);
            features_[i] = start < 0 ? -1 : start + (within & ((1 << block_shift) - 1));
        }
    }

    // Tokens from `last` on count as zero.
    __device__ void copy(uint32_t tile, int token, int last) const {
        if constexpr (kRowMajor) {
#pragma unroll
            for (int i = 0; i < kOwnLines; ++i) {
                const int line = line_ + i * kLinesAtOnce;
                const bool inside = token + line < last;
                const Input* source = data_ + (inside ? token + line : 0) * ld_;
#pragma unroll
                for (int panel = 0; panel < Share::kOwnPanels; ++panel)
                    copy_async_if(features_[panel] >= 0,
                                  tile + panel_at(panel) * Tile::kPanelBytes + Tile::offset(line, chunk_),
                                  source + features_[panel], inside ? kChunkBytes : 0);
            }
        } else {
            const int first = token + chunk_ * kChunk;
            const int valid = min(max(last - first, 0), kChunk);
#pragma unroll
            for (int i = 0; i < kOwnFeatures; ++i)
                copy_async_if(features_[i] >= 0, tile + Tile::offset(line_ + i * kLinesAtOnce, chunk_),
                              data_ + features_[i] * ld_ + (valid > 0 ? first : 0),
                              valid * static_cast<int>(sizeof(Input)));
        }
    }

  private:
    __device__ static int panel_at(int i) { return Share::panel() + i * Share::kPanelsAtOnce; }

    const Input* data_;
    int64_t ld_;
    int line_, chunk_;
    int features_[kOwnFeatures];
};

// Fills the ring, walking the steps of all tiles of this CTA.
template <class Traits, bool kRowMajorY, bool kRowMajorX, bool kGrouped>
class SddLoader {
    using Input = typename Traits::Input;

  public:
    __device__ SddLoader(const SddArguments& arguments, const PlanView& plan, const Ring& ring,
                         uint32_t stages)
        : arguments_(arguments),
          plan_(plan),
          ring_(ring),
          stages_(stages),
          index_(blockIdx.x),
          y_(arguments.y, arguments.y_ld),
          x_(arguments.x, arguments.x_ld) {
        find_step();
    }

    // Starts the copies of the next step, if there is one, as soon as its stage is free.
    __device__ void load() {
        if (token_ >= last_token_) return;
        ring_.empty(position_.stage).wait(position_.parity ^ 1);
        const uint32_t stage = stages_ + position_.stage * Traits::kStageBytes;
        y_.copy(stage, token_, last_token_);
        x_.copy(stage + Traits::kYBytes, token_, last_token_);
        ring_.full(position_.stage).arrive_after_copies();
        position_.advance(ring_.stages());
        token_ += Traits::kStep;
        if (token_ < last_token_) return;
        index_ += gridDim.x;
        find_step();
    }

  private:
    // The first step from the tile `index_` on; a part can have no tokens.
    __device__ void find_step() {
        token_ = last_token_ = 0;
        for (; index_ < plan_.tile_count * arguments_.parts; index_ += gridDim.x) {
            const SddWork work = sdd_work<kGrouped>(arguments_, plan_, index_);
            token_ = work.first_token;
            last_token_ = work.last_token;
            if (token_ >= last_token_) continue;
            const int* rows = plan_.rows + work.tile * plan_.group_rows;
            const int* k = plan_.k + work.tile * plan_.pieces;
            const int row_shift = arguments_.row_shift;
            y_.begin(row_shift, [&](int in_group) {
                const int row = __ldg(rows + in_group);
                return row < 0 ? -1 : row - work.first_row << row_shift;
            });
            x_.begin(arguments_.col_shift, [&](int piece) { return __ldg(k + piece); });
            return;
        }
    }

    const SddArguments& arguments_;
    const PlanView& plan_;
    const Ring& ring_;
    uint32_t stages_;
    RingPosition position_;
    int index_, token_, last_token_;
    SddOperand<typename Traits::template YTile<kRowMajorY>, Input, kRowMajorY, Traits::kThreads> y_;
    SddOperand<typename Traits::template XTile<kRowMajorX>, Input, kRowMajorX, Traits::kThreads> x_;
};

}  // namespace ts::sm80
