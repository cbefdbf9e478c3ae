// dds for blocks of 16 x 16 and 32 x 32, in both directions:
//   nt: y[t, f] = sum over k of x[t, k] W[f, k]      nn: x[t, f] = sum over k of y[t, k] W[k, f]
// with "features" f of the result and k summed over, whichever of out and in features they are.
//
// Tokens are the rows of wgmma here, so that its columns can be as few as a row of blocks has features: 32,
// of one block row or of two that are 16 wide. Both operands come from shared memory, so that a warpgroup
// can walk a list: for each of its rows, the k at which the row has a unit, which is the row's features
// by the k of one block. A stage is 128 of k of the activations, all of them, and the units that lie there.
//
// A call first packs the units in the order in which they are multiplied, transposed where need be. A
// stage's units of one CTA are then one copy. The two CTAs of a cluster compute different features from the
// same activations, of which each loads one half for both.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/dds_narrow_epilogue.cuh"
#include "sm90/dds_narrow_pack.cuh"
#include "sm90/dds_narrow_traits.cuh"
#include "sm90/launch.cuh"
#include "sm90/tensor_map.h"

namespace ts::sm90 {

// The warp that fills the stages.
template <class Traits, bool kRowMajorInput>
class NarrowProducer {
  public:
    __device__ NarrowProducer(const NarrowArguments& arguments, typename Traits::Shared& shared,
                              const NarrowPlan& plan, int rank, int lane)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          lane_(lane),
          elected_(cute::elect_one_sync() != 0) {}

    __device__ void run() {
        typename Ring<Traits::Schedule::kQueue>::Position next;
        while (true) {
            const Work work = shared_.schedule.pop(next, lane_);
            if (work.tile < 0) return;
            const int* const starts = plan_.starts + (work.tile * Traits::kRanks + rank_) * plan_.stages;
            const int token = work.unit * Traits::kTileTokens;
            for (int first = 0; first < plan_.stages; first += 32) {
                const int begin = __ldg(starts + min(first + lane_, plan_.stages));
                const int end = __ldg(starts + min(first + lane_ + 1, plan_.stages));
                const int count = min(32, plan_.stages - first);
                for (int i = 0; i < count; ++i) {
                    const int unit = __shfl_sync(~0u, begin, i);
                    load_stage(unit, __shfl_sync(~0u, end, i) - unit, first + i, token);
                }
            }
        }
    }

  private:
    using Position = typename Ring<Traits::kStages>::Position;

    __device__ void load_stage(int unit, int units, int stage, int token) {
        reserve(units);
        const Barrier& full = shared_.ring.full[position_.stage];
        if (elected_) {
            shared_.first_unit[position_.stage] = head_;
            full.arrive_and_expect_tx(Traits::kHalves * Traits::kHalfBytes + units * Traits::kUnitBytes);
            load_input(full, shared_.input[position_.stage][rank_], stage * Traits::kStep,
                       token + rank_ * Traits::kHalfTokens);
            if (units > 0)
                cute::SM90_BULK_COPY_G2S::copy(arguments_.units + int64_t{unit} * Traits::kUnitBytes,
                                               reinterpret_cast<uint64_t*>(const_cast<Barrier*>(&full)),
                                               shared_.weight[head_], units * Traits::kUnitBytes);
        }
        __syncwarp();
        head_ += units;
        position_.advance();
    }

    // This CTA's half of the tokens, for both.
    __device__ void load_input(const Barrier& full, char* target, int k, int token) const {
        const Multicast to{Traits::kAllRanks};
        if (kRowMajorInput) {
            constexpr int kWidth = 64;  // of k, in lines of 128 bytes
            for (int i = 0; i < Traits::kStep / kWidth; ++i)
                load_box(&arguments_.input, full, to, target + i * kWidth * Traits::kHalfTokens * 2,
                         k + i * kWidth, token);
        } else {
            load_box(&arguments_.input, full, to, target, token, k);
        }
    }

