// The elementwise part of a step: derivatives of modified scores, which wait in 16 bits until P is there, and dS^T: of
// one CTA from P as the dV warpgroup rounds it for its product, of sides from P in float32.
#pragma once

#include <cuda_fp16.h>

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/score_bwd.cuh"
#include "sm90/backward/common/scores.cuh"
#include "sm90/common/warpgroup.cuh"
#include "task.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

using namespace cute;
using backward::RowStats;
using backward::exponentiate;

// Statistics in the order of the rows, as the thread's columns of S^T have them: 2q, 2q + 1, 8 + 2q and 9 + 2q of every
// 16 for thread q of a quad.
template <int kRows = kTileRows>
CUTE_DEVICE RowStats<kRows> read_statistics(float const* statistics) {
  float const* const own = statistics + fresh_lane_index() % 4 * 2;
  RowStats<kRows> result;
  CUTE_UNROLL
  for (int i = 0; i < kRows / 16; ++i) {
    float2 const low = *reinterpret_cast<float2 const*>(own + 16 * i);
    float2 const high = *reinterpret_cast<float2 const*>(own + 16 * i + 8);
    result.fours[i] = make_float4(low.x, low.y, high.x, high.y);
  }
  return result;
}

// The statistics of a thread's two rows.
struct OwnStatistics {
  float lse_log2[2];
  float delta[2];

  CUTE_DEVICE OwnStatistics(BwdParams const& params, RowTileTask const& tile) {
    int64_t const first = first_statistic(params, tile.head, tile.first_row_tile, tile.m_block);
    int const row = first_row_of_thread(threadIdx.x);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      lse_log2[i] = params.lse_log2[first + row + 8 * i];
      delta[i] = params.delta[first + row + 8 * i];
    }
  }
};

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

// dP^T - delta to dS^T, its product with P^T.
template <class Probabilities, class Scores>
CUTE_DEVICE void differentiate(Probabilities const& p, Scores& dscores) {  // fragments of one layout
  using Element = typename Probabilities::value_type;
  CUTE_STATIC_ASSERT_V(size(p) == size(dscores));
  // P^T is read as 32-bit words. Read as single elements, the compiler would keep it unpacked, in twice the registers.
  auto const pairs = recast<uint32_t>(p);
  CUTE_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    float2 const pair = unpack<Element>(pairs(i));
    dscores(2 * i) *= pair.x;
    dscores(2 * i + 1) *= pair.y;
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
