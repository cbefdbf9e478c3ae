// The warp that loads in the dds kernel in float64.
#pragma once

#include "sm90/dds_f64_traits.cuh"

namespace ts::sm90 {

// Loads the activations of all steps, and tells the warps that multiply where their weight lies. Stages are
// not released one by one, since most warps need few of them: a stage is free once all warps say that they
// need later steps. Of 32 steps of a tile those come first that leave all schedulers with about as many
// blocks: warps can be no further apart than a ring, and block rows have runs of blocks and gaps.
template <Op kOp, bool kRowMajorInput, class Schedule>
class Float64Producer {
    using Tile = Float64Tile;

  public:
    __device__ Float64Producer(const Float64Arguments& arguments, const Schedule& schedule,
                               const PlanView& plan, char* stages, Float64Progress& progress)
        : arguments_(arguments),
          schedule_(schedule),
          plan_(plan),
          stages_(stages),
          progress_(progress),
          lane_(threadIdx.x % 32) {}

    __device__ void run() {
        for (int tile = blockIdx.x; tile < schedule_.size(); tile += gridDim.x) {
            const auto work = schedule_.at(tile);
            const int2 steps = plan_.tile<int2>(work.row_tile);
            for (int first = 0; first < steps.y; first += 32) {
                const int count = min(steps.y - first, 32);
                read(steps.x + first, lane_ < count);
                for (unsigned left = ~0u >> 32 - count; left != 0;) {
                    const int step = choose(left);
                    left &= ~(1u << step);
                    wait();
                    if (lane_ < Tile::kWarps)
                        progress_.weights[lane_][ring_ % 32] = progress_.candidates[lane_][step];
                    load(__shfl_sync(~0u, k_, step), work.first_token);
                    publish();
                }
            }
        }
        wait();
        if (lane_ < Tile::kWarps) progress_.weights[lane_][ring_ % 32] = kEndOfSteps;
        publish();
    }

  private:
    // Reads a step for each lane: k, and where the blocks of each warp's features lie.
    __device__ void read(int first, bool has_step) {
        const sm80::DdsArguments& own = arguments_.dds;
        const int* const slots = plan_.slots + (first + lane_) * plan_.group_rows;
        k_ = has_step ? __ldg(plan_.k + first + lane_) : 0;
        const int k = k_ & (1 << own.k_shift) - 1;
        blocks_ = 0;
#pragma unroll 4
        for (int i = 0; i < Tile::kWarps; ++i) {
            const int slot = has_step ? __ldg(slots + (16 * i >> own.row_shift)) : -1;
            const int feature = 16 * i & (1 << own.row_shift) - 1;
            const int within = kOp == Op::dds_nn ? k << own.row_shift | feature : feature << own.k_shift | k;
            const uint32_t at = (static_cast<uint32_t>(slot) << own.row_shift + own.k_shift - 1) + within / 2;
            progress_.candidates[i][lane_] = slot < 0 ? kNoWeight : at;
            if (slot >= 0) blocks_ += 1u << i % 4 * 8;
        }
        __syncwarp();
    }

    // The number of blocks of the scheduler that has most of them, less that of the one with the fewest.
    __device__ static unsigned difference(unsigned blocks) {
        const unsigned a = blocks & 0xff, b = blocks >> 8 & 0xff, c = blocks >> 16 & 0xff, d = blocks >> 24;
        return max(max(a, b), max(c, d)) - min(min(a, b), min(c, d));
    }

    __device__ int choose(unsigned left) {
        const unsigned own = left >> lane_ & 1 ? difference(all_blocks_ + blocks_) << 5 | lane_ : ~0u;
        const int step = __reduce_min_sync(~0u, own) & 31;
        all_blocks_ += __shfl_sync(~0u, blocks_, step);
        const unsigned a = all_blocks_ & 0xff, b = all_blocks_ >> 8 & 0xff, c = all_blocks_ >> 16 & 0xff,
                       d = all_blocks_ >> 24;
        all_blocks_ = __vminu4(all_blocks_ - min(min(a, b), min(c, d)) * 0x01010101u, 0x7f7f7f7f);
        return step;
    }

    // Until the stage of the next step is free.
    __device__ void wait() {
        while (ring_ - least_ >= arguments_.dds.stages)
            least_ = __reduce_min_sync(~0u, read_now(progress_.needed[lane_ % Tile::kWarps]));
    }

    __device__ void load(int k, int first_token) {
        if (lane_ == 0) {
            tma::Barrier& full = progress_.full[stage_];
            char* const to = stages_ + stage_ * Tile::kStageBytes;
            full.arrive_and_expect_tx(Tile::kStageBytes);
            constexpr int kBoxes = kRowMajorInput ? 1 : Tile::kTokens / Tile::kLine;
#pragma unroll
            for (int i = 0; i < kBoxes; ++i) {
                const int token = first_token + i * Tile::kLine;
                cute::SM90_TMA_LOAD_2D::copy(&arguments_.input, reinterpret_cast<uint64_t*>(&full),
                                             static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                             to + i * (Tile::kStageBytes / kBoxes),
                                             2 * (kRowMajorInput ? k : token), kRowMajorInput ? token : k);
            }
        }
        if (++stage_ == arguments_.dds.stages) stage_ = 0;
    }

    __device__ void publish() {
        __syncwarp();
        ++ring_;
        if (lane_ == 0) write_now(progress_.loading, ring_);
    }

    const Float64Arguments& arguments_;
    const Schedule& schedule_;
    const PlanView& plan_;
    char* stages_;
    Float64Progress& progress_;
    int lane_;
    int ring_ = 0, stage_ = 0, least_ = 0;
    int k_ = 0;                // of the lane's step
    unsigned blocks_ = 0;      // of the lane's step, for each scheduler in 8 bits
    unsigned all_blocks_ = 0;  // of all steps so far, less those that all schedulers have
};

}  // namespace ts::sm90
