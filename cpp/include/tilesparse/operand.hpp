// The operands of a Product, and their checks.
#ifndef TILESPARSE_OPERAND_HPP_
#define TILESPARSE_OPERAND_HPP_

#include <tilesparse/error.hpp>
#include <tilesparse/span.hpp>
#include <tilesparse/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace tilesparse {
inline namespace v0_1 {
namespace detail {

struct Operand {
    bool is_given = false, is_const = false;
    Dtype dtype{};
    std::size_t size = 0;
};

inline Operand given(const Array& array) { return {true, array.is_const(), array.dtype(), array.size()}; }

inline void check_given(const char* name, const Operand& operand, bool is_written) {
    require(operand.is_given, std::string(name) + " must be set");
    require(!is_written || !operand.is_const,
            std::string(name) + " must not be const: this product writes it");
}

template <std::size_t size>
void copy_names(const char* name, std::string_view names, char (&to)[size]) {
    require(names.size() < size, std::string(name) + " must have fewer than " + std::to_string(size) +
                                     " characters, got " + std::to_string(names.size()));
    require(names.find('\0') == names.npos, std::string(name) + " must not contain a zero");
    std::memset(to, 0, size);
    names.copy(to, names.size());
}

// Refuses an operand that is given in another dtype than that of another one.
inline void check_same_dtype(const char* name, const Operand& operand, const char* other, const Operand& as) {
    require(!operand.is_given || operand.dtype == as.dtype, std::string(name) + " must be of the dtype of " +
                                                                other + ", " + name_of(as.dtype) + ", got " +
                                                                name_of(operand.dtype));
}

// Sets the ld of a matrix without gaps, and checks that its memory does not end before its last element.
inline void finish_matrix(const char* name, const Operand& operand, ts_operand& matrix, std::int64_t tokens,
                          std::int64_t features) {
    if (!operand.is_given) return;
    const bool is_row_major = matrix.layout == TS_ROW_MAJOR;
    const std::int64_t lines = is_row_major ? tokens : features;
    const std::int64_t length = is_row_major ? features : tokens;
    if (matrix.ld == 0) matrix.ld = length;
    if (lines <= 0 || length <= 0 || matrix.ld < length) return;  // of which ts_matmul says what is wrong
    const auto size = static_cast<std::int64_t>(operand.size);
    const bool fits = length <= size && (lines == 1 || matrix.ld <= (size - length) / (lines - 1));
    require(fits, std::string(name) + " must hold " + text(lines) + (is_row_major ? " rows" : " columns") +
                      " of " + text(length) + " elements with ld " + text(matrix.ld) + ", got " +
                      std::to_string(operand.size) + " elements");
}

inline void check_count(const char* name, std::size_t size, std::int64_t expected) {
    require(size == static_cast<std::uint64_t>(expected),
            std::string(name) + " must have " + text(expected) + " elements, got " + std::to_string(size));
}

}  // namespace detail
}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_OPERAND_HPP_
