// Conversion of a register fragment to the 16-bit type of the next product, packed two at a time.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

namespace flash_cute {

using namespace cute;

// Neighbouring elements of the first mode become one packed conversion.
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

}  // namespace flash_cute
