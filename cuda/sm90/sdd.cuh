// sdd, the gradient of the block-sparse weight: W[n, k] = sum over tokens t of y[t, n] x[t, k], for the kept
// blocks only, written (or added) to their slots in values.
//
// A CTA computes tiles of two halves, one for each of two warpgroups: 64 features of y, the rows of wgmma, by
// 256 gathered features of x. One warp loads the tokens in steps of 64 through TMA: the strips of y and the
// units of x that the halves need, which the plan chose to have many units in common, so that few bytes are
// loaded for what is multiplied. Blocks smaller than a strip by a unit are rounded up to it; sums that belong
// to no block are not stored. sdd_schedule.cuh says which CTA computes what.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>

#include "sm90/launch.cuh"
#include "sm90/sdd_epilogue.cuh"
#include "sm90/sdd_traits.cuh"
#include "sm90/tensor_map.h"

namespace ts::sm90 {

// The warp that fills the ring.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
__device__ inline void sdd_produce(const SddArguments& arguments, typename Traits::Shared& shared, const SddPlan& plan,
                                   const SddSchedule& schedule) {
    const int lane = threadIdx.x % 32, unit_bytes = Traits::kFeatureBytes << arguments.unit_shift;
    const int room = 2 * Traits::kWindow >> arguments.unit_shift;
    typename Ring<Traits::kMaxStages>::Position position;
    for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
        const SddWork work = schedule.work(index);
        const int4 tile = plan.tile(work.tile);
        const int strips = tile.y < 0 ? 1 : 2, unit = lane - strips;
        const int bytes = strips * Traits::kStripBytes + tile.z * unit_bytes;
        const bool is_strip = unit < 0, active = unit < tile.z;
        const int feature = is_strip ? (lane == 0 ? tile.x : tile.y) : active ? __ldg(plan.units + work.tile * room + unit) : 0;
        const int offset = is_strip ? lane * Traits::kStripBytes : strips * Traits::kStripBytes + unit * unit_bytes;
        const CUtensorMap* const map = is_strip ? &arguments.y : &arguments.x;
        const bool row_major = is_strip ? kRowMajorY : kRowMajorX;
        // Back and forth: the tokens that the tile before used last are still in L2.
        const bool backwards = index / gridDim.x % 2 != 0;
        for (int step = work.first_step; step < work.last_step; ++step) {
            const int token = Traits::kStep * (backwards ? work.first_step + work.last_step - 1 - step : step);
            shared.ring.wait_empty(position);
            const Barrier& full = shared.ring.full[position.stage];
            if (lane == 0) full.arrive_and_expect_tx(bytes);
            __syncwarp();
            if (active)
                load_box(map, full, Multicast{1}, shared.stages + position.stage * arguments.stage_bytes + offset,
                         row_major ? feature : token, row_major ? token : feature);
            __syncwarp();
            position.advance(arguments.stages);
        }
    }
}

// One warpgroup's products of its half of all tiles.
template <class Traits, bool kRowMajorY, bool kRowMajorX>
class SddConsumer {
  public:
    __device__ SddConsumer(const SddArguments& arguments, typename Traits::Shared& shared, int half)
        : arguments_(arguments), shared_(shared), half_(half) {}

    __device__ void run(const SddPlan& plan, const SddSchedule& schedule) {
        float sums[kSums];
        for (int index = blockIdx.x; index < schedule.size(); index += gridDim.x) {
            const SddWork work = schedule.work(index);
            const int4 tile = plan.tile(work.tile);
            const int strips = tile.y < 0 ? 1 : 2, window = half_ == 0 ? 0 : tile.w << arguments_.unit_shift;
            sum_up(sums, half_ < strips ? half_ * Traits::kStripBytes : 0,
                   strips * Traits::kStripBytes + window * Traits::kFeatureBytes, work.last_step - work.first_step);
            if (work.partial < 0)
                SddEpilogue<Traits>(arguments_, plan, work.tile, half_).store(sums, 0);
            else
                store_partial<Traits>(arguments_, sums, work.partial, half_);
        }
    }

  private:
    // `strip`, `window`: where they lie in a stage.
    __device__ void sum_up(float (&sums)[kSums], int strip, int window, int steps) {
        int multiplied = -1;
        for (int step = 0; step < steps; ++step) {
            wait(shared_.ring.full[position_.stage], position_.parity);
            const uint32_t stage =
                cute::cast_smem_ptr_to_uint(shared_.stages) + position_.stage * arguments_.stage_bytes;
            multiply_step<typename Traits::template Atom<kRowMajorY, kRowMajorX>>(
                sums, arguments_.y_operand, (stage + strip) / 16, arguments_.x_operand, (stage + window) / 16, step > 0);
            cute::warpgroup_wait<1>();
            if (multiplied >= 0) release(multiplied);
            multiplied = position_.stage;
            position_.advance(arguments_.stages);
        }
        cute::warpgroup_wait<0>();
        if (multiplied >= 0) {
            release(multiplied);
            return;
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
    }

    __device__ void release(int stage) const {
        if (threadIdx.x % 128 == 0) shared_.ring.empty[stage].arrive();
    }

    const SddArguments& arguments_;
    typename Traits::Shared& shared_;
    int half_;
    typename Ring<Traits::kMaxStages>::Position position_;
};

template <class Traits, bool kRowMajorY, bool kRowMajorX>
__global__ void __launch_bounds__(Traits::kThreads, 1) sdd_kernel(const __grid_constant__ SddArguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        shared.ring.init(Traits::kHalves);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    const SddPlan plan(arguments.plan);
    const SddSchedule schedule(plan.tile_count, arguments.steps, arguments.ctas);
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (warp == 0) sdd_produce<Traits, kRowMajorY, kRowMajorX>(arguments, shared, plan, schedule);
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        SddConsumer<Traits, kRowMajorY, kRowMajorX>(arguments, shared, warp / 4 - 1).run(plan, schedule);
    }
}

