#include "cpu/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace ts::cpu {

int64_t cache_bytes() {
#ifdef __GLIBC__
    static const int64_t second_level = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return std::clamp<int64_t>(second_level, 1 << 20, 2 << 20) * 3 / 4;
#else
    return 768 << 10;
#endif
}

void advise_huge_pages(void* data, int64_t bytes) {
    constexpr int64_t kLeastBytes = 4 << 20;
    if (bytes < kLeastBytes) return;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Rescale rescale_of(const Problem& problem, int64_t token, int64_t feature, const int32_t* offsets) {
    if (!is_quantized(problem.input_dtype)) return {};
    return {problem.x_scales + token, problem.values.scales + feature,
            problem.input_dtype == DType::int8 ? offsets : nullptr};
}

void pack_rectangle(const Steps& steps, DType dtype, const Matrix& from, const Rectangle& rectangle,
                    bool tokens_first, bool pair_tokens, void* target, int64_t target_ld) {
    const bool row_major = from.layout == Layout::row_major;
    const int64_t first = row_major ? rectangle.token * from.ld + rectangle.feature
                                    : rectangle.feature * from.ld + rectangle.token;
    const bool pair_ld = tokens_first != pair_tokens;
    Pack pack{offset(from.data, first * element_size(dtype)),
              from.ld,
              rectangle.features,
              rectangle.tokens,
              rectangle.features,
              rectangle.padded_tokens,
              target,
              pair_ld ? target_ld / steps.pair : target_ld,
              row_major != tokens_first,
              row_major == pair_tokens};
    if (row_major) {
        std::swap(pack.rows, pack.cols);
        std::swap(pack.padded_rows, pack.padded_cols);
    }
    steps.pack(pack);
}

}  // namespace ts::cpu
