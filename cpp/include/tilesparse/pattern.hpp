// Patterns in host memory, and their copies in memory of a device.
#ifndef TILESPARSE_PATTERN_HPP_
#define TILESPARSE_PATTERN_HPP_

#include <tilesparse/buffer.hpp>
#include <tilesparse/error.hpp>
#include <tilesparse/span.hpp>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace tilesparse {
inline namespace v0_1 {

struct Shape {
    std::int64_t out_features, in_features;
};
struct BlockShape {
    std::int32_t rows, cols;  // out, in: each 2 to 128
};

// Which blocks of a weight W [out_features, in_features] are kept, by row and by column, in host memory.
// Checked once, when it is made; it does not change.
class Pattern {
  public:
    // Block compressed rows as in ts_pattern: row_ptr [block rows + 1], col_idx [nnz], ascending in
    // each block row. row_slot [nnz] says where in the values each block lies; without it, in the order of
    // col_idx. `groups`: of how many weights of equal shape, such as those of experts, that lie below each
    // other and have tokens of their own in each product (Product::group_offsets). Throws
    // InvalidArgumentError or InvalidPatternError.
    Pattern(Shape shape, BlockShape block_shape, std::vector<std::int32_t> row_ptr,
            std::vector<std::int32_t> col_idx, std::vector<std::int32_t> row_slot = {},
            std::int32_t groups = 1)
        : row_ptr_(std::move(row_ptr)), col_idx_(std::move(col_idx)), row_slot_(std::move(row_slot)) {
        check_version();
        check_shape(shape, block_shape);
        if (row_slot_.empty())
            for (std::size_t e = 0; e < col_idx_.size(); ++e) row_slot_.push_back(static_cast<int32_t>(e));
        c_.struct_size = sizeof c_;
        c_.block_rows = block_shape.rows;
        c_.block_cols = block_shape.cols;
        c_.out_features = shape.out_features;
        c_.in_features = shape.in_features;
        c_.nnz = static_cast<std::int64_t>(col_idx_.size());
        c_.groups = groups;
        check_size("row_ptr", row_ptr_.size(), ceil_div(shape.out_features, block_shape.rows) + 1);
        check_size("row_slot", row_slot_.size(), c_.nnz);
        const ts_pattern rows = c();
        check(ts_pattern_validate(&rows));
        const std::int64_t lines = ceil_div(shape.in_features, block_shape.cols) * (groups > 1 ? groups : 1);
        col_ptr_.resize(static_cast<std::size_t>(lines + 1));
        row_idx_.resize(col_idx_.size());
        col_slot_.resize(col_idx_.size());
        check(ts_pattern_transpose(&rows, col_ptr_.data(), row_idx_.data(), col_slot_.data()));
    }

    // The blocks whose entry of `mask` [block rows, block columns], row by row, is not 0.
    static Pattern from_mask(Span<const std::uint8_t> mask, Shape shape, BlockShape block_shape,
                             std::int32_t groups = 1) {
        check_shape(shape, block_shape);
        const std::int64_t rows = ceil_div(shape.out_features, block_shape.rows);
        const std::int64_t cols = ceil_div(shape.in_features, block_shape.cols);
        check_size("mask", mask.size(), rows * cols);
        std::vector<std::int32_t> row_ptr{0}, col_idx;
        const std::uint8_t* entry = mask.data();
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t col = 0; col < cols; ++col)
                if (*entry++ != 0) col_idx.push_back(static_cast<std::int32_t>(col));
            row_ptr.push_back(static_cast<std::int32_t>(col_idx.size()));
        }
        return Pattern(shape, block_shape, std::move(row_ptr), std::move(col_idx), {}, groups);
    }
    static Pattern from_mask(std::initializer_list<std::uint8_t> mask, Shape shape, BlockShape block_shape,
                             std::int32_t groups = 1) {
        return from_mask(Span<const std::uint8_t>(mask.begin(), mask.size()), shape, block_shape, groups);
    }

    Shape shape() const { return {c_.out_features, c_.in_features}; }
    BlockShape block_shape() const { return {c_.block_rows, c_.block_cols}; }
    std::int64_t nnz() const { return c_.nnz; }
    // Elements of dense blocks [nnz, rows, cols].
    std::size_t values_size() const {
        return col_idx_.size() * static_cast<std::size_t>(c_.block_rows) *
               static_cast<std::size_t>(c_.block_cols);
    }
    Span<const std::int32_t> row_ptr() const { return row_ptr_; }
    Span<const std::int32_t> col_idx() const { return col_idx_; }
    Span<const std::int32_t> row_slot() const { return row_slot_; }
    Span<const std::int32_t> col_ptr() const { return col_ptr_; }
    Span<const std::int32_t> row_idx() const { return row_idx_; }
    Span<const std::int32_t> col_slot() const { return col_slot_; }

    // For the functions of tilesparse.h; valid while the pattern stays where it is.
    ts_pattern c() const {
        ts_pattern c = c_;
        c.row_ptr = row_ptr_.data();
        c.col_idx = col_idx_.data();
        c.row_slot = row_slot_.data();
        c.col_ptr = col_ptr_.data();
        c.row_idx = row_idx_.data();
        c.col_slot = col_slot_.data();
        return c;
    }

  private:
    static std::int64_t ceil_div(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }
    static void check_shape(Shape shape, BlockShape block) {
        detail::require(block.rows > 0 && block.cols > 0, "block_shape must have sides of 2 to 128, got (" +
                                                              detail::text(block.rows) + ", " +
                                                              detail::text(block.cols) + ")");
        const auto fits = [](std::int64_t features) { return features >= 0 && features <= INT32_MAX; };
        detail::require(fits(shape.out_features) && fits(shape.in_features),
                        "shape must have sides of 0 to " + detail::text(INT32_MAX) + ", got (" +
                            detail::text(shape.out_features) + ", " + detail::text(shape.in_features) + ")");
    }
    static void check_size(const char* name, std::size_t size, std::int64_t expected) {
        detail::require(size == static_cast<std::uint64_t>(expected),
                        std::string(name) + " must have " + detail::text(expected) +
                            " entries for this shape, got " + std::to_string(size));
    }

    ts_pattern c_{};  // without arrays
    std::vector<std::int32_t> row_ptr_, col_idx_, row_slot_, col_ptr_, row_idx_, col_slot_;
};

// A copy of a pattern's arrays in memory of a CUDA device.
template <class Memory>
class DevicePattern {
  public:
    explicit DevicePattern(const Pattern& pattern, const Memory& memory = Memory()) : c_(pattern.c()) {
        const Span<const std::int32_t> sources[] = {pattern.row_ptr(), pattern.col_idx(), pattern.row_slot(),
                                                    pattern.col_ptr(), pattern.row_idx(), pattern.col_slot()};
        const std::int32_t** const targets[] = {&c_.row_ptr, &c_.col_idx, &c_.row_slot,
                                                &c_.col_ptr, &c_.row_idx, &c_.col_slot};
        arrays_.reserve(std::size(sources));
        for (std::size_t i = 0; i < std::size(sources); ++i) {
            arrays_.push_back(Buffer<std::int32_t, Memory>::copy_of(sources[i], memory));
            *targets[i] = arrays_.back().data();
        }
    }

    Shape shape() const { return {c_.out_features, c_.in_features}; }
    BlockShape block_shape() const { return {c_.block_rows, c_.block_cols}; }
    std::int64_t nnz() const { return c_.nnz; }
    const ts_pattern& c() const { return c_; }

  private:
    ts_pattern c_;
    std::vector<Buffer<std::int32_t, Memory>> arrays_;
};

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_PATTERN_HPP_
