#include "values.h"

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

// Which two of four are kept: the first two in a mask, others in the place of those it lacks.
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

// ---- expansion ----

template <class Word>
void scatter_row(const Word* compressed, const uint32_t* metadata, int rows, int row, int columns,
                 Word* plain) {
    std::memset(plain, 0, columns * sizeof(Word));
    for (int half = 0; half < columns; half += kHalf) {
        uint32_t bits = read_half(metadata, half_index(rows, row, half));
        for (int column = half; column < half + kHalf; column += kGroup, bits >>= 4) {
            plain[column + (bits & 3)] = compressed[column / 2];
            plain[column + (bits >> 2 & 3)] = compressed[column / 2 + 1];
        }
    }
}

float decode_float8(uint8_t bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    if (exponent == 15 && fraction == 7) return sign * __builtin_nanf("");
    if (exponent == 0) return sign * static_cast<float>(fraction) * 0x1p-9f;
    return sign * static_cast<float>(8 + fraction) * static_cast<float>(1 << exponent) * 0x1p-10f;
}

template <DType kDType>
void scale_row(const uint8_t* row, DType from, float scale, int columns, void* plain) {
    using Codec = cpu::Codec<kDType == DType::float64 ? DType::float32 : kDType, 16>;
    constexpr int kLanes = cpu::lanes_of<typename Codec::V>;
    for (int column = 0; column < columns; column += kLanes) {
        typename Codec::V weights;
        for (int i = 0; i < kLanes; ++i) {
            const uint8_t bits = row[column + i];
            weights[i] = scale * (from == DType::int8 ? static_cast<float>(static_cast<int8_t>(bits))
                                                      : decode_float8(bits));
        }
        if constexpr (kDType == DType::float64) {
            for (int i = 0; i < kLanes; ++i) static_cast<double*>(plain)[column + i] = weights[i];
        } else {
            cpu::store(static_cast<typename Codec::Stored*>(plain) + column, Codec::encode(weights));
        }
    }
}

template <class Word>
class Expansion {
  public:
    Expansion(const Problem& problem, void* plain)
        : values_(problem.values),
          rows_(problem.pattern.block_rows),
          columns_(problem.pattern.block_cols),
          dtype_(problem.dtype),
          plain_(static_cast<std::byte*>(plain)) {}

    // A row of all blocks.
    void expand_row(int64_t index) const {
        alignas(64) Word row[kMostColumns];
        const auto* from = static_cast<const Word*>(values_.data) + index * columns_;
        if (values_.is_compressed()) {
            const int64_t block = index / rows_, words = int64_t{rows_} * columns_ / 32;
            from = static_cast<const Word*>(values_.data) + index * (columns_ / 2);
            scatter_row(from, values_.metadata + block * words, rows_, static_cast<int>(index % rows_),
                        columns_, row);
            from = row;
        }
        void* const to = plain_ + index * columns_ * element_size(dtype_);
        if constexpr (sizeof(Word) == 1)
            scale(from, index, to);
        else
            std::memcpy(to, from, columns_ * sizeof(Word));
    }

  private:
    void scale(const uint8_t* row, int64_t index, void* to) const {
        const float scale = values_.scales[values_.row_scales ? index : index / rows_];
        switch (dtype_) {
            case DType::float64:
                return scale_row<DType::float64>(row, values_.dtype, scale, columns_, to);
            case DType::float32:
                return scale_row<DType::float32>(row, values_.dtype, scale, columns_, to);
            case DType::float16:
                return scale_row<DType::float16>(row, values_.dtype, scale, columns_, to);
            default:
                return scale_row<DType::bfloat16>(row, values_.dtype, scale, columns_, to);
        }
    }

    const Values& values_;
    int rows_, columns_;
    DType dtype_;
    std::byte* plain_;
};

template <class Word>
void expand_on_host(const Problem& problem, void* plain) {
    const Expansion<Word> expansion(problem, plain);
    const int64_t rows = problem.pattern.nnz * problem.pattern.block_rows;
    for_each(rows, [&](int64_t row) { expansion.expand_row(row); });
}

// ---- compression ----

// Rows and columns are those of what results, which of a transposed weight is the other way round.
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

// Where there is no device, `cuda_device` says so.
void expand_on_device(const Problem& problem, void* plain, void* stream) {
    cuda_device(-1);
    launch_checked("expanding values", [&] { return values::expand(problem, plain, stream); });
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

[[noreturn]] void refuse() {
    fail(TS_NO_DEVICE, "this library was built without CUDA; it has values on the CPU only");
}
void expand_on_device(const Problem&, void*, void*) { refuse(); }
void compress_on_device(const Compression&, void*) { refuse(); }

}  // namespace

#endif

void expand_values(const Problem& problem, void* plain, void* stream) {
    if (problem.device == DeviceType::cuda) return expand_on_device(problem, plain, stream);
    switch (element_size(problem.values.dtype)) {
        case 1:
            return expand_on_host<uint8_t>(problem, plain);
        case 2:
            return expand_on_host<uint16_t>(problem, plain);
        case 4:
            return expand_on_host<uint32_t>(problem, plain);
        default:
            return expand_on_host<uint64_t>(problem, plain);
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
