#include "storage.h"

#include <cstring>

#include "cpu/steps.h"
#include "device.h"
#include "error.h"
#include "threads.h"
#include "values/metadata.h"

#ifdef TILESPARSE_CUDA
#include "values/values.h"
#endif

namespace ts {
namespace {

using values::half_index;
using values::kHalf;

constexpr int kMostColumns = 128;  // of a block
constexpr int kGroup = 4;

uint16_t read_half(const uint32_t* metadata, int index) {
    return static_cast<uint16_t>(metadata[index / 2] >> index % 2 * 16);
}

// The two of four that are kept: the first two in the mask, or others where it has fewer.
struct Pair {
    int first, second;
    bool has_first, has_second;  // in the mask
};

Pair pair_of(const bool (&mask)[kGroup]) {
    int kept[kGroup], count = 0;
    for (int i = 0; i < kGroup; ++i)
        if (mask[i]) kept[count++] = i;
    if (count >= 2) return {kept[0], kept[1], true, true};
    if (count == 0) return {0, 1, false, false};
    return kept[0] == 3 ? Pair{0, 3, false, true} : Pair{kept[0], 3, true, false};
}

// ---- dequantization and decompression ----

// Masks of words for each four bits of metadata: where the first and the second kept value go.
template <class Word>
struct Places {
    Word first[16][kGroup] = {}, second[16][kGroup] = {};

    constexpr Places() {
        for (int bits = 0; bits < 16; ++bits) {
            first[bits][bits & 3] = static_cast<Word>(-1);
            first[bits][bits >> 2] = 0;
            second[bits][bits >> 2] = static_cast<Word>(-1);
        }
    }
};

template <class Word>
void scatter_row(const Word* compressed, const uint32_t* metadata, int rows, int row, int columns,
                 std::byte* dense) {
    static constexpr Places<Word> places;
    for (int half = 0; half < columns; half += kHalf) {
        uint32_t bits = read_half(metadata, half_index(rows, row, half));
        for (int column = half; column < half + kHalf; column += kGroup, bits >>= 4) {
            const Word first = compressed[column / 2], second = compressed[column / 2 + 1];
            Word four[kGroup];
            for (int i = 0; i < kGroup; ++i)
                four[i] = (first & places.first[bits & 15][i]) | (second & places.second[bits & 15][i]);
            std::memcpy(dense + column * sizeof(Word), four, sizeof four);
        }
    }
}

template <class Word>
class Dequantizer {
  public:
    Dequantizer(const Problem& problem, void* dense)
        : values_(problem.values),
          rows_(problem.pattern.block_rows),
          columns_(problem.pattern.block_cols),
          element_(element_size(problem.input_dtype)),
          packed_(values_of_element(values_.dtype)),
          scales_(is_quantized(values_.dtype) && !is_quantized(problem.input_dtype)),
          steps_(cpu::widest().steps[static_cast<int>(problem.input_dtype)]),
          dense_(static_cast<std::byte*>(dense)) {}

    void dequantize_block(int64_t block) const {
        const int64_t size = int64_t{rows_} * columns_;
        std::byte* const to = dense_ + block * size * element_;
        if (!values_.is_compressed()) {
            const auto* from = static_cast<const Word*>(values_.data) + block * size / packed_;
            return put(from, block, 0, rows_, to);
        }
        const auto* from = static_cast<const Word*>(values_.data) + block * size / 2;
        const uint32_t* const metadata = values_.metadata + block * size / 32;
        for (int row = 0; row < rows_; ++row, from += columns_ / 2) {
            std::byte* const row_to = to + row * columns_ * element_;
            if (scales_) {
                alignas(64) Word dense[kMostColumns];
                scatter_row(from, metadata, rows_, row, columns_, reinterpret_cast<std::byte*>(dense));
                put(dense, block, row, 1, row_to);
            } else {
                scatter_row(from, metadata, rows_, row, columns_, row_to);
            }
        }
    }

  private:
    // Writes some dense rows of a block.
    void put(const Word* from, int64_t block, int first, int rows, std::byte* to) const {
        const int64_t count = int64_t{rows} * columns_;
        if constexpr (sizeof(Word) > 1) {
            std::memcpy(to, from, count * sizeof(Word));
        } else {
            const DType dtype = values_.dtype;
            if (values_.scales_per == ScalesPer::block)
                return steps_.scale({from, dtype, values_.scales[block], count, to});
            const float* const scales = values_.scales + block * rows_ + first;
            for (int row = 0; row < rows; ++row)
                steps_.scale({from + row * columns_ / packed_, dtype, scales[row], columns_,
                              to + row * columns_ * element_});
        }
    }

