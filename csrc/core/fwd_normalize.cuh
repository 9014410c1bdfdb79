// The end of a forward tile: the log-sum-exp of its rows to memory, the accumulator to the values of O.
#pragma once

#include <cute/tensor.hpp>

#include "mask.cuh"
#include "softmax.cuh"

namespace flash_cute {

using namespace cute;

// `lse`: of the tile's head, from row 0. `softmax` has finished.
template <int kRows, class Accumulator, class Coords>
CUTE_DEVICE void normalize(FwdParams const& params, float* lse, int first_row, OnlineSoftmax<kRows> const& softmax,
                           Accumulator& acc,        // (rows, head dim)
                           Coords const& coords) {  // (rows, head dim) -> (row, column)
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int const row = first_row + get<0>(coords(i, _0{}));
    if (get<1>(coords(_0{}, _0{})) == 0 && row < params.len_q) lse[row] = softmax.lse(i);
    // No key seen gives 0; keys seen, all with score -inf, give 0/0 as in the definition.
    bool const blind = !row_sees_a_key(params, row);
    float const inverse = softmax.inverse(i);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = blind ? 0.f : acc(i, j) * inverse;
  }
}

}  // namespace flash_cute
