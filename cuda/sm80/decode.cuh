// The forward product of few tokens, y = x W^T, which can take no less time than reading W takes.
//
// A CTA computes kRows features of one block row for all tokens; its warps share the row's blocks
// evenly and add up their sums in the end. A warp walks its part in slices of 64 elements of k. It
// copies them, W and x, through a ring of its own in shared memory, so that more bytes are under way
// than registers could hold and no warp waits for another.
//
// A lane reads 16 bytes of a row at a time, k 8i to 8i + 7, where mma.sync wants k 2i, 2i + 1, 2i + 8
// and 2i + 9: W and x are permuted alike, which leaves their product what it is.
#pragma once

#include "common/epilogue.cuh"
#include "common/problem.h"
#include "sm80/async.cuh"
#include "sm80/launch.cuh"
#include "sm80/math.cuh"

namespace ts::sm80 {

struct DecodeArguments {
    const void* input;
    int64_t input_ld;  // in bytes
    void* output;
    int64_t output_ld;
    const void* values;
    const void* bias;
    Adjacency rows;
    Layout output_layout;
    Activation activation;
    int tokens;
    int row_shift;  // log2 of the rows of a block
    int k_shift;    // log2 of the k of a block
};

// `kChunks`: of 16 bytes, of a block's row within a slice; it follows from the k of a block.
template <class Math_, int kRows_, int kTokenTiles_, int kChunks_>
struct DecodeTraits {
    using Math = Math_;
    using Element = typename Math::Element;
    static constexpr int kRows = kRows_;
    static constexpr int kTokenTiles = kTokenTiles_;  // of 8 tokens
    static constexpr int kChunks = kChunks_;
    static constexpr int kTokens = 8 * kTokenTiles;
    static constexpr int kRowTiles = kRows / 16;
    static constexpr int kSlice = 64;                // elements of k
    static constexpr int kHalf = kSlice / 2;         // what two mma.sync take
    static constexpr int kBlocks = 8 / kChunks;      // of a slice
    static constexpr int kLineBytes = 16 * kChunks;  // a row of a block in shared memory, or a token's k
    static constexpr int kCopyLines = 32 / kChunks;  // that a warp copies at a time
    static constexpr int kCopyBytes = 32 * 16;
    static constexpr int kValueBytes = kRows * kSlice * static_cast<int>(sizeof(Element));
    static constexpr int kStageBytes = kValueBytes + kTokens * kSlice * static_cast<int>(sizeof(Element));
    // Measured on an H200: more, smaller rings are better than fewer, deeper ones.
    static constexpr int kStages = kStageBytes <= 4096 ? 3 : 2;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kSumLine = kRows + 4;  // of a token; the padding avoids bank conflicts
    static_assert(sizeof(Element) == 2);
    static_assert(kTokens * kSumLine * sizeof(float) <= kRingBytes, "a warp's sums take its ring's place");
};

template <int kPending>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline uint4 load_chunk(uint32_t address) {
    uint4 chunk;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"(address)
                 : "memory");
    return chunk;
}

// Copies the slices of a warp's part of a block row into its ring, one after another.
template <class Traits>
class DecodeLoader {
    static constexpr int kChunks = Traits::kChunks, kCopyLines = Traits::kCopyLines;
    static constexpr int kBatch = 32;  // entries: one a lane

  public:
    __device__ DecodeLoader(const DecodeArguments& arguments, int feature, int part, int parts, uint32_t ring,
                            int lane)
        : arguments_(arguments), lane_(lane) {
        const int row = feature >> arguments.row_shift, k_shift = arguments.k_shift;
        const int first = __ldg(arguments.rows.ptr + row);
        last_entry_ = __ldg(arguments.rows.ptr + row + 1);
        const uint32_t k = static_cast<uint32_t>(last_entry_ - first) << k_shift;
        const int slices = (k + Traits::kSlice - 1) / Traits::kSlice;
        slice_ = slices * part / parts;
        last_slice_ = slices * (part + 1) / parts;
        entry_ = batch_ = first + (slice_ * Traits::kSlice >> k_shift);
        current_ = fetch(batch_);
        next_ = fetch(batch_ + kBatch);

        const int line = lane / kChunks, chunk = lane % kChunks;
        const int64_t row_in_block = (feature & ((1 << arguments.row_shift) - 1)) + line;
        values_ =
            static_cast<const char*>(arguments.values) + (row_in_block << k_shift) * kElement + chunk * 16;
        input_ = static_cast<const char*>(arguments.input) + line * arguments.input_ld + chunk * 16;
        // Lines of 128 bytes are stored with their halves swapped at every other one: see DecodeReader.
        stage_ = ring + (kChunks == 8 ? (lane ^ (line & 1) << 2) : lane) * 16;
        first_stage_ = stage_;
    }

