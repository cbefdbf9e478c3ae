// The element types of a kernel, a parameter of its traits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/problem.h"

namespace ts {

template <DType kDType>
using DTypeConstant = std::integral_constant<DType, kDType>;
template <class Element>
struct DTypeOf;
template <>
struct DTypeOf<double> : DTypeConstant<DType::float64> {};
template <>
struct DTypeOf<float> : DTypeConstant<DType::float32> {};
template <>
struct DTypeOf<__half> : DTypeConstant<DType::float16> {};
template <>
struct DTypeOf<__nv_bfloat16> : DTypeConstant<DType::bfloat16> {};
template <>
struct DTypeOf<int8_t> : DTypeConstant<DType::int8> {};
template <>
struct DTypeOf<__nv_fp8_e4m3> : DTypeConstant<DType::float8_e4m3fn> {};
template <>
struct DTypeOf<int32_t> : DTypeConstant<DType::int32> {};

//     Input: activations that are read; of sdd both operands
//     Value: the weight's values as they are multiplied, whatever their storage keeps of them
//     Accumulator: sums, from the first product to the epilogue
//     Result: what is written, and what the epilogue reads: bias, residual and gate
template <class Input_, class Value_, class Accumulator_, class Result_,
          Accumulation kAccumulation_ = Accumulation::kept>
struct Elements {
    using Input = Input_;
    using Value = Value_;
    using Accumulator = Accumulator_;
    using Result = Result_;
    static constexpr Accumulation kAccumulation = kAccumulation_;
    static constexpr DType kInput = DTypeOf<Input>::value;
    static constexpr DType kResult = DTypeOf<Result>::value;
    static_assert(DTypeOf<Accumulator>::value == accumulator_of(kInput));
};

// All four of one type, but for sums.
template <class Element, Accumulation kAccumulation = Accumulation::kept>
using Uniform = Elements<Element, Element, float, Element, kAccumulation>;

// A sum as CuTe's instructions take it: integers as words.
template <class Accumulator>
__device__ inline auto& as_register(Accumulator& sum) {
    if constexpr (std::is_integral_v<Accumulator>)
        return reinterpret_cast<uint32_t&>(sum);
    else
        return sum;
}

template <class Math, class Result_>
struct OtherResult : Math {
    using Result = Result_;
    static constexpr DType kResult = DTypeOf<Result>::value;
};
// The same with results of one type.
template <class Math, class Result>
using WithResult =
    std::conditional_t<std::is_same_v<Result, typename Math::Result>, Math, OtherResult<Math, Result>>;

}  // namespace ts