    // Waits until a stage is free, and a place for its units. They do not go round the end of the memory.
    __device__ void reserve(int units) {
        int skipped;
        while (true) {
            if (stages_ == 0) head_ = used_ = 0;
            skipped = head_ + units > Traits::kUnits ? Traits::kUnits - head_ : 0;
            if (stages_ < Traits::kStages && used_ + skipped + units <= Traits::kUnits) break;
            wait(shared_.ring.empty[oldest_.stage], oldest_.parity);
            used_ -= shared_.taken_units[oldest_.stage];
            oldest_.advance();
            --stages_;
        }
        if (head_ + units > Traits::kUnits) head_ = 0;
        used_ += skipped + units;
        ++stages_;
        __syncwarp();
        if (elected_) shared_.taken_units[position_.stage] = skipped + units;
        __syncwarp();
    }

    const NarrowArguments& arguments_;
    typename Traits::Shared& shared_;
    const NarrowPlan& plan_;
    int rank_;
    int lane_;
    bool elected_;  // the one lane that starts copies, from values that all lanes have
    Position position_;
    Position oldest_;  // of the stages in use
    int stages_ = 0;   // in use
    int head_ = 0;     // where units go next
    int used_ = 0;     // units in use, and places skipped
};

// One warpgroup's products of all its tiles.
template <class Traits, bool kRowMajorInput>
class NarrowConsumer {
  public:
    using Sums = float[Traits::kRows][Traits::kHalves][Traits::kRowSums];

    __device__ NarrowConsumer(const NarrowArguments& arguments, typename Traits::Shared& shared,
                              const NarrowPlan& plan, int rank, int group)
        : arguments_(arguments),
          shared_(shared),
          plan_(plan),
          rank_(rank),
          group_(group),
          lane_(threadIdx.x % 32) {}

    __device__ void run() {
        NarrowEpilogue<Traits> epilogue(arguments_, shared_, group_);
        Sums sums;
        Work work = next_work(epilogue);
        while (work.tile >= 0) {
            epilogue.begin(work.unit * Traits::kTileTokens);
            multiply_all(sums, work);
            work = next_work(epilogue);  // while the last products are under way
            finish_products();
            epilogue.store(sums);
        }
        epilogue.finish_stores();
    }

  private:
    using Atom =
        typename NarrowAtom<typename Traits::Math,
                            kRowMajorInput ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN>::Type;
    static constexpr int kStagesAtOnce = 32 / NarrowPlan::kWords;

    // The warpgroup's number in all tiles of the plan.
    __device__ int list(const Work& work) const {
        return (work.tile * Traits::kRanks + rank_) * Traits::kGroups + group_;
    }

    __device__ Work next_work(NarrowEpilogue<Traits>& epilogue) {
        const Work work = shared_.schedule.pop(next_, lane_);
        if (work.tile < 0) return work;
        words_ = words_from(work, 0);
        epilogue.prepare(plan_.rows + list(work) * Traits::kRows * Traits::kParts);
        return work;
    }

    // The lane's word of the four stages from `stage`.
    __device__ int words_from(const Work& work, int stage) const {
        if (stage >= plan_.stages) return 0;
        return __ldg(plan_.words + (list(work) * plan_.padded_stages + stage) * NarrowPlan::kWords + lane_);
    }

    // Starts all products of a tile. The last may be under way afterwards.
    __device__ void multiply_all(Sums& sums, const Work& work) {
#pragma unroll
        for (int i = 0; i < Traits::kRows * Traits::kHalves * Traits::kRowSums; ++i)
            (&sums[0][0][0])[i] = 0.0f;
        for (int first = 0; first < plan_.stages; first += kStagesAtOnce) {
            const int words = words_;
            words_ = words_from(work, first + kStagesAtOnce);
            const int count = min(kStagesAtOnce, plan_.stages - first);
            for (int i = 0; i < count; ++i) multiply(sums, words, i * NarrowPlan::kWords);
        }
    }

