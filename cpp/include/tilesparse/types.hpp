// Types that name the numbers of the C interface, and dtypes of element types.
#ifndef TILESPARSE_TYPES_HPP_
#define TILESPARSE_TYPES_HPP_

#include <tilesparse/tilesparse.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

namespace tilesparse {
inline namespace v0_1 {

enum class Device : int32_t { cpu = TS_CPU, cuda = TS_CUDA };
enum class Op : int32_t { dds_nt = TS_DDS_NT, dds_nn = TS_DDS_NN, sdd_tn = TS_SDD_TN };
enum class Layout : int32_t { row_major = TS_ROW_MAJOR, column_major = TS_COLUMN_MAJOR };
enum class Activation : int32_t { none = TS_NO_ACTIVATION, relu = TS_RELU, gelu = TS_GELU, silu = TS_SILU };
enum class Precision : int32_t {
    highest = TS_PRECISION_HIGHEST,
    tf32 = TS_PRECISION_TF32,
    fast = TS_PRECISION_FAST
};
enum class Policy : int32_t {
    sparse = TS_POLICY_SPARSE,
    automatic = TS_POLICY_AUTO,
    dense = TS_POLICY_DENSE
};
enum class Dtype : int32_t {
    float64 = TS_FLOAT64,
    float32 = TS_FLOAT32,
    float16 = TS_FLOAT16,
    bfloat16 = TS_BFLOAT16,
    int8 = TS_INT8,
    float8_e4m3fn = TS_FLOAT8_E4M3FN,
    int4 = TS_INT4
};

// True for dtypes of values that have scales.
constexpr bool is_quantized(Dtype dtype) {
    return dtype == Dtype::int8 || dtype == Dtype::float8_e4m3fn || dtype == Dtype::int4;
}

// Bytes of one element; of int4, of two.
constexpr std::size_t size_of(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : is_quantized(dtype) ? 1 : 2;
}

constexpr const char* name_of(Dtype dtype) {
    constexpr const char* kNames[] = {"unknown",  "float64", "float32",       "float16",
                                      "bfloat16", "int8",    "float8_e4m3fn", "int4"};
    const auto code = static_cast<std::size_t>(dtype);
    return code < std::size(kNames) ? kNames[code] : "unknown";
}

// Types for memory of dtypes that C++17 lacks.
struct Float16 {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};
struct Float8E4M3 {
    std::uint8_t bits;
};
// Two values from -8 to 7, the first in the low four bits.
struct Int4Pair {
    std::uint8_t bits;
};

// The dtype of an element type. Specialise it for others:
//     template <> struct tilesparse::DtypeOf<__nv_bfloat16> : tilesparse::IsDtype<Dtype::bfloat16> {};
template <Dtype dtype>
using IsDtype = std::integral_constant<Dtype, dtype>;
template <class T>
struct DtypeOf;
template <>
struct DtypeOf<double> : IsDtype<Dtype::float64> {};
template <>
struct DtypeOf<float> : IsDtype<Dtype::float32> {};
template <>
struct DtypeOf<Float16> : IsDtype<Dtype::float16> {};
template <>
struct DtypeOf<BFloat16> : IsDtype<Dtype::bfloat16> {};
template <>
struct DtypeOf<std::int8_t> : IsDtype<Dtype::int8> {};
template <>
struct DtypeOf<Float8E4M3> : IsDtype<Dtype::float8_e4m3fn> {};
template <>
struct DtypeOf<Int4Pair> : IsDtype<Dtype::int4> {};

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_TYPES_HPP_
