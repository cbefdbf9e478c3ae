// The warpgroups that multiply in the dds kernel for narrow blocks.
#pragma once

#include "sm90/dds_epilogue.cuh"
#include "sm90/dds_narrow_traits.cuh"
#include "sm90/dds_split.cuh"
#include "tma/partial_sums.cuh"

namespace ts::sm90 {

// One warpgroup's products of all its tiles.
template <class Traits, bool kRowMajorInput>
class NarrowConsumer {
    using Sum = typename Traits::Accumulator;

  public:
    __device__ NarrowConsumer(const DdsArguments& arguments, typename Traits::Shared& shared,
                              const DdsPlan& plan, int rank, int first_rank, int warp, int lane)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          first_rank_(first_rank),
          warpgroup_(warp / 4),
          warp_(warp % 4),
          lane_(lane),
          place_(Weight::first_place(warp_ * Traits::kWarpFeatures % Traits::kBlock, lane)) {}

    __device__ void run() {
        Epilogue epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_], warpgroup_);
        Sum sums[Traits::kSums];
        Work work = next_work(epilogue);
        epilogue.read_bias();
        while (work.tile >= 0) {
            epilogue.begin(Traits::first_token(work, rank_));
            multiply_all(sums, work);
            work = next_work(epilogue);
            epilogue.store(sums);
        }
        epilogue.finish_stores();
    }

    // Multiplies the one part of a tile that the CTA has, if the plan is the launch's.
    __device__ void run_part() {
        Epilogue epilogue(arguments_, shared_.output[warpgroup_], shared_.residual[warpgroup_], warpgroup_);
        Sum sums[Traits::kSums];
        const Work work = next_work(epilogue);
        if (work.tile < 0) {  // in all CTAs of the cluster, which take one tile
            cute::cluster_sync();
            cute::cluster_sync();
            return;
        }
        const int parts = arguments_.schedule.by_parts.divisor, adding = warpgroup_ % parts;
        if (work.part == adding) {
            epilogue.read_bias();
            epilogue.begin(Traits::first_token(work, rank_));
        }
        multiply_all(sums, work);
        cute::cluster_sync();  // nobody needs the stages any more
        const auto others = reinterpret_cast<float4*>(shared_.input);
        const int first = warpgroup_ / parts * (parts - 1);
        if (work.part != adding) {
            const int place = first + work.part - (work.part > adding);
            void* const to = __cluster_map_shared_rank(others, adding * Traits::kRanks + rank_);
            store_sums(partial_sums<Traits::kSums>(static_cast<float4*>(to), place), sums);
        }
        cute::cluster_sync();
        if (work.part == adding) {
            for (int i = 0; i < parts - 1; ++i) add(sums, partial_sums<Traits::kSums>(others, first + i));
            epilogue.store(sums);
            epilogue.finish_stores();
        }
    }

  private:
    using Weight = typename Traits::Weight;
    using Epilogue = DdsEpilogue<Traits>;
    using Atom = typename Traits::Math::template RegisterAtom<
        kRowMajorInput ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN, Traits::kTileTokens>;
    static constexpr int kProduct = 32 / sizeof(typename Traits::Input);  // of k
    static constexpr int kProducts = Traits::kLine / kProduct;
    static constexpr int kBlockProducts = Traits::kBlock / kProduct;
    static constexpr bool kSplit = Traits::kSplitsInput;  // three products for one
    // Bits of a mask before those of a product.
    static constexpr int mask_bits(int product) { return product * kProduct / 16 * 4; }
    static constexpr uint32_t kMaskOfLine = (1u << mask_bits(kProducts)) - 1;
    // Descriptor of activations as an operand, but for their address; see operand().
    static constexpr uint32_t kInput = kRowMajorInput ? 0 : Traits::kBoxTokens * Traits::kStep * 2 / 16 << 16;

    __device__ static void add(Sum (&sums)[Traits::kSums], const float4* from) {
#pragma unroll
        for (int i = 0; i < Traits::kSums / 4; ++i) add_vector(from[128 * i], sums + 4 * i);
    }

    __device__ Work next_work(Epilogue& epilogue) {
        const Work work = shared_.schedule.pop(next_, lane_);
        if (work.tile < 0) return work;
        masks_ = masks_from(work, 0);
        epilogue.prepare(Traits::rows_of(plan_, work.tile, rank_));
        return work;
    }

    // The plan's masks of the lane's step, of 32 from the tile's step `first`.
    __device__ int2 masks_from(const Work& work, int first) const {
        const int step = work.step + min(first + lane_, work.steps - 1);
        if (work.steps == 0) return {};
        const auto* const masks = reinterpret_cast<const int2*>(plan_.masks);
        return __ldg(masks + Traits::plan_index(step, rank_) * Traits::kWarpgroups + warpgroup_);
    }

    __device__ void multiply_all(Sum (&sums)[Traits::kSums], const Work& work) {
#pragma unroll
        for (int i = 0; i < Traits::kSums; ++i) sums[i] = 0;
        carried_ = false;
        carry_times_.begin(arguments_.carried_products, warpgroup_, Traits::kWarpgroups);
        for (int first = 0; first < work.steps; first += 32) {
            const int2 masks = masks_;
            masks_ = masks_from(work, first + 32);
            const int count = min(32, work.steps - first);
            for (int i = 0; i < count; ++i)
                multiply_step(sums, __shfl_sync(~0u, masks.x, i), __shfl_sync(~0u, masks.y, i));
        }
        if constexpr (Traits::kCarries)
            if (carried_)
                each_carried(sums, [](float& a, float& b, uint32_t pair) { add_carried(a, b, pair); });
    }

    // Calls visit(first sum, second sum, what is carried of both), and keeps what is carried afterwards.
    template <class Visit>
    __device__ void each_carried(Sum (&sums)[Traits::kSums], Visit visit) {
        uint4* const vectors = shared_.carried[warpgroup_][0] + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < Traits::kSums / 8; ++i) {
            uint4 vector = carried_ ? vectors[128 * i] : uint4{};
            visit(sums[8 * i], sums[8 * i + 1], vector.x);
            visit(sums[8 * i + 2], sums[8 * i + 3], vector.y);
            visit(sums[8 * i + 4], sums[8 * i + 5], vector.z);
            visit(sums[8 * i + 6], sums[8 * i + 7], vector.w);
            vectors[128 * i] = vector;
        }
    }

    // `mask`: for each 16 of k which 16 features have a block. `firsts`: the first block of each warp.
    __device__ void multiply_step(Sum (&sums)[Traits::kSums], uint32_t mask, uint32_t firsts) {
        if constexpr (Traits::kCarries) {
            // A product has a bit for each warp.
            const int products = __popc((mask | mask >> 1 | mask >> 2 | mask >> 3) & 0x01010101);
            if (carry_times_.are_due() && products > 0) {
                cute::warpgroup_wait<0>();  // none is under way, or the compiler would serialise wgmma
                const float factor = carry_times_.factor();
                each_carried(sums, [&](float& a, float& b, uint32_t& pair) { carry(a, b, pair, factor); });
                carried_ = true;
            }
            carry_times_.add(products);
        }
        shared_.ring.wait_full(position_);
        if constexpr (kSplit) wait(shared_.split[position_.stage], position_.parity);
        const uint32_t input = kInput + operand_address(shared_.input[position_.stage]);
        const uint32_t block = shared_.first_block[position_.stage] + (firsts >> 8 * warp_ & 0xff);
        uint32_t weight = place_ + block * Traits::kBlockBytes;
        constexpr uint32_t kNext =
            kRowMajorInput ? Traits::kInputBytes / Traits::kLines / 16 : Traits::kLine * 128 / 16;
        const auto multiply_lines = [&](Sum(&to)[Traits::kSums]) {
#pragma unroll
            for (int line = 0; line < Traits::kLines; ++line)
                if (const uint32_t present = mask >> mask_bits(kProducts) * line & kMaskOfLine)
                    multiply(to, present, weight, input + line * kNext);
        };
        if constexpr (Traits::Math::kAccumulation == Accumulation::promoted) {
            Sum step[Traits::kSums] = {};
            multiply_lines(step);
#pragma unroll
            for (int i = 0; i < Traits::kSums; ++i) sums[i] += step[i];
        } else {
            multiply_lines(sums);
        }
        // Every warp for itself, since without products nothing keeps them together.
        if (lane_ < Traits::kRanks) shared_.ring.empty[position_.stage].arrive(first_rank_ + lane_);
        position_.advance();
    }

    // A line of k. `weight`: where the warp's next block is.
    __device__ void multiply(Sum (&sums)[Traits::kSums], uint32_t mask, uint32_t& weight, uint32_t input) {
        WeightFragment fragments[kProducts], rests[kProducts];
        const uint32_t own = mask >> warp_;
#pragma unroll
        for (int first = 0; first < kProducts; first += kBlockProducts) {
            const bool present = own >> mask_bits(first) & 1;
#pragma unroll
            for (int i = 0; i < kBlockProducts; ++i) {
                WeightFragment& fragment = fragments[first + i];
                WeightFragment& rest = rests[first + i];
                fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0;
                if (kSplit) rest[0] = rest[1] = rest[2] = rest[3] = 0;
                if (present) {
                    Weight::read(fragment, shared_.weight[0], weight, i);
                    if constexpr (kSplit) split_operand(fragment, rest);
                }
            }
            if (present) weight += Traits::kBlockBytes;
        }
        cute::warpgroup_arrive();
#pragma unroll
        for (int first = 0; first < kProducts; first += kBlockProducts) {
            if ((mask >> mask_bits(first) & 0xf) == 0) continue;
#pragma unroll
            for (int i = first; i < first + kBlockProducts; ++i) {
                const uint64_t operand =
                    uint64_t{arguments_.tokens_by_k.high} << 32 | (input + i * (kRowMajorInput ? 2 : 128));
                if constexpr (kSplit) {  // small ones first
                    wgmma<Atom>(sums, rests[i], operand, true);
                    wgmma<Atom>(sums, fragments[i], operand + Traits::kInputBytes / 16, true);
                }
                wgmma<Atom>(sums, fragments[i], operand, true);
            }
            cute::warpgroup_commit_batch();
        }
        cute::warpgroup_wait<0>();
    }

    const DdsArguments& arguments_;
    typename Traits::Shared& shared_;
    const DdsPlan& plan_;
    int rank_;
    int first_rank_;
    int warpgroup_;
    int warp_;
    int lane_;
    uint32_t place_;  // see Weight::first_place()
    typename Ring<Traits::Schedule::kQueue>::Position next_;
    int2 masks_ = {};  // what the plan says of the lane's step of the next tile
    typename Ring<Traits::kStages>::Position position_;
    bool carried_ = false;  // some of the sums
    CarryTimes carry_times_;
};

}  // namespace ts::sm90