    // `words`: of a stage from lane `at` on. While its products are under way the next stage is prepared, if
    // deferred: with few products it is better to give the stage back at once.
    __device__ void multiply(Sums& sums, int words, int at) {
        const int before = __shfl_sync(~0u, words, at + Traits::kRows);  // units of the other warpgroup
        uint32_t list = __shfl_sync(~0u, words, at);
        // The producer may need what the stage before has, which else is given back only when this one is
        // there.
        if (!__all_sync(~0u, shared_.ring.full[position_.stage].test_wait(position_.parity))) {
            finish_products();
            shared_.ring.wait_full(position_);
        }
        asm volatile("" ::: "memory");
        // Tells the compiler that all lanes have the same, without which it would serialise wgmma.
        const int first_unit = __shfl_sync(~0u, shared_.first_unit[position_.stage], 0);
        const uint32_t input = operand_address(shared_.input[position_.stage][0]);
        uint32_t weight =
            operand_address(shared_.weight[0]) + (first_unit + before) * (Traits::kUnitBytes / 16);
        finish_products();
        cute::warpgroup_arrive();
#pragma unroll
        for (int row = 0; row < Traits::kRows; ++row) {
            const uint32_t next_list = row + 1 < Traits::kRows ? __shfl_sync(~0u, words, at + row + 1) : 0;
            for (; list != 0; list >>= 4) {
                multiply_unit(sums[row], input + input_offset(list), weight);
                weight += Traits::kUnitBytes / 16;
            }
            list = next_list;
        }
        cute::warpgroup_commit_batch();
        multiplied_ = position_.stage;
        position_.advance();
        if (!arguments_.deferred) finish_products();
    }

    // Waits for the products under way and gives their stage back.
    __device__ void finish_products() {
        cute::warpgroup_wait<0>();  // outside of the condition, or the compiler serialises wgmma
        if (multiplied_ < 0) return;
        // Every warp for itself, since without products nothing keeps them together.
        if (lane_ < Traits::kRanks) shared_.ring.empty[multiplied_].arrive(lane_);
        multiplied_ = -1;
    }

    // Where in a half's activations the k of a list's first entry begins.
    __device__ static uint32_t input_offset(uint32_t list) {
        return kRowMajorInput ? (list & 6) + ((list & 8) << 6) : (list & 14) << 6;
    }

    __device__ void multiply_unit(float (&sums)[Traits::kHalves][Traits::kRowSums], uint32_t input,
                                  uint32_t weight) {
        constexpr int kInputStep = kRowMajorInput ? 2 : 128;
#pragma unroll
        for (int k16 = 0; k16 < Traits::kBlock / 16; ++k16)
#pragma unroll
            for (int half = 0; half < Traits::kHalves; ++half)
                fma(sums[half], descriptor(input + half * (Traits::kHalfBytes / 16) + k16 * kInputStep, 128),
                    descriptor(weight + k16 * 2, 2 * Traits::kBlock),
                    std::make_index_sequence<Traits::kRowSums>());
    }

    template <size_t... kIndex>
    __device__ static void fma(float (&sums)[Traits::kRowSums], uint64_t a, uint64_t b,
                               std::index_sequence<kIndex...>) {
        Atom::fma(a, b, sums[kIndex]..., cute::SM90::GMMA::ScaleOut::One);
    }

    // Of an operand with lines of `width` bytes, swizzled over them.
    __device__ static uint64_t descriptor(uint32_t address, uint32_t width) {
        const uint32_t layout = width == 128 ? 1 : width == 64 ? 2 : 3, eight_lines = 8 * width / 16;
        return uint64_t{eight_lines | layout << 30} << 32 | address;
    }

    const NarrowArguments& arguments_;
    typename Traits::Shared& shared_;
    const NarrowPlan& plan_;
    int rank_;
    int group_;
    int lane_;
    typename Ring<Traits::Schedule::kQueue>::Position next_;
    int words_ = 0;  // of the next stages
    typename Ring<Traits::kStages>::Position position_;
    int multiplied_ = -1;  // the stage whose products are under way
};

template <class Traits, bool kRowMajorInput>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    dds_narrow_kernel(const __grid_constant__ NarrowArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const auto rank = static_cast<int>(cute::block_rank_in_cluster());
    const NarrowPlan plan(arguments.plan);
    if (threadIdx.x == 32) prefetch(&arguments.input);
    if (threadIdx.x == 0) {
        shared.ring.init(4 * Traits::kGroups * Traits::kRanks);
        shared.schedule.init(1 + 4 * Traits::kGroups);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_sync();

    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (warp == 0)
            NarrowProducer<Traits, kRowMajorInput>(arguments, shared, plan, rank, lane).run();
        else if (warp == 1)
            shared.schedule.run(arguments.schedule, plan.tiles, blockIdx.x / Traits::kRanks,
                                gridDim.x / Traits::kRanks, lane);
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        NarrowConsumer<Traits, kRowMajorInput>(arguments, shared, plan, rank, warp / 4 - 1).run();
    }
    cute::cluster_sync();  // the other CTA may still write here
}

// Host side: one row of the registry.
template <class Math>
struct DdsNarrow {
    using Element = typename Math::Element;
    // Stages with many units need more memory for them than a third stage leaves.
    template <int kBlock>
    using Thin = NarrowTraits<Math, kBlock, 128, 3, 112 << 10, 2>;
    template <int kBlock>
    using Full = NarrowTraits<Math, kBlock, 128, 2, 152 << 10, 1>;
    using Common = Thin<32>;  // for what all have in common
    static constexpr int kClusterFeatures = Common::kRanks * Common::kTileFeatures;