    const Values& values_;
    int rows_, columns_, element_, packed_;
    bool scales_;  // values in fewer bits than x
    const cpu::Steps& steps_;
    std::byte* dense_;
};

template <class Word>
void dequantize_on_host(const Problem& problem, void* dense) {
    const Dequantizer<Word> dequantizer(problem, dense);
    for_each(problem.pattern.nnz, [&](int64_t block) { dequantizer.dequantize_block(block); });
}

// ---- compression ----

// Rows and columns are those of the result, swapped for a transposed weight.
template <class Word>
void compress_block(const Compression& compression, int64_t block) {
    const Pattern& pattern = compression.pattern;
    const bool transposed = compression.transposed;
    const int rows = transposed ? pattern.block_cols : pattern.block_rows;
    const int columns = transposed ? pattern.block_rows : pattern.block_cols;
    const int64_t size = int64_t{rows} * columns, row_step = transposed ? 1 : columns,
                  column_step = transposed ? rows : 1;
    const Word* const values = static_cast<const Word*>(compression.values) + block * size;
    const uint8_t* const mask = compression.mask + block * size;
    Word* const compressed = static_cast<Word*>(compression.compressed) + block * size / 2;
    uint32_t* const metadata = compression.metadata + block * size / 32;
    std::memset(metadata, 0, size / 8);
    for (int row = 0; row < rows; ++row)
        for (int column = 0; column < columns; column += kGroup) {
            const int64_t at = row * row_step + column * column_step;
            bool kept[kGroup];
            for (int i = 0; i < kGroup; ++i) kept[i] = mask[at + i * column_step] != 0;
            const Pair pair = pair_of(kept);
            Word* const to = compressed + row * (columns / 2) + column / 2;
            to[0] = pair.has_first ? values[at + pair.first * column_step] : Word{0};
            to[1] = pair.has_second ? values[at + pair.second * column_step] : Word{0};
            const int half = half_index(rows, row, column);
            const uint32_t bits = pair.first | pair.second << 2;
            metadata[half / 2] |= bits << (half % 2 * 16 + column % kHalf);
        }
}

template <class Word>
void compress_on_host(const Compression& compression) {
    for_each(compression.pattern.nnz, [&](int64_t block) { compress_block<Word>(compression, block); });
}

}  // namespace

#ifdef TILESPARSE_CUDA

namespace {

// cuda_device() throws where there is no device.
void dequantize_on_device(const Problem& problem, void* dense, void* stream) {
    cuda_device(-1);
    launch_checked("dequantizing values", [&] { return values::dequantize(problem, dense, stream); });
}

void compress_on_device(const Compression& c, void* stream) {
    cuda_device(-1);
    const values::Compression compression{c.pattern.block_rows,
                                          c.pattern.block_cols,
                                          c.pattern.nnz,
                                          element_size(c.dtype),
                                          c.transposed,
                                          c.values,
                                          c.mask,
                                          c.compressed,
                                          c.metadata};
    launch_checked("compressing values", [&] { return values::compress(compression, stream); });
}

}  // namespace

#else

namespace {

void dequantize_on_device(const Problem&, void*, void*) { fail_without_cuda(); }
void compress_on_device(const Compression&, void*) { fail_without_cuda(); }

}  // namespace

#endif

void dequantize_values(const Problem& problem, void* dense, void* stream) {
    if (problem.device == DeviceType::cuda) return dequantize_on_device(problem, dense, stream);
    switch (element_size(problem.values.dtype)) {
        case 1:
            return dequantize_on_host<uint8_t>(problem, dense);
        case 2:
            return dequantize_on_host<uint16_t>(problem, dense);
        case 4:
            return dequantize_on_host<uint32_t>(problem, dense);
        default:
            return dequantize_on_host<uint64_t>(problem, dense);
    }
}

void compress_values(const Compression& compression, void* stream) {
    if (compression.device == DeviceType::cuda) return compress_on_device(compression, stream);
    switch (element_size(compression.dtype)) {
        case 1:
            return compress_on_host<uint8_t>(compression);
        case 2:
            return compress_on_host<uint16_t>(compression);
        case 4:
            return compress_on_host<uint32_t>(compression);
        default:
            return compress_on_host<uint64_t>(compression);
    }
}

}  // namespace ts
