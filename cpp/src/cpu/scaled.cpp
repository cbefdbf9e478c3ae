// Products with scales inside of the sums: both factors times their scales in float32, in the workspace, and
// the product of these.
#include <cstdint>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "threads.h"

namespace ts::cpu {
namespace {

constexpr int64_t kAlignment = 64;

int64_t input_bytes(const Problem& problem) {
    return round_up(problem.tokens * problem.k_size() * int64_t{sizeof(float)}, kAlignment);
}
int64_t value_bytes(const Problem& problem) {
    return round_up(problem.pattern.value_count() * int64_t{sizeof(float)}, kAlignment);
}

// The same product of factors in float32.
Problem dequantized(const Problem& problem, std::byte* input, std::byte* values) {
    Problem result = problem;
    result.input_dtype = DType::float32;
    result.x = {input, problem.k_size(), Layout::row_major};
    result.x_scales = nullptr;
    result.x_scales_ld = 0;
    result.values = {values, nullptr, nullptr, {}, DType::float32, Storage::dense};
    return result;
}

void dequantize_input(const Steps& steps, const Problem& problem, std::byte* to) {
    const int64_t k_size = problem.k_size();
    for_each(problem.tokens, [&](int64_t token) {
        const auto* const from = static_cast<const uint8_t*>(problem.x.data) + token * problem.x.ld;
        for (int64_t k = 0; k < k_size; k += kScaleGroup)
            steps.scale({from + k, problem.input_dtype,
                         problem.x_scales[k / kScaleGroup * problem.x_scales_ld + token], kScaleGroup,
                         to + (token * k_size + k) * int64_t{sizeof(float)}});
    });
}

void dequantize_values(const Steps& steps, const Problem& problem, std::byte* to) {
    constexpr int64_t kBlock = kScaleGroup * kScaleGroup;
    const auto* const from = static_cast<const uint8_t*>(problem.values.data);
    for_each(problem.pattern.nnz, [&](int64_t block) {
        steps.scale({from + block * kBlock, problem.values.dtype, problem.values.scales[block], kBlock,
                     to + block * kBlock * int64_t{sizeof(float)}});
    });
}

}  // namespace

size_t scaled_workspace_size(const Steps& steps, const Problem& problem, const Device& device) {
    const Problem product = dequantized(problem, nullptr, nullptr);
    const size_t own = suits_decode(steps, product) ? decode_workspace_size(steps, product, device)
                                                    : dds_workspace_size(steps, product, device);
    return static_cast<size_t>(input_bytes(problem) + value_bytes(problem)) + own;
}

void scaled(const Steps& steps, Finish finish, const Problem& problem, const Device& device,
            void* workspace) {
    auto* const input = static_cast<std::byte*>(workspace);
    std::byte* const values = input + input_bytes(problem);
    void* const rest = values + value_bytes(problem);
    dequantize_input(steps, problem, input);
    dequantize_values(steps, problem, values);
    const Problem product = dequantized(problem, input, values);
    if (suits_decode(steps, product))
        decode(steps, finish, product, device, rest);
    else
        dds(steps, finish, product, device, rest);
}

}  // namespace ts::cpu
