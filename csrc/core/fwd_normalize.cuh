// The end of a forward tile: stores the log-sum-exp of its rows and normalizes the accumulator to O.
#pragma once

#include <cute/tensor.hpp>

#include "mask.cuh"
#include "softmax.cuh"

namespace flash_cute {

using namespace cute;

// `lse` points to row 0 of the tile's head. After softmax.finish().
template <int kRows, class Accumulator, class Coords>
CUTE_DEVICE void normalize(FwdParams const& params, float* lse, int first_row, OnlineSoftmax<kRows> const& softmax,
                           Accumulator& acc,        // (rows, head dim)
                           Coords const& coords) {  // (rows, head dim) -> (row, column)
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int const row = first_row + get<0>(coords(i, _0{}));
    if (get<1>(coords(_0{}, _0{})) == 0 && row < params.len_q) lse[row] = softmax.lse(i);
    // A row that sees no key gives 0; one whose scores are all -inf gives 0/0 = NaN, as by the definition.
    bool const blind = !row_sees_a_key(params, row);
    float const inverse = softmax.inverse(i);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = blind ? 0.f : acc(i, j) * inverse;
  }
}

}  // namespace flash_cute
