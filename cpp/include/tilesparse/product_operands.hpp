// The operands that a Product was given.
#ifndef TILESPARSE_PRODUCT_OPERANDS_HPP_
#define TILESPARSE_PRODUCT_OPERANDS_HPP_

#include <tilesparse/operand.hpp>
#include <tilesparse/types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace tilesparse {
inline namespace v0_1 {
namespace detail {

struct ProductOperands {
    Operand x, y, residual, gate, values, bias, bias_gradient;
    std::size_t metadata = 0, scales = 0, x_scales = 0;  // elements

    void check_dtypes(std::int32_t op) const {
        if (op == TS_SDD_TN) check_same_dtype("y", y, "x", x);
        if (is_quantized(x.dtype))
            check_same_dtype("bias", bias, "y", y);
        else
            check_same_dtype("bias", bias, "x", x);
        check_same_dtype("residual", residual, "y", y);
        check_same_dtype("gate", gate, "y", y);
    }

    // The granularity of the values' scales.
    std::int32_t granularity(const ts_matmul_desc& desc, const ts_pattern& pattern) const {
        if (x.is_given && is_quantized(x.dtype))
            return desc.x.granularity == TS_SCALES_PER_GROUP ? TS_SCALES_PER_BLOCK : TS_SCALES_PER_FEATURE;
        return scales == static_cast<std::size_t>(pattern.nnz) ? TS_SCALES_PER_BLOCK : TS_SCALES_PER_ROW;
    }

    void check_sizes(const ts_matmul_desc& desc, const ts_pattern& pattern) const {
        const auto is_block = [](std::int32_t extent) { return extent > 0 && extent <= 128; };
        if (!is_block(pattern.block_rows) || !is_block(pattern.block_cols) || pattern.nnz < 0 ||
            pattern.nnz > INT32_MAX)
            return;  // of which ts_matmul says what is wrong
        const std::int64_t rows = pattern.nnz * pattern.block_rows;
        const bool is_2_4 = desc.values.storage == TS_STORAGE_2_4;
        const bool is_halved = is_2_4 || values.dtype == Dtype::int4;
        check_count("values", values.size, rows * pattern.block_cols / (is_halved ? 2 : 1));
        if (is_2_4) check_count("metadata", metadata, rows * (pattern.block_cols / 32));
        if (desc.values.scales != nullptr) {
            const std::int32_t per = desc.values.granularity;
            check_count("scales", scales,
                        per == TS_SCALES_PER_FEATURE ? pattern.out_features
                        : per == TS_SCALES_PER_ROW   ? rows
                                                     : pattern.nnz);
        }
        if (desc.x.scales != nullptr) check_x_scales(desc, pattern);
        if (bias.is_given) check_count("bias", bias.size, pattern.out_features);
        if (bias_gradient.is_given) check_count("bias_gradient", bias_gradient.size, pattern.out_features);
    }

  private:
    void check_x_scales(const ts_matmul_desc& desc, const ts_pattern& pattern) const {
        const std::int64_t lines = pattern.in_features / 128, ld = desc.x.scales_ld;
        if (ld == 0) return check_count("x_scales", x_scales, desc.tokens);
        if (ld < 0 || ld > INT32_MAX || lines <= 0 || lines > INT32_MAX || desc.tokens < 0)
            return;  // of which ts_matmul says what is wrong
        const std::int64_t least = (lines - 1) * ld + desc.tokens;
        require(x_scales >= static_cast<std::uint64_t>(least),
                "x_scales must have at least " + text(least) + " elements, got " + std::to_string(x_scales));
    }
};

}  // namespace detail
}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_PRODUCT_OPERANDS_HPP_
