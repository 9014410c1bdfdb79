// Modified scores in the backward: the same scores as in the forward, see score.cuh, and their derivative by the raw
// ones, which a softcap makes 1 - tanh^2. ALiBi's is 1.
#pragma once

#include <cuda_fp16.h>

#include <cute/tensor.hpp>

#include "score.cuh"

namespace flash_cute {

using namespace cute;

// Raw scores to capped ones in units of the cap, and their derivatives, kept as 16-bit floats: half of their rounding
// error is that of P in bfloat16. Without a cap the scores stay, and the derivatives are not set.
template <class Scores, class Factors>
CUTE_DEVICE void cap_scores(Scores& scores, Factors& factors, ScoreTerms const& terms) {  // fragments of one layout
  CUTE_STATIC_ASSERT_V(size(scores) == size(factors));
  if (terms.softcap_scale == 0.f) return;
  cap_scores(scores, terms);
  auto pairs = recast<__half2>(factors);
  CUTE_UNROLL
  for (int i = 0; i < size(scores); i += 2) {
    pairs(i / 2) = __floats2half2_rn(fmaf(-scores(i), scores(i), 1.f), fmaf(-scores(i + 1), scores(i + 1), 1.f));
  }
}

// The gradient by the capped scores to that by the raw ones, elements [begin, end).
template <class Scores, class Factors>
CUTE_DEVICE void multiply_by_derivatives(Scores& dscores, Factors const& factors, ScoreTerms const& terms, int begin,
                                         int end) {
  CUTE_STATIC_ASSERT_V(size(dscores) == size(factors));
  if (terms.softcap_scale == 0.f) return;
  auto const pairs = recast<__half2>(factors);
  CUTE_UNROLL
  for (int i = begin; i < end; i += 2) {
    float2 const pair = __half22float2(pairs(i / 2));
    dscores(i) *= pair.x;
    dscores(i + 1) *= pair.y;
  }
}

// The same where the gradient by the capped scores is there already: it becomes that by the raw ones.
template <class Scores>
CUTE_DEVICE void cap_scores_and_differentiate(Scores& scores, Scores& dscores, ScoreTerms const& terms) {
  if (terms.softcap_scale == 0.f) return;
  cap_scores(scores, terms);
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) dscores(i) *= fmaf(-scores(i), scores(i), 1.f);
}

// The same as a forward does it that has no polynomial, see modify_scores.
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
