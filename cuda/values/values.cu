#include "values/values.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "common/launch.cuh"
#include "values/metadata.h"

namespace ts::values {
namespace {

// A thread has kHalf columns of a row of some block, those of half a word of metadata.
constexpr int kThreads = 256;

__device__ inline const uint16_t* halves_of(const uint32_t* metadata, int64_t block, int size) {
    return reinterpret_cast<const uint16_t*>(metadata + block * (size / 32));
}

// So many elements side by side, moved in vectors of up to 16 bytes.
template <class Word, int kCount>
struct alignas(kCount * sizeof(Word) < 16 ? kCount * sizeof(Word) : 16) Run {
    Word at[kCount];
};

__device__ inline float decode(uint8_t bits, DType dtype) {
    if (dtype != DType::float8_e4m3fn) return static_cast<float>(static_cast<int8_t>(bits));
    const __half_raw half = __nv_cvt_fp8_to_halfraw(bits, __NV_E4M3);
    return __half2float(half);
}

__device__ inline void round_to(double& to, float from) { to = from; }
__device__ inline void round_to(float& to, float from) { to = from; }
__device__ inline void round_to(__half& to, float from) { to = __float2half_rn(from); }
__device__ inline void round_to(__nv_bfloat16& to, float from) { to = __float2bfloat16_rn(from); }

// The 16 values of int4 in 8 bytes as bytes of int8.
__device__ inline Run<uint8_t, kHalf> unpack(const uint8_t* from) {
    const auto packed = *reinterpret_cast<const Run<uint8_t, kHalf / 2>*>(from);
    Run<uint8_t, kHalf> bytes;
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) {
        const auto pair = static_cast<int8_t>(packed.at[i]);
        bytes.at[2 * i] = static_cast<uint8_t>(static_cast<int8_t>(pair << 4) >> 4);
        bytes.at[2 * i + 1] = static_cast<uint8_t>(pair >> 4);
    }
    return bytes;
}

// Two of four words to where the bits say.
template <class Word>
__device__ inline void scatter(Word first, Word second, uint32_t bits, Word* four) {
    if constexpr (sizeof(Word) <= 2) {  // all four in one register or two
        constexpr int kBits = 8 * sizeof(Word);
        using Four = std::conditional_t<sizeof(Word) == 1, uint32_t, uint64_t>;
        const Four placed = Four{first} << (bits & 3) * kBits | Four{second} << (bits >> 2 & 3) * kBits;
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = static_cast<Word>(placed >> i * kBits);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            four[i] = (bits & 3) == i ? first : (bits >> 2 & 3) == i ? second : Word{0};
    }
}

struct DequantizeArguments {
    Values values;
    void* dense;
    int block_rows, block_cols;
    int64_t halves;
};

// `Word`: what values are moved as. `Element`: of activations, if values have to be scaled; else Word, as
// where activations have 8 bits, too.
template <class Word, class Element>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeArguments arguments) {
    const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (index >= arguments.halves) return;
    const Values& values = arguments.values;
    const int columns = arguments.block_cols, rows = arguments.block_rows, halves = columns / kHalf;
    const int64_t line = index / halves, block = line / rows;
    const int row = static_cast<int>(line % rows), column = static_cast<int>(index % halves) * kHalf;
    Run<Word, kHalf> dense;
    if (values.storage == Storage::two_of_four) {
        const auto kept = *reinterpret_cast<const Run<Word, kHalf / 2>*>(
            static_cast<const Word*>(values.data) + index * (kHalf / 2));
        uint32_t bits = halves_of(values.metadata, block, rows * columns)[half_index(rows, row, column)];
#pragma unroll
        for (int i = 0; i < kHalf; i += 4, bits >>= 4)
            scatter(kept.at[i / 2], kept.at[i / 2 + 1], bits, dense.at + i);
    } else {
        const Word* const from = static_cast<const Word*>(values.data);
        bool is_packed = false;
        if constexpr (sizeof(Word) == 1) {
            is_packed = values.dtype == DType::int4;
            if (is_packed) dense = unpack(from + index * (kHalf / 2));
        }
        if (!is_packed) dense = *reinterpret_cast<const Run<Word, kHalf>*>(from + index * kHalf);
    }
    if constexpr (!std::is_same_v<Word, Element>) {
        const float scale = values.scales[values.scales_per == ScalesPer::row ? line : block];
        Run<Element, kHalf> scaled;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) round_to(scaled.at[i], scale * decode(dense.at[i], values.dtype));
        *reinterpret_cast<Run<Element, kHalf>*>(static_cast<Element*>(arguments.dense) + index * kHalf) =
            scaled;
    } else {
        *reinterpret_cast<Run<Word, kHalf>*>(static_cast<Word*>(arguments.dense) + index * kHalf) = dense;
    }
}