    static const char* refuses(const Problem& problem, const Device& device) {
        constexpr int kSharedBytes = std::max(Thin<32>::kSharedBytes, Full<32>::kSharedBytes);
        if (const char* reason = sm90::refuses(device, kSharedBytes)) return reason;
        const Pattern& pattern = problem.pattern;
        if (pattern.block_rows != pattern.block_cols || pattern.block_rows > 32)
            return "its blocks are 16 x 16 or 32 x 32";
        // The plan's estimates of the time of a tile are less than this.
        const int64_t steps = k_size(problem) / 4 + 16;
        if (!Common::Schedule::can_hold(tile_count(problem), unit_count(problem), steps,
                                        device.multiprocessors))
            return "so much work is out of its reach";
        return refuses_results(output(problem), problem.tokens);
    }

    // At most a unit for each block.
    static size_t workspace_size(const Problem& problem, const Device&) {
        return static_cast<size_t>(problem.pattern.nnz) * Common::kRowFeatures * problem.pattern.block_rows *
               sizeof(Element);
    }

    static int32_t launch(const Problem& problem, const Device&, void* workspace, void* stream) {
        const bool full = bytes_of_stage(problem.pattern) > kFullBytes;
        if (problem.pattern.block_rows == 32)
            return (full ? launch_as<Full<32>> : launch_as<Thin<32>>)(problem, workspace, stream);
        return (full ? launch_as<Full<16>> : launch_as<Thin<16>>)(problem, workspace, stream);
    }

    static constexpr Kernel row(const char* name) {
        return {name,
                DeviceType::cuda,
                90,
                1u << static_cast<int>(Op::dds_nt) | 1u << static_cast<int>(Op::dds_nn),
                1u << static_cast<int>(Math::kDType),
                Precision::highest,
                {Common::kTileFeatures, Common::kStep, Common::kRanks, PlanKind::narrow},
                Common::kTileTokens,
                kClusterFeatures,
                0,
                refuses,
                workspace_size,
                launch};
    }

  private:
    static constexpr double kFullBytes = 30 << 10;  // of a stage's units, measured on an H200
    static constexpr double kDeferred = 0.15;       // likewise, density

    // How many to expect of a pattern without structure; one unit of two blocks may lack one of them.
    static double bytes_of_stage(const Pattern& pattern) {
        const double block = pattern.density();
        const double unit = pattern.block_rows == 32 ? block : block * (2 - block);
        return unit * Common::kTileFeatures * Common::kStep * sizeof(Element);
    }

    static bool forward(const Problem& problem) { return problem.op == Op::dds_nt; }
    static int64_t k_size(const Problem& problem) {
        return forward(problem) ? problem.pattern.in_features : problem.pattern.out_features;
    }
    static int64_t tile_count(const Problem& problem) {
        const int64_t features =
            forward(problem) ? problem.pattern.out_features : problem.pattern.in_features;
        return (features + kClusterFeatures - 1) / kClusterFeatures;
    }
    static int64_t unit_count(const Problem& problem) {
        return (problem.tokens + Common::kTileTokens - 1) / Common::kTileTokens;
    }
    static const Matrix& input(const Problem& problem) { return forward(problem) ? problem.x : problem.y; }
    static const Matrix& output(const Problem& problem) { return forward(problem) ? problem.y : problem.x; }