    __device__ int slices() const { return last_slice_ - slice_; }

    // Starts the copies of the next slice, if there is one, as one group.
    __device__ void load() {
        if (slice_ < last_slice_) copy_slice();
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

  private:
    static constexpr int kElement = sizeof(typename Traits::Element);

    __device__ void copy_slice() {
        const int k_shift = arguments_.k_shift;
        const int k = kChunks == 8 ? slice_ * Traits::kSlice & ((1 << k_shift) - 1) : 0;  // in the block
#pragma unroll
        for (int j = 0; j < Traits::kBlocks; ++j) copy_block(j, k);
        ++slice_;
        stage_ += Traits::kStageBytes;
        if (stage_ == first_stage_ + Traits::kRingBytes) stage_ = first_stage_;
        if (kChunks < 8 || k + Traits::kSlice == 1 << k_shift) entry_ += Traits::kBlocks;
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
        const int k_shift = arguments_.k_shift;
        const char* w = values_ + ((slot << (arguments_.row_shift + k_shift)) + k) * kElement;
        const char* x = input_ + ((col << k_shift) + k) * kElement;
        const int64_t w_step = (int64_t{kCopyLines} << k_shift) * kElement;
        // Lines of 32 bytes are stored with the halves of 128 bytes swapped in every other block.
        const uint32_t stage = kChunks == 2 ? stage_ ^ j % 2 * 64 : stage_;
        const uint32_t w_target = stage + j * Traits::kRows * Traits::kLineBytes;
        const uint32_t x_target = stage + Traits::kValueBytes + j * Traits::kTokens * Traits::kLineBytes;
#pragma unroll
        for (int i = 0; i < Traits::kRows / kCopyLines; ++i)
            copy_async_if(true, w_target + i * Traits::kCopyBytes, w + i * w_step, bytes);
#pragma unroll
        for (int i = 0; i < (Traits::kTokens + kCopyLines - 1) / kCopyLines; ++i)
            copy_async_if(lane_ / kChunks + i * kCopyLines < arguments_.tokens,
                          x_target + i * Traits::kCopyBytes, x + i * kCopyLines * arguments_.input_ld, bytes);
    }

    // A lane's column and slot of a batch.
    __device__ int2 fetch(int batch) const {
        const int entry = batch + lane_;
        if (entry >= last_entry_) return {0, 0};
        return {__ldg(arguments_.rows.idx + entry), __ldg(arguments_.rows.slot + entry)};
    }

    const DecodeArguments& arguments_;
    const int lane_;
    int slice_, last_slice_;
    int entry_, last_entry_;
    int batch_;  // first entry of the current batch
    int2 current_, next_;
    const char* values_;
    const char* input_;
    uint32_t stage_, first_stage_;
};

// Where a lane finds its chunks in a stage: line g of 8, with chunks t and t + 4 of 8 in the slice, for
// lane 4 g + t. Eight lanes at a time read 128 bytes from different banks.
template <class Traits>
class DecodeReader {
  public:
    __device__ explicit DecodeReader(int lane) {
        const int g = lane / 4, t = lane % 4;
        if constexpr (Traits::kChunks == 8) {
            values_ = g * 128 + (t ^ g % 2 * 4) * 16;
            input_ = values_ + Traits::kValueBytes;
        } else if constexpr (Traits::kChunks == 4) {
            values_ = lane * 16;
            input_ = values_ + Traits::kValueBytes;
        } else {
            const int at = g * 32 + t % 2 * 16 ^ t / 2 * 64;
            values_ = at + t / 2 * Traits::kRows * Traits::kLineBytes;
            input_ = at + t / 2 * Traits::kTokens * Traits::kLineBytes + Traits::kValueBytes;
        }
    }

    // Of the rows 8 * i to 8 * i + 7, in half a slice.
    __device__ uint4 values(uint32_t stage, int half, int i) const {
        return load_chunk(stage + half_of(values_, half, Traits::kRows) + i * 8 * Traits::kLineBytes);
    }
    // Of the tokens 8 * i to 8 * i + 7.
    __device__ uint4 input(uint32_t stage, int half, int i) const {
        return load_chunk(stage + half_of(input_, half, Traits::kTokens) + i * 8 * Traits::kLineBytes);
    }