// Host side: one row of the registry.
template <class Math>
struct Sdd {
    using Traits = SddTraits<Math>;

    static const char* refuses(const Problem&, const Device& device) {
        return device.shared_memory < Traits::kSharedBytes ? "the device has too little shared memory" : nullptr;
    }

    static size_t workspace_size(const Problem& problem, const Device& device) {
        if (problem.pattern.nnz == 0) return 0;
        return size_t{sizeof(float)} * Traits::kHalves * Traits::kStrip * Traits::kWindow *
               SddSchedule::max_partials(step_count(problem), device.multiprocessors);
    }

    static int32_t launch(const Problem& problem, const Device& device, void* workspace, void* stream) {
        if (problem.pattern.nnz == 0) return cudaSuccess;
        SddArguments arguments{};
        if (const cudaError_t error = describe(arguments, problem, device, workspace)) return error;
        const bool row_major_y = problem.y.layout == Layout::row_major;
        const bool row_major_x = problem.x.layout == Layout::row_major;
        const auto start = row_major_y ? (row_major_x ? start_on<true, true> : start_on<true, false>)
                                       : (row_major_x ? start_on<false, true> : start_on<false, false>);
        if (const cudaError_t error = start(arguments, stream)) return error;
        if (SddSchedule::max_partials(arguments.steps, arguments.ctas) == 0) return cudaSuccess;
        void* parameters[] = {&arguments};
        return cudaLaunchKernel(reinterpret_cast<const void*>(sdd_reduce<Traits>), dim3(8 * arguments.ctas), dim3(128),
                                parameters, 0, static_cast<cudaStream_t>(stream));
    }

    static constexpr Kernel row(const char* name) {
        return {name,
                DeviceType::cuda,
                90,
                1u << static_cast<int>(Op::sdd_tn),
                1u << static_cast<int>(Math::kDType),
                Precision::highest,
                {Traits::kStrip, Traits::kWindow, Traits::kHalves},
                0,
                Traits::kHalves * Traits::kStrip,
                refuses,
                workspace_size,
                launch};
    }

  private:
    static int step_count(const Problem& problem) {
        return static_cast<int>((problem.tokens + Traits::kStep - 1) / Traits::kStep);
    }

    template <bool kRowMajorY, bool kRowMajorX>
    static cudaError_t start_on(const SddArguments& arguments, void* stream) {
        return ClusterLauncher<sdd_kernel<Traits, kRowMajorY, kRowMajorX>, SddArguments>::launch(
            arguments, arguments.ctas, 1, Traits::kThreads, Traits::kSharedBytes, stream);
    }

    static cudaError_t describe(SddArguments& arguments, const Problem& problem, const Device& device,
                                void* workspace) {
        const Pattern& pattern = problem.pattern;
        const int unit = strip_unit(pattern);
        arguments.plan = static_cast<const PlanHeader*>(problem.plan);
        arguments.values = problem.values;
        arguments.partial = static_cast<float4*>(workspace);
        arguments.y_operand = describe_operand(problem.y, Traits::kStrip);
        arguments.x_operand = describe_operand(problem.x, unit);
        arguments.steps = step_count(problem);
        arguments.ctas = device.multiprocessors;
        arguments.stages = Traits::stages(pattern.block_rows);
        arguments.stage_bytes = Traits::stage_bytes(pattern.block_rows);
        arguments.unit_shift = log2_of_block(unit);
        arguments.row_shift = log2_of_block(pattern.block_rows);
        arguments.col_shift = log2_of_block(pattern.block_cols);
        arguments.accumulate = problem.accumulate;
        if (problem.tokens == 0) return cudaSuccess;  // nothing is loaded
        if (const cudaError_t error = map(arguments.y, problem, problem.y, pattern.out_features, Traits::kStrip))
            return error;
        return map(arguments.x, problem, problem.x, pattern.in_features, unit);
    }

    // Row-major: tokens are lines of `width` features. Feature-major: features are lines of 64 tokens.
    static Operand describe_operand(const Matrix& matrix, int width) {
        const bool row_major = matrix.layout == Layout::row_major;
        Operand result = row_major ? operand(2 * width, width * Traits::kFeatureBytes) : operand(2 * Traits::kStep, 0);
        for (int i = 0; i < 4; ++i) result.step[i] = static_cast<uint32_t>(16 * i * (row_major ? 2 * width : 2) / 16);
        return result;
    }

    static cudaError_t map(CUtensorMap& map, const Problem& problem, const Matrix& matrix, int64_t features,
                           int width) {
        if (matrix.layout == Layout::row_major)
            return encode(map, problem.dtype, matrix.data,
                          {{features, 1, width}, {problem.tokens, matrix.ld, Traits::kStep}});
        return encode(map, problem.dtype, matrix.data,
                      {{problem.tokens, 1, Traits::kStep}, {features, matrix.ld, width}});
    }
};

}  // namespace ts::sm90

#define TS_INSTANCE(name, kernel, math)                        \
    namespace ts::sm90 {                                       \
    const Kernel& name() {                                     \
        static constexpr Kernel kRow = Sdd<math>::row(#name);  \
        return kRow;                                           \
    }                                                          \
    }