    template <class Traits>
    static int32_t launch_as(const Problem& problem, void* workspace, void* stream) {
        const int64_t tiles = tile_count(problem), units = unit_count(problem);
        if (tiles * units == 0) return cudaSuccess;
        NarrowArguments arguments{};
        if (const cudaError_t error = describe<Traits::kBlock>(arguments, problem, workspace, tiles, units))
            return error;
        if (const cudaError_t error = pack<Traits::kBlock>(problem, workspace, stream)) return error;
        const auto start = input(problem).layout == Layout::row_major
                               ? ClusterLauncher<dds_narrow_kernel<Traits, true>, NarrowArguments>::launch
                               : ClusterLauncher<dds_narrow_kernel<Traits, false>, NarrowArguments>::launch;
        const int64_t clusters = std::min<int64_t>(tiles * units, Common::Schedule::kMaxClusters);
        return start(arguments, clusters, Traits::kRanks, Traits::kThreads, Traits::kSharedBytes, stream);
    }

    template <int kBlock>
    static cudaError_t pack(const Problem& problem, void* workspace, void* stream) {
        constexpr int kThreads = 256;
        const int64_t blocks = (problem.pattern.nnz + kThreads / 32 - 1) / (kThreads / 32);
        if (blocks == 0) return cudaSuccess;
        const auto kernel = forward(problem) ? pack_narrow_kernel<Element, kBlock, false>
                                             : pack_narrow_kernel<Element, kBlock, true>;
        kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            static_cast<const PlanHeader*>(problem.plan), static_cast<const Element*>(problem.values),
            static_cast<char*>(workspace));
        return cudaGetLastError();
    }

    template <int kBlock>
    static cudaError_t describe(NarrowArguments& arguments, const Problem& problem, void* workspace,
                                int64_t tiles, int64_t units) {
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.bias = problem.bias;
        arguments.units = static_cast<const char*>(workspace);
        arguments.output_data = output(problem).data;
        arguments.output_ld = output(problem).ld;
        arguments.residual = problem.residual.data;
        arguments.residual_ld = problem.residual.ld;
        arguments.tokens = static_cast<int>(problem.tokens);
        arguments.deferred = kBlock == 32 && problem.pattern.density() > kDeferred;
        arguments.output_layout = output(problem).layout;
        arguments.activation = problem.activation;
        arguments.schedule = schedule_arguments(static_cast<int>(tiles), static_cast<int>(units), 1,
                                                group_units(k_size(problem)));
        if (const cudaError_t error = map_input(arguments, problem)) return error;
        return map_output<kBlock>(arguments, problem);
    }

    // So many tokens that their activations take a sixth of L2.
    static int group_units(int64_t k_size) {
        constexpr int64_t kPanelBytes = 8 << 20;
        return static_cast<int>(
            std::max<int64_t>(1, kPanelBytes / (int64_t{Common::kTileTokens} * k_size * 2)));
    }

    static cudaError_t map_input(NarrowArguments& arguments, const Problem& problem) {
        constexpr int kHalf = Common::kHalfTokens;
        const Matrix& matrix = input(problem);
        if (matrix.layout == Layout::row_major)
            return encode(arguments.input, problem.dtype, matrix.data,
                          {{k_size(problem), 1, 64}, {problem.tokens, matrix.ld, kHalf}});
        return encode(arguments.input, problem.dtype, matrix.data,
                      {{problem.tokens, 1, kHalf}, {k_size(problem), matrix.ld, Common::kStep}});
    }

    // Row-major results are stored without a map.
    template <int kBlock>
    static cudaError_t map_output(NarrowArguments& arguments, const Problem& problem) {
        const Matrix& matrix = output(problem);
        if (matrix.layout == Layout::row_major) return cudaSuccess;
        const int64_t features =
            forward(problem) ? problem.pattern.out_features : problem.pattern.in_features;
        return encode(arguments.output, problem.dtype, matrix.data,
                      {{problem.tokens, 1, Common::kHalfTokens}, {features, matrix.ld, kBlock}});
    }
};

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, math)                             \
    namespace ts::sm90 {                                            \
    const Kernel& name() {                                          \
        static constexpr Kernel kRow = DdsNarrow<math>::row(#name); \
        return kRow;                                                \
    }                                                               \
    }
