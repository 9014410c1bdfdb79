// Modified scores in the backward: the same scores as in the forward, see score.cuh, and their derivative by the raw
// ones, which a softcap makes 1 - tanh^2. ALiBi's is 1.
#pragma once

#include <cute/tensor.hpp>

#include "score.cuh"

namespace flash_cute {

using namespace cute;

// Raw scores to capped ones in units of the cap; the gradients by the capped scores become those by the raw ones. As a
// forward does it that has no polynomial, see modify_scores.
template <class Scores>
CUTE_DEVICE void cap_scores_by_tanh_and_differentiate(Scores& scores, Scores& dscores, ScoreTerms const& terms) {
  if (terms.softcap_scale == 0.f) return;
  float const scale = terms.softcap_scale * kTanhScale;
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) {
    scores(i) = tanh_of_scaled(scores(i) * scale);
    dscores(i) *= fmaf(-scores(i), scores(i), 1.f);
  }
}

// Adds the bias of ALiBi. `offset`: the position of the tile's first row minus its first column.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void add_bias(Scores& scores,         // (rows, columns)
                          Coords const& tScS,     // (rows, columns) -> (row, column)
                          Coords0 const& tScS_0,  // the same for thread 0, static
                          float slope, int offset) {
  if (slope == 0.f) return;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    float const distance = static_cast<float>(offset + thread_distance(tScS) + get<0>(tScS_0(i, _0{})));
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      float const column = static_cast<float>(get<1>(tScS_0(_0{}, j)));
      scores(i, j) = fmaf(-slope, fabsf(distance - column), scores(i, j));
    }
  }
}

// The same for a transposed tile.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void add_bias_transposed(Scores& scores,         // (columns, rows)
                                     Coords const& tScS,     // (columns, rows) -> (column, row)
                                     Coords0 const& tScS_0,  // the same for thread 0, static
                                     float slope, int offset) {
  if (slope == 0.f) return;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    float const distance = static_cast<float>(offset - thread_distance(tScS) - get<0>(tScS_0(i, _0{})));
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      float const row = static_cast<float>(get<1>(tScS_0(_0{}, j)));
      scores(i, j) = fmaf(-slope, fabsf(distance + row), scores(i, j));
    }
  }
}

}  // namespace flash_cute
