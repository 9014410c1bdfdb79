// The end of a forward tile: stores the log-sum-exp of its rows and normalizes the accumulator to O.
#pragma once

#include <cute/tensor.hpp>

#include "sequence.cuh"
#include "sink.cuh"
#include "softmax.cuh"

namespace flash_cute {

using namespace cute;

// Lengths and mask of a tile's rows: for dense kernels the parameters themselves.
template <class Softmax>
CUTE_DEVICE float row_lse(FwdParams const&, Softmax const& softmax, int i, int /*row*/) {
  return softmax.lse(i);
}
template <class Softmax>
CUTE_DEVICE float row_lse(Sequence const& sequence, Softmax const& softmax, int i, int row) {
  return row < sequence.len_q ? softmax.lse(i) : -INFINITY;  // rows that are not used have scores, of zeros
}

// After softmax.finish(). `lse` points to row 0 of the sequence's head; inverse_of(i) is the factor of row i.
template <int kRows, bool kLazy, class Lengths, class Accumulator, class Coords, class Inverse>
CUTE_DEVICE void normalize(Lengths const& sequence, float* lse, int first_row,
                           OnlineSoftmax<kRows, kLazy> const& softmax,
                           Accumulator& acc,      // (rows, head dim)
                           Coords const& coords,  // (rows, head dim) -> (row, column)
                           Inverse const& inverse_of) {
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int const row = first_row + get<0>(coords(i, _0{}));
    if (get<1>(coords(_0{}, _0{})) == 0 && row < written_rows(sequence)) lse[row] = row_lse(sequence, softmax, i, row);
    // A row that sees no key gives 0; one whose scores are all -inf gives 0/0 = NaN, as by the definition.
    bool const blind = !row_sees_a_key(sequence, row);
    float const inverse = inverse_of(i);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = blind ? 0.f : acc(i, j) * inverse;
  }
}

// The factors that normalize the rows of a head.
template <class Element, class Softmax>
CUTE_DEVICE auto row_factors(FwdParams const& params, Softmax const& softmax, int head) {
  float const sink_log2 = head_sink_log2<Element>(params.sinks, head);
  return [&softmax, sink_log2](int i) { return softmax.inverse(i, sink_log2); };
}

}  // namespace flash_cute
