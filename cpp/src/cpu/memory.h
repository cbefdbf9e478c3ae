// Memory of the CPU products: addresses, fetches ahead of use, the workspace and packed operands.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/problem.h"
#include "cpu/steps.h"

namespace ts::cpu {

constexpr int64_t kPackedFeatures = 512;  // features that a task packs
constexpr int64_t kThreadTasks = 4;       // that a thread has at least, if there are so many

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline std::byte* offset(const void* base, int64_t bytes) {
    return const_cast<std::byte*>(static_cast<const std::byte*>(base)) + bytes;
}

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// In assembly: the compiler's own hint asks only to read where its baseline lacks this instruction,
// which older processors ignore.
inline void prefetch_to_write(const void* address) {
#ifdef __x86_64__
    asm volatile("prefetchw (%0)" ::"r"(address));
#else
    __builtin_prefetch(address, 1);
#endif
}

// Fetches the lines of a rectangle of `rows` times `bytes`.
template <void (*fetch)(const void*)>
inline void prefetch_rectangle(const void* data, int64_t rows, int64_t row_stride, int64_t bytes) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t byte = 0; byte < bytes; byte += 64) fetch(offset(data, row * row_stride + byte));
}

// Fetches what `finish` will read and change, which would otherwise hold up the sums that come next.
inline void prefetch_output(const Output& output, int element_bytes) {
    const int64_t lines = output.transposed ? output.columns : output.rows;
    const int64_t bytes = (output.transposed ? output.rows : output.columns) * element_bytes;
    prefetch_rectangle<prefetch_to_write>(output.data, lines, output.ld * element_bytes, bytes);
    if (output.added != nullptr && output.added != output.data)
        prefetch_rectangle<prefetch>(output.added, lines, output.added_ld * element_bytes, bytes);
}

// Bytes of panels that should stay in a core's own cache beside what passes through it.
int64_t cache_bytes();

// Memory of that size is often fresh, and a page fault for every 4 KiB can take a third of the time of a
// sparse product. The system is asked for pages of 2 MiB, and may refuse.
void advise_huge_pages(void* data, int64_t bytes);

// Hands out areas of the workspace; with no memory behind it, it counts.
class Workspace {
  public:
    explicit Workspace(void* base) : base_(base) {}
    std::byte* take(int64_t bytes) {
        std::byte* area = base_ ? offset(base_, size_) : nullptr;
        size_ += round_up(bytes, 256);
        return area;
    }
    size_t size() const { return size_; }

  private:
    void* base_;
    int64_t size_ = 0;
};

// A rectangle of features x tokens of an operand, copied with zeros where tokens are padding.
struct Rectangle {
    int64_t feature, features;
    int64_t token, tokens, padded_tokens;
};

// Turns sums into results, from a token and a feature on; `offsets` are those of the features.
Rescale rescale_of(const Problem& problem, int64_t token, int64_t feature, const int32_t* offsets);

// Copies a rectangle of an operand to [features, tokens], or to [tokens, features] if tokens_first; the
// order of memory says which of them are multiplied in pairs: those along which sums are taken. `target_ld`:
// elements from one line of the copy to the next.
void pack_rectangle(const Steps& steps, DType dtype, const Matrix& from, const Rectangle& rectangle,
                    bool tokens_first, bool pair_tokens, void* target, int64_t target_ld);

}  // namespace ts::cpu