// Neighbouring threads have neighbouring rows of a transposed weight, and columns of others.
template <class Word, bool kTransposed>
__global__ void __launch_bounds__(kThreads) compress_kernel(const __grid_constant__ Compression arguments) {
    const int rows = kTransposed ? arguments.block_cols : arguments.block_rows;
    const int columns = kTransposed ? arguments.block_rows : arguments.block_cols;
    const int size = rows * columns, halves = columns / kHalf;
    const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t block = index / (size / kHalf);
    if (block >= arguments.nnz) return;
    const int within = static_cast<int>(index % (size / kHalf));
    const int row = kTransposed ? within % rows : within / halves;
    const int column = (kTransposed ? within / rows : within % halves) * kHalf;
    const int step = kTransposed ? rows : 1;
    const int64_t first = block * size + (kTransposed ? column * rows + row : row * columns + column);
    const Word* const values = static_cast<const Word*>(arguments.values) + first;
    const uint8_t* const mask = arguments.mask + first;
    Run<Word, kHalf> dense;
    Run<uint8_t, kHalf> kept;
    if constexpr (kTransposed) {
#pragma unroll
        for (int i = 0; i < kHalf; ++i) dense.at[i] = values[i * step], kept.at[i] = mask[i * step];
    } else {
        dense = *reinterpret_cast<const Run<Word, kHalf>*>(values);
        kept = *reinterpret_cast<const Run<uint8_t, kHalf>*>(mask);
    }
    Run<Word, kHalf / 2> compressed;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) {
        const bool has[4] = {kept.at[i] != 0, kept.at[i + 1] != 0, kept.at[i + 2] != 0, kept.at[i + 3] != 0};
        // The first two in the mask. Where it has fewer, zeros stand at the last column, or the first.
        int low = 0, high = 1, count = 0;
        Word low_value = 0, high_value = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (!has[j]) continue;
            if (count == 0) low = j, low_value = dense.at[i + j];
            if (count == 1) high = j, high_value = dense.at[i + j];
            ++count;
        }
        if (count == 1) {
            high = 3;
            if (low == 3) low = 0, high_value = low_value, low_value = 0;
        }
        compressed.at[i / 2] = low_value;
        compressed.at[i / 2 + 1] = high_value;
        bits |= static_cast<uint32_t>(low | high << 2) << i;
    }
    const int64_t to = block * (size / 2) + (row * columns + column) / 2;
    *reinterpret_cast<Run<Word, kHalf / 2>*>(static_cast<Word*>(arguments.compressed) + to) = compressed;
    auto* const metadata = const_cast<uint16_t*>(halves_of(arguments.metadata, block, size));
    metadata[half_index(rows, row, column)] = static_cast<uint16_t>(bits);
}

template <class Arguments>
int32_t launch(void (*kernel)(Arguments), Arguments arguments, int64_t threads, void* stream) {
    if (threads == 0) return cudaSuccess;
    return launch_kernel(kernel, (threads + kThreads - 1) / kThreads, kThreads, stream, arguments);
}

auto dequantize_kernel_for(const Problem& problem) -> void (*)(DequantizeArguments) {
    if (is_quantized(problem.values.dtype)) {
        switch (problem.input_dtype) {
            case DType::int8:
            case DType::float8_e4m3fn:
                return dequantize_kernel<uint8_t, uint8_t>;
            case DType::float64:
                return dequantize_kernel<uint8_t, double>;
            case DType::float32:
                return dequantize_kernel<uint8_t, float>;
            case DType::float16:
                return dequantize_kernel<uint8_t, __half>;
            default:
                return dequantize_kernel<uint8_t, __nv_bfloat16>;
        }
    }
    switch (element_size(problem.input_dtype)) {
        case 8:
            return dequantize_kernel<uint64_t, uint64_t>;
        case 4:
            return dequantize_kernel<uint32_t, uint32_t>;
        default:
            return dequantize_kernel<uint16_t, uint16_t>;
    }
}

template <bool kTransposed>
auto compress_kernel_for(int element_size) -> void (*)(Compression) {
    switch (element_size) {
        case 8:
            return compress_kernel<uint64_t, kTransposed>;
        case 4:
            return compress_kernel<uint32_t, kTransposed>;
        case 2:
            return compress_kernel<uint16_t, kTransposed>;
        default:
            return compress_kernel<uint8_t, kTransposed>;
    }
}

}  // namespace

int32_t dequantize(const Problem& problem, void* dense, void* stream) {
    const Pattern& pattern = problem.pattern;
    const int64_t halves = pattern.value_count() / kHalf;
    const DequantizeArguments arguments{problem.values, dense, pattern.block_rows, pattern.block_cols,
                                        halves};
    return launch(dequantize_kernel_for(problem), arguments, halves, stream);
}

int32_t compress(const Compression& compression, void* stream) {
    const int64_t halves = compression.nnz * compression.block_rows * compression.block_cols / kHalf;
    const auto kernel = compression.transposed ? compress_kernel_for<true>(compression.element_size)
                                               : compress_kernel_for<false>(compression.element_size);
    return launch(kernel, compression, halves, stream);
}

}  // namespace ts::values
