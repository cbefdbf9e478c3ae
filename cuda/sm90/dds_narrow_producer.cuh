// The warp that loads in the dds kernel for narrow blocks.
#pragma once

#include "sm90/dds_narrow_traits.cuh"

namespace ts::sm90 {

// The warp that fills the stages.
template <class Traits, bool kRowMajorInput>
class NarrowProducer {
  public:
    __device__ NarrowProducer(const DdsArguments& arguments, typename Traits::Shared& shared,
                              const DdsPlan& plan, int rank, int first_rank, int lane)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          first_rank_(first_rank),
          lane_(lane),
          elected_(cute::elect_one_sync() != 0) {}

    __device__ void run() {
        typename Ring<Traits::Schedule::kQueue>::Position next;
        cudaGridDependencySynchronize();  // the weight is packed
        while (true) {
            const Work work = shared_.schedule.pop(next, lane_);
            if (work.tile < 0) return;
            const int token =
                Traits::first_token(work, rank_) + Traits::row_rank(rank_) * Traits::kRankTokens;
            for (int first = 0; first < work.steps; first += 32) {
                const int step = work.step + min(first + lane_, work.steps - 1);
                const int k = __ldg(plan_.k + step);
                const int* const starts = plan_.starts + Traits::plan_index(step, rank_);
                const int begin = __ldg(starts), end = __ldg(starts + 1);
                const int count = min(32, work.steps - first);
                const auto slots_of = [&](int i) {
                    if (arguments_.packed != nullptr) return 0;
                    return slot_of_lane(__shfl_sync(~0u, begin, i), __shfl_sync(~0u, end, i));
                };
                int next_slots = slots_of(0);
                for (int i = 0; i < count; ++i) {
                    const int slots = next_slots, block = __shfl_sync(~0u, begin, i);
                    next_slots = slots_of(min(i + 1, count - 1));
                    load_step(block, __shfl_sync(~0u, end, i), slots, __shfl_sync(~0u, k, i), token);
                }
            }
        }
    }

  private:
    using Position = typename Ring<Traits::kStages>::Position;

    // Slot of the lane's block, from `block` on, for blocks that are not prepacked.
    __device__ int slot_of_lane(int block, int end) const {
        return block + lane_ < end ? __ldg(plan_.slots + block + lane_) : 0;
    }

    // The blocks from `block` to `end`; `slots`: see slot_of_lane().
    __device__ void load_step(int block, int end, int slots, int k, int token) {
        const int blocks = end - block;
        reserve(blocks);
        const Barrier& full = shared_.ring.full[position_.stage];
        if (elected_) {
            shared_.first_block[position_.stage] = head_;
            full.arrive_and_expect_tx(Traits::kInputBytes + blocks * Traits::kBlockBytes);
            load_input(full, shared_.input[position_.stage], k, token);
            if (arguments_.packed != nullptr) load_packed(full, block, blocks);
        }
        __syncwarp();
        if (arguments_.packed == nullptr) load_blocks(full, block, end, slots);
        head_ += blocks;
        position_.advance();
    }

    // The CTAs of several ranks of tokens load a part each, for both.
    __device__ void load_packed(const Barrier& full, int block, int blocks) const {
        const int rank = Traits::token_rank(rank_);
        const int first = blocks * rank / Traits::kTokenRanks;
        const int count = blocks * (rank + 1) / Traits::kTokenRanks - first;
        if (count > 0)
            load_bytes(arguments_.packed + int64_t{block + first} * Traits::kBlockBytes, full,
                       shared_by(Traits::kTokenRanks), shared_.weight[head_ + first],
                       count * Traits::kBlockBytes);
    }

    // Swizzled on their way, they are as if they were packed.
    __device__ void load_blocks(const Barrier& full, int block, int end, int slots) const {
        for (int i = 0; i < end - block; ++i) {
            if (i > 0 && i % 32 == 0) slots = slot_of_lane(block + i, end);
            const int slot = __shfl_sync(~0u, slots, i % 32);
            if (elected_ && i % Traits::kTokenRanks == Traits::token_rank(rank_))
                load_box(&arguments_.values, full, shared_by(Traits::kTokenRanks), shared_.weight[head_ + i],
                         0, slot * Traits::kBlock);
        }
        __syncwarp();
    }

    // Loads the tokens from `token` on: this CTA's own, or the half of them that it loads for both.
    __device__ void load_input(const Barrier& full, char* stage, int k, int token) const {
        const Multicast to = shared_by(Traits::kRowRanks);
        const int place = Traits::row_rank(rank_) * Traits::kRankTokens;  // of these tokens in the stage
        if (kRowMajorInput) {
            for (int i = 0; i < Traits::kLines; ++i)
                load_box(&arguments_.input, full, to,
                         stage + (i * Traits::kTileTokens + place) * Traits::kLineBytes,
                         k + i * Traits::kLine, token);
        } else {
            for (int i = 0; i < Traits::kRankTokens; i += Traits::kBoxTokens)
                for (int j = 0; j < Traits::kStep; j += Traits::kLine)
                    load_box(&arguments_.input, full, to,
                             stage + ((place + i) * Traits::kStep + j * Traits::kBoxTokens) * 2, token + i,
                             k + j);
        }
    }

    // Loads that this many ranks of the cluster share go to both CTAs that have a part.
    __device__ Multicast shared_by(int ranks) const {
        return {ranks == 1 ? uint16_t{1} : static_cast<uint16_t>(Traits::kAllRanks << first_rank_)};
    }

    // Waits until a stage is free, and a place for its blocks. They do not go round the end of the memory.
    __device__ void reserve(int blocks) {
        int skipped;
        while (true) {
            if (stages_ == 0) head_ = used_ = 0;
            skipped = head_ + blocks > Traits::kBlocks ? Traits::kBlocks - head_ : 0;
            if (stages_ < Traits::kStages && used_ + skipped + blocks <= Traits::kBlocks) break;
            wait(shared_.ring.empty[oldest_.stage], oldest_.parity);
            used_ -= shared_.taken_blocks[oldest_.stage];
            oldest_.advance();
            --stages_;
        }
        if (head_ + blocks > Traits::kBlocks) head_ = 0;
        used_ += skipped + blocks;
        ++stages_;
        __syncwarp();
        if (elected_) shared_.taken_blocks[position_.stage] = skipped + blocks;
        __syncwarp();
    }

    const DdsArguments& arguments_;
    typename Traits::Shared& shared_;
    const DdsPlan& plan_;
    int rank_;        // of the two that have a part
    int first_rank_;  // of them in the cluster
    int lane_;
    bool elected_;  // the one lane that starts copies, from values that all lanes have
    Position position_;
    Position oldest_;  // of the stages in use
    int stages_ = 0;   // in use
    int head_ = 0;     // where blocks go next
    int used_ = 0;     // places in use or skipped
};

}  // namespace ts::sm90
