// Chunks of dds: a product of more tokens than one launch can number is launched as several of some tokens
// each.
#pragma once

#include <algorithm>

#include "common/problem.h"

namespace ts::tma {

// Some tokens of a product, as a product.
[[gnu::noinline]] inline Problem tokens_of(const Problem& problem, int64_t first, int64_t count) {
    Problem some = problem;
    some.tokens = count;
    const auto advance = [&](Matrix& matrix, DType dtype) {
        if (matrix.data == nullptr) return;
        const int64_t elements = first * (matrix.layout == Layout::row_major ? matrix.ld : 1);
        matrix.data = static_cast<char*>(matrix.data) + elements * element_size(dtype);
    };
    advance(some.x, problem.x_dtype());
    advance(some.y, problem.y_dtype());
    advance(some.residual, problem.result_dtype);
    if (some.x_scales != nullptr) some.x_scales += first;
    return some;
}

// Calls launch(problem) for at most so many spans of tokens at a time, as equal as possible, up to the first
// error.
template <class Launch>
int32_t in_chunks(const Problem& problem, int64_t span_tokens, int64_t most_spans, Launch launch) {
    const int64_t spans = (problem.tokens + span_tokens - 1) / span_tokens;
    if (spans <= most_spans) return launch(problem);
    const int64_t chunks = (spans + most_spans - 1) / most_spans;
    const int64_t tokens = (spans + chunks - 1) / chunks * span_tokens;
    for (int64_t first = 0; first < problem.tokens; first += tokens)
        if (const int32_t error = launch(tokens_of(problem, first, std::min(tokens, problem.tokens - first))))
            return error;
    return 0;
}

}  // namespace ts::tma