  private:
    __device__ static uint32_t half_of(uint32_t offset, int half, int lines) {
        return Traits::kChunks == 8 ? offset ^ half * 64 : offset + half * lines * 64;
    }

    uint32_t values_, input_;
};

template <class Traits>
using DecodeSums = float[Traits::kRowTiles][Traits::kTokenTiles][4];

template <class Traits>
__device__ inline void multiply_slice(DecodeSums<Traits>& sums, const DecodeReader<Traits>& reader,
                                      uint32_t stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 w[2 * Traits::kRowTiles], x[Traits::kTokenTiles];
#pragma unroll
        for (int i = 0; i < 2 * Traits::kRowTiles; ++i) w[i] = reader.values(stage, half, i);
#pragma unroll
        for (int n = 0; n < Traits::kTokenTiles; ++n) x[n] = reader.input(stage, half, n);
#pragma unroll
        for (int n = 0; n < Traits::kTokenTiles; ++n)
#pragma unroll
            for (int m = 0; m < Traits::kRowTiles; ++m)
                Traits::Math::mma(sums[m][n], {w[2 * m].x, w[2 * m + 1].x, w[2 * m].y, w[2 * m + 1].y},
                                  {x[n].x, x[n].y});
#pragma unroll
        for (int n = 0; n < Traits::kTokenTiles; ++n)
#pragma unroll
            for (int m = 0; m < Traits::kRowTiles; ++m)
                Traits::Math::mma(sums[m][n], {w[2 * m].z, w[2 * m + 1].z, w[2 * m].w, w[2 * m + 1].w},
                                  {x[n].z, x[n].w});
    }
}

// Puts a warp's sums into shared memory, token by token.
template <class Traits>
__device__ inline void stage_sums(const DecodeSums<Traits>& sums, float* to, int lane) {
    float* const first = to + lane % 4 * 2 * Traits::kSumLine + lane / 4;
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < Traits::kTokenTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                first[(8 * n + i % 2) * Traits::kSumLine + 16 * m + i / 2 * 8] = sums[m][n][i];
}

// Adds the sums of all warps, always in the same order, and stores the results.
template <class Traits>
__device__ inline void store_sums(const DecodeArguments& arguments, const char* sums, int first_feature) {
    using Element = typename Traits::Element;
    const auto* const bias = static_cast<const Element*>(arguments.bias);
    const int warps = blockDim.x / 32;
    constexpr int kPairs = Traits::kRows / 2;
    for (int i = threadIdx.x; i < kPairs * arguments.tokens; i += blockDim.x) {
        const int row = i % kPairs * 2, token = i / kPairs;
        const int64_t feature = first_feature + row;
        float2 sum = bias == nullptr ? make_float2(0.0f, 0.0f)
                                     : make_float2(to_float(bias[feature]), to_float(bias[feature + 1]));
        const char* part = sums + (token * Traits::kSumLine + row) * sizeof(float);
        for (int warp = 0; warp < warps; ++warp, part += Traits::kRingBytes) {
            const float2 added = *reinterpret_cast<const float2*>(part);
            sum.x += added.x;
            sum.y += added.y;
        }
        sum = {activate(sum.x, arguments.activation), activate(sum.y, arguments.activation)};
        auto* const output = static_cast<Element*>(arguments.output);
        if (arguments.output_layout == Layout::row_major) {
            store_pair(output + token * arguments.output_ld + feature, sum, false);
        } else {
            output[feature * arguments.output_ld + token] = from_float<Element>(sum.x);
            output[(feature + 1) * arguments.output_ld + token] = from_float<Element>(sum.y);
        }
    }
}

constexpr int kMaxDecodeWarps = 8;

template <class Traits>
__global__ void __launch_bounds__(32 * kMaxDecodeWarps)
    decode_kernel(const __grid_constant__ DecodeArguments arguments) {
    extern __shared__ __align__(128) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int feature = blockIdx.x * Traits::kRows;
    char* const own = shared + warp * Traits::kRingBytes;
    const uint32_t ring = shared_address(own);
    DecodeLoader<Traits> loader(arguments, feature, warp, blockDim.x / 32, ring, lane);
    const int slices = loader.slices();
#pragma unroll 1
    for (int i = 0; i < Traits::kStages; ++i) loader.load();

    const DecodeReader<Traits> reader(lane);
    DecodeSums<Traits> sums = {};
    uint32_t stage = ring;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        wait_for_copies<Traits::kStages - 1>();
        __syncwarp();
        multiply_slice<Traits>(sums, reader, stage);
        __syncwarp();
        loader.load();
        stage = stage == ring + Traits::kRingBytes - Traits::kStageBytes ? ring : stage + Traits::kStageBytes;
    }
    wait_for_copies<0>();
    __syncwarp();
    stage_sums<Traits>(sums, reinterpret_cast<float*>(own), lane);
    __syncthreads();
    store_sums<Traits>(arguments, shared, feature);
}

