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

// Whether row i of a thread sees a key.
template <class Lengths>
CUTE_DEVICE bool row_sees_a_key(Lengths const& lengths, int row, int /*i*/) {
  return row_sees_a_key(lengths, row);
}

// After softmax.finish(). `lse` points to row 0 of the sequence's head; inverse_of(i) is the factor of row i.
template <class Softmax, class Lengths, class Accumulator, class Coords, class Inverse>
CUTE_DEVICE void normalize(Lengths const& sequence, float* lse, int first_row, Softmax const& softmax,
                           Accumulator& acc,      // (rows, head dim)
                           Coords const& coords,  // (rows, head dim) -> (row, column)
                           Inverse const& inverse_of) {
  // A row that sees no key gives 0, whatever is in its accumulator; one whose scores are all -inf gives 0/0 = NaN, as
  // by the definition.
  constexpr int kRows = decltype(size<0>(acc))::value;
  bool blind[kRows], some_blind = false;
  float inverse[kRows];
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    int const row = first_row + get<0>(coords(i, _0{}));
    if (get<1>(coords(_0{}, _0{})) == 0 && row < written_rows(sequence)) lse[row] = row_lse(sequence, softmax, i, row);
    blind[i] = !row_sees_a_key(sequence, row, i);
    some_blind |= blind[i];
    inverse[i] = blind[i] ? 0.f : inverse_of(i);
  }
  if (__any_sync(0xffffffff, some_blind)) {  // rare: a choice per element would cost the others an instruction each
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = blind[i] ? 0.f : acc(i, j);
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= inverse[i];
  }
}

// The factors that normalize the rows of a head.
template <class Element, class Softmax>
CUTE_DEVICE auto row_factors(FwdParams const& params, Softmax const& softmax, int head) {
  float const sink_log2 = head_sink_log2<Element>(params.sinks, head);
  return [&softmax, sink_log2](int i) { return softmax.inverse(i, sink_log2); };
}

}  // namespace flash_cute
