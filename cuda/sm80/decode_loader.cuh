// How the operands of a team come into its ring.
#pragma once

#include "sm80/async.cuh"
#include "sm80/decode_arguments.cuh"

namespace ts::sm80 {

template <int kPending>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Copies the slices of a team's share of a block row into its ring, one after another.
template <class Traits>
class DecodeLoader {
    using Lines = typename Traits::Lines;
    static constexpr int kChunks = Traits::kChunks, kCopyLines = Lines::kCopyLines;
    static constexpr int kBatch = 32;  // entries: one a lane

  public:
    __device__ DecodeLoader(const DecodeArguments& arguments, int feature, int token, int team, int teams,
                            uint32_t ring, int thread)
        : arguments_(arguments),
          tokens_(arguments.tokens - token),
          lane_(thread % 32),
          line_(thread / kChunks),
          weight_(arguments, feature, thread, Lines::offset(line_, thread % kChunks)) {
        const int row = feature >> arguments.row_shift, k_shift = Traits::Weight::k_shift(arguments);
        const int first = __ldg(arguments.rows.ptr + row);
        last_entry_ = __ldg(arguments.rows.ptr + row + 1);
        const uint32_t k = static_cast<uint32_t>(last_entry_ - first) << k_shift;
        const int slices = (k + Traits::kSlice - 1) / Traits::kSlice;
        slice_ = slices * team / teams;
        last_slice_ = slices * (team + 1) / teams;
        entry_ = batch_ = first + (slice_ * Traits::kSlice >> k_shift);
        current_ = fetch(batch_);
        next_ = fetch(batch_ + kBatch);

        const int chunk = thread % kChunks;
        input_ =
            static_cast<const char*>(arguments.input) + (token + line_) * arguments.input_ld + chunk * 16;
        stage_ = ring + Lines::offset(line_, chunk);
        if constexpr (Traits::Weight::kFewBytes) {
            input_ = kept(input_);
            stage_ = kept(stage_);
            line_ = kept(line_);
            tokens_ = kept(tokens_);
        }
        first_stage_ = stage_;
    }

    __device__ int slices() const { return last_slice_ - slice_; }

    // Starts the copies of the next slice, if there is one. wait_for_copies counts them as one.
    __device__ void load() {
        if (slice_ < last_slice_) copy_slice();
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

  private:
    static constexpr int kElement = sizeof(typename Traits::Input);

    __device__ void copy_slice() {
        const int k_shift = Traits::Weight::k_shift(arguments_);
        const int k =
            Traits::kBlocks == 1 ? slice_ * Traits::kSlice & ((1 << k_shift) - 1) : 0;  // in the block
#pragma unroll
        for (int j = 0; j < Traits::kBlocks; ++j) copy_block(j, k);
        ++slice_;
        stage_ += Traits::kStageBytes;
        if (stage_ == first_stage_ + Traits::kRingBytes) stage_ = first_stage_;
        if (Traits::kBlocks > 1 || k + Traits::kSlice == 1 << k_shift) entry_ += Traits::kBlocks;
        if (entry_ - batch_ < kBatch) return;
        batch_ += kBatch;
        current_ = next_;
        next_ = fetch(batch_ + kBatch);
    }

    // The j-th block of the slice; zeros past the row's last one.
    __device__ void copy_block(int j, int k) {
        const int from = entry_ + j - batch_;
        const int64_t col = __shfl_sync(~0u, current_.x, from), slot = __shfl_sync(~0u, current_.y, from);
        const int bytes = entry_ + j < last_entry_ ? 16 : 0;
        weight_.copy(stage_, j, slot, k, bytes);
        const char* x = input_ + ((col << Traits::Weight::k_shift(arguments_)) + k) * kElement;
        const uint32_t target = stage_ + Traits::Weight::kBytes + j * Traits::kTokens * Lines::kBytes;
#pragma unroll
        for (int i = 0; i < (Traits::kTokens + kCopyLines - 1) / kCopyLines; ++i)
            copy_async_if(line_ + i * kCopyLines < tokens_, (target ^ Lines::swap(i)) + i * Lines::kCopyBytes,
                          x + i * kCopyLines * arguments_.input_ld, bytes);
    }

    // A lane's column and slot of a batch.
    __device__ int2 fetch(int batch) const {
        const int entry = batch + lane_;
        if (entry >= last_entry_) return {0, 0};
        return {__ldg(arguments_.rows.idx + entry), __ldg(arguments_.rows.slot + entry)};
    }

    const DecodeArguments& arguments_;
    int tokens_;  // from the CTA's first on
    const int lane_;
    int line_;  // of the tokens copied at a time, the one of which this thread copies a chunk
    const typename Traits::Weight::template Loader<32 * Traits::kTeam> weight_;
    int slice_, last_slice_;
    int entry_, last_entry_;
    int batch_;  // first entry of the current batch
    int2 current_, next_;
    const char* input_;
    uint32_t stage_, first_stage_;  // where the thread's chunk of the first of its lines of tokens goes
};

}  // namespace ts::sm80
