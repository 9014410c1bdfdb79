// Conversion of a register fragment to the 16-bit type of the next MMA, two elements at a time, and back.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

namespace flash_cute {

using namespace cute;

// Neighbouring elements of the first mode are converted as a pair, in one instruction.
template <class From, class FromLayout, class To, class ToLayout>
CUTE_DEVICE void convert(Tensor<From, FromLayout> const& from, Tensor<To, ToLayout>& to) {
  using FromElement = typename From::value_type;
  using ToElement = typename To::value_type;
  auto from_pairs = recast<cutlass::Array<FromElement, 2> const>(from);
  auto to_pairs = recast<cutlass::Array<ToElement, 2>>(to);
  cutlass::NumericArrayConverter<ToElement, FromElement, 2> const converter;
  CUTE_UNROLL
  for (int i = 0; i < size(from_pairs); ++i) {
    to_pairs(i) = converter(from_pairs(i));
  }
}

// The two 16-bit elements of a 32-bit word.
template <class Element>
CUTE_DEVICE float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<__half2 const&>(pair));
  }
}

// The same two as float16, in a word.
template <class Element>
CUTE_DEVICE uint32_t in_float16(uint32_t pair) {
  float2 const values = unpack<Element>(pair);
  __half2 const halves = __floats2half2_rn(values.x, values.y);
  return reinterpret_cast<uint32_t const&>(halves);
}

// The errors of rounding a and b to Element: rounded minus exact.
template <class Element>
CUTE_DEVICE float2 rounding_errors(float a, float b) {
  auto const pair = cutlass::NumericArrayConverter<Element, float, 2>{}({a, b});
  float2 const rounded = unpack<Element>(reinterpret_cast<uint32_t const&>(pair));
  return {rounded.x - a, rounded.y - b};
}

}  // namespace flash_cute
