// Compression of values to TS_STORAGE_2_4.
#ifndef TILESPARSE_COMPRESS_HPP_
#define TILESPARSE_COMPRESS_HPP_

#include <tilesparse/error.hpp>
#include <tilesparse/pattern.hpp>
#include <tilesparse/span.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace tilesparse {
inline namespace v0_1 {

// Compresses dense blocks [nnz, rows, cols] to TS_STORAGE_2_4, on the CPU: of each 4 neighbours in a row of a
// block, those whose byte in `mask` is not 0, the first two if there are more. `compressed` has half as many
// elements and `metadata` a word for each 32. Throws InvalidArgumentError. ts_values_compress does it on a
// stream, too.
inline void compress(const Pattern& pattern, Array values, Span<const std::uint8_t> mask, Array compressed,
                     Span<std::uint32_t> metadata) {
    const auto check_size = [](const char* name, std::size_t size, std::size_t expected) {
        detail::require(size == expected, std::string(name) + " must have " + std::to_string(expected) +
                                              " elements, got " + std::to_string(size));
    };
    check_size("values", values.size(), pattern.values_size());
    check_size("mask", mask.size(), pattern.values_size());
    check_size("compressed", compressed.size(), pattern.values_size() / 2);
    check_size("metadata", metadata.size(), pattern.values_size() / 32);
    detail::require(!compressed.is_const(), "compressed must not be const");
    detail::require(compressed.dtype() == values.dtype(), "compressed must be of the dtype of values");
    const ts_pattern c = pattern.c();
    check(ts_values_compress(&c, TS_CPU, static_cast<std::int32_t>(values.dtype()), values.data(),
                             mask.data(), 0, compressed.data(), metadata.data(), nullptr));
}

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_COMPRESS_HPP_
