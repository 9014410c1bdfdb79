// The elementwise part of a step: derivatives of modified scores, which wait in 16 bits until P is there, and dS^T from
// P as the dV warpgroup rounds it for its product.
#pragma once

#include <cuda_fp16.h>

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/score_bwd.cuh"
#include "../bwd/scores.cuh"

namespace flash_cute::sm90::bwd_large {

using namespace cute;
using bwd::RowStats;
using bwd::exponentiate;

// Raw scores to capped ones in units of the cap, and their derivatives, kept as 16-bit floats: half of their rounding
// error is that of P in bfloat16. Without a cap the scores stay, and the derivatives are not set.
template <class Scores, class Factors>
CUTE_DEVICE void cap_scores(Scores& scores, Factors& factors, ScoreTerms const& terms) {  // fragments of one layout
  CUTE_STATIC_ASSERT_V(size(scores) == size(factors));
  if (terms.softcap_scale == 0.f) return;
  flash_cute::cap_scores(scores, terms);
  auto pairs = recast<__half2>(factors);
  CUTE_UNROLL
  for (int i = 0; i < size(scores); i += 2) {
    pairs(i / 2) = __floats2half2_rn(fmaf(-scores(i), scores(i), 1.f), fmaf(-scores(i + 1), scores(i + 1), 1.f));
  }
}

// P to P times the derivatives.
template <class Scores, class Factors>
CUTE_DEVICE void multiply_by_derivatives(Scores& probabilities, Factors const& factors, ScoreTerms const& terms) {
  CUTE_STATIC_ASSERT_V(size(probabilities) == size(factors));
  if (terms.softcap_scale == 0.f) return;
  auto const pairs = recast<__half2>(factors);
  CUTE_UNROLL
  for (int i = 0; i < size(probabilities); i += 2) {
    float2 const pair = __half22float2(pairs(i / 2));
    probabilities(i) *= pair.x;
    probabilities(i + 1) *= pair.y;
  }
}

// dP^T to dS^T = P^T (dP^T - delta). `dscores` is (keys, rows).
template <class Probabilities, class Scores, int kRows>
CUTE_DEVICE void differentiate(Probabilities const& p, Scores& dscores, RowStats<kRows> const& stats) {
  using Element = typename Probabilities::value_type;
  static_assert(decltype(size<1>(dscores))::value * 4 == kRows);
  CUTE_STATIC_ASSERT_V(size(p) == size(dscores));
  // P^T is read as 32-bit words, in the order (row 0, row 1) of each 8 columns. Read as single elements, the compiler
  // would keep it unpacked, in twice the registers.
  auto const pairs = recast<uint32_t>(p);  // (MMA / 2, MMA_N, MMA_M)
  CUTE_UNROLL
  for (int j = 0; j < kRows / 4; j += 4) {
    float4 const delta = stats.fours[j / 4];
    CUTE_UNROLL
    for (int i = 0; i < size<0>(dscores); ++i) {
      float2 const left = unpack<Element>(pairs(i + j)), right = unpack<Element>(pairs(i + j + 2));
      dscores(i, j) = left.x * (dscores(i, j) - delta.x);
      dscores(i, j + 1) = left.y * (dscores(i, j + 1) - delta.y);
      dscores(i, j + 2) = right.x * (dscores(i, j + 2) - delta.z);
      dscores(i, j + 3) = right.y * (dscores(i, j + 3) - delta.w);
    }
  }
}

}  // namespace flash_cute::sm90::bwd_large