// Host side: one row of the registry.
template <class Math>
struct Decode {
    static constexpr int kMaxTokens = 64;

    static const char* refuses(const Problem& problem, const Device& device) {
        if (problem.x.layout == Layout::feature_major) return "x is feature-major";
        return device.shared_memory < kSharedBytes ? "the device has too little shared memory" : nullptr;
    }

    static size_t workspace_size(const Problem&, const Device&) { return 0; }

    static int32_t launch(const Problem& problem, const Device& device, void*, void* stream) {
        const Pattern& pattern = problem.pattern;
        if (problem.tokens == 0 || pattern.out_features == 0) return cudaSuccess;
        // More features in a CTA read x less often; fewer give each multiprocessor something to do.
        const bool wide = pattern.block_rows >= 32 && problem.tokens > 8 &&
                          pattern.out_features >= 32 * int64_t{device.multiprocessors};
        return wide ? launch_rows<32>(problem, stream) : launch_rows<16>(problem, stream);
    }

    static constexpr Kernel row(const char* name) {
        return {name,
                DeviceType::cuda,
                80,
                1u << static_cast<int>(Op::dds_nt),
                1u << static_cast<int>(Math::kDType),
                Math::kPrecision,
                {0, 0},
                0,
                0,
                kMaxTokens,
                refuses,
                workspace_size,
                launch};
    }

  private:
    static constexpr int kSharedBytes = 96 << 10;  // of a CTA, at most: two of them on large devices

    template <int kRows>
    static int32_t launch_rows(const Problem& problem, void* stream) {
        if (problem.tokens <= 8) return launch_tokens<kRows, 1>(problem, stream);
        if (problem.tokens <= 16) return launch_tokens<kRows, 2>(problem, stream);
        if (problem.tokens <= 32) return launch_tokens<kRows, 4>(problem, stream);
        return launch_tokens<kRows, 8>(problem, stream);
    }

    template <int kRows, int kTokenTiles>
    static int32_t launch_tokens(const Problem& problem, void* stream) {
        switch (problem.pattern.block_cols) {
            case 16:
                return start<DecodeTraits<Math, kRows, kTokenTiles, 2>>(problem, stream);
            case 32:
                return start<DecodeTraits<Math, kRows, kTokenTiles, 4>>(problem, stream);
            default:
                return start<DecodeTraits<Math, kRows, kTokenTiles, 8>>(problem, stream);
        }
    }

    template <class Traits>
    static int32_t start(const Problem& problem, void* stream) {
        const Pattern& pattern = problem.pattern;
        const DecodeArguments arguments{problem.x.data,
                                        problem.x.ld * static_cast<int64_t>(sizeof(typename Traits::Element)),
                                        problem.y.data,
                                        problem.y.ld,
                                        problem.values,
                                        problem.bias,
                                        pattern.rows,
                                        problem.y.layout,
                                        problem.activation,
                                        static_cast<int>(problem.tokens),
                                        log2_of_block(pattern.block_rows),
                                        log2_of_block(pattern.block_cols)};
        const int warps = warps_of<Traits>(pattern);
        return ts::sm80::launch<decode_kernel<Traits>>(
            arguments, static_cast<int>(pattern.out_features / Traits::kRows), 32 * warps,
            warps * Traits::kRingBytes, kSharedBytes, stream);
    }

    // Enough slices for each warp to fill its ring, in the mean of all rows.
    template <class Traits>
    static int warps_of(const Pattern& pattern) {
        constexpr int kSlices = 4;
        const int64_t slices =
            pattern.value_count() / pattern.out_features / Traits::kSlice;  // of a row, in the mean
        int warps = 1;
        while (warps < kMaxDecodeWarps && 2 * warps * kSlices <= slices &&
               2 * warps * Traits::kRingBytes <= kSharedBytes)
            warps *= 2;
        return warps;
    }
};

}  // namespace ts::sm80

#define TS_INSTANCE(name, kernel, math)                          \
    namespace ts::sm80 {                                         \
    const Kernel& name() {                                       \
        static constexpr Kernel kRow = Decode<math>::row(#name); \
        return kRow;                                             \
    }                                                            \
    }
