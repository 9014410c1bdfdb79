// Modified scores in the backward: P and, for dS, P times the derivative of the capped score by the raw one, which is
// 1 - tanh^2. The bias of ALiBi has the derivative 1. It is added to the exponent, so that the derivative can be
// computed from the capped score.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

#include "../../core/registers.cuh"
#include "../../core/score_bwd.cuh"
#include "../../core/softmax.cuh"

namespace flash_cute::sm90::bwd {

using namespace cute;

// Where row i of a dense batch has the position i + shift.
CUTE_DEVICE int dense_shift(BwdParams const& params) {
  return params.sequences.bottom_right ? params.len_k - params.len_q : 0;
}

// Whether the log-sum-exps (base 2) of all rows of the warp show that the softcap's polynomial serves their scores, so
// that no score has to be compared. A capped score is at most its row's log-sum-exp, which bounds the positive ones.
// For negative ones beyond the polynomial's limit it gives less than tanh, and P, which is below 2^-kNegligible, stays
// below. Rows that see no key, with +inf, may have any scores. Not with biases, which the log-sum-exp contains.
template <class... Lse>
CUTE_DEVICE bool lse_bounds_scores(ScoreTerms const& terms, float scale_log2, Lse... lse_log2) {
  constexpr float kNegligible = 20.f;
  constexpr float kTanhLimit = 0.4621f;  // of SoftcapPolynomial, rounded down
  float const reach = terms.slopes == nullptr ? kTanhLimit * scale_log2 - kNegligible / 2 : -1.f;
  bool const outside = ((fabsf(lse_log2 - kNegligible / 2) > reach && lse_log2 != INFINITY) || ...);
  return terms.softcap.limit > 0.f && !__any_sync(0xffffffff, outside);
}

// The same for the rows of a tile in shared memory, in any order.
template <int kRows>
CUTE_DEVICE bool lse_of_tile_bounds_scores(ScoreTerms const& terms, float scale_log2, float const* lse_log2) {
  int const lane = fresh_lane_index();
  if constexpr (kRows == 128) {
    float4 const lse = reinterpret_cast<float4 const*>(lse_log2)[lane];
    return lse_bounds_scores(terms, scale_log2, lse.x, lse.y, lse.z, lse.w);
  } else {
    static_assert(kRows == 64);
    float2 const lse = reinterpret_cast<float2 const*>(lse_log2)[lane];
    return lse_bounds_scores(terms, scale_log2, lse.x, lse.y);
  }
}

CUTE_DEVICE float cap_by_polynomial(float score, SoftcapPolynomial const& polynomial) {
  float const square = score * score;
  return score * fmaf(fmaf(polynomial.c[2], square, polynomial.c[1]), square, polynomial.c[0]);
}

// Raw scores to capped ones, in units of the cap. `bounded`: by lse_bounds_scores; equal in all lanes.
template <class Scores>
CUTE_DEVICE void cap_scores(Scores& scores, ScoreTerms const& terms, bool bounded) {
  if (!bounded) {
    constexpr int kChains = 4;  // for the latency
    float largest[kChains] = {};
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) largest[i % kChains] = fmaxf(largest[i % kChains], fabsf(scores(i)));
    float const all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    bounded = !__any_sync(0xffffffff, all > terms.softcap.limit);
  }
  if (bounded) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = cap_by_polynomial(scores(i), terms.softcap);
  } else {
    float const scale = terms.softcap_scale * kTanhScale;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of_scaled(scores(i) * scale);
  }
}

// 1 - t^2, and 0 where that is negative or NaN: rounding may take |t| above 1, and a mask takes t to -inf, where P is
// 0.
CUTE_DEVICE float derivative_of_capped(float t) {
  float derivative;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(derivative) : "f"(-t), "f"(t), "f"(1.f));
  return derivative;
}

// Two numbers as a 32-bit word of Element.
template <class Element>
CUTE_DEVICE uint32_t pack(float left, float right) {
  auto const pair = cutlass::NumericArrayConverter<Element, float, 2>{}({left, right});
  return reinterpret_cast<uint32_t const&>(pair);
}

// What of a step's scores is modified. The common cases have code of their own. kBounded: a cap, of scores that are
// still raw, with the polynomial: its multiply-adds then run beside the exponentials, which they need not wait for.
enum class Terms { kBounded, kCap, kBias, kBoth };
constexpr bool has_cap(Terms terms) { return terms != Terms::kBias; }
constexpr bool has_bias(Terms terms) { return terms == Terms::kBias || terms == Terms::kBoth; }

// Calls function(C<Terms>) for scores that are capped already, if they have a cap.
template <class Function>
CUTE_DEVICE void with_terms(ScoreTerms const& terms, Function&& function) {
  if (terms.softcap_scale == 0.f) {
    function(C<Terms::kBias>{});
  } else if (terms.slopes == nullptr) {
    function(C<Terms::kCap>{});
  } else {
    function(C<Terms::kBoth>{});
  }
}

// The biases of a tile: -slope * |position - column|, in base 2.
struct TileBias {
  float slope_log2;
  int offset;  // the position of the tile's first row minus its first column
};

// Transposed scores, capped if they are, to P times the derivative. P, rounded, is in rP.
template <Terms kTerms, class Scores, class Coords, class Coords0, class Stats, class Rounded>
CUTE_DEVICE void exponentiate_modified(Scores& scores,         // (keys, rows)
                                       Coords const& tScS,     // (keys, rows) -> (key, row)
                                       Coords0 const& tScS_0,  // the same for thread 0, static
                                       Stats const& lse_log2, ScoreTerms const& terms, float scale_log2,
                                       TileBias const& bias,
                                       Rounded& rP) {  // (MMA, MMA_N, MMA_M)
  using Element = typename Rounded::value_type;
  CUTE_STATIC_ASSERT_V(size(scores) == size(rP));
  auto words = recast<uint32_t>(rP);  // (MMA / 2, MMA_N, MMA_M), in the order (row 0, row 1) of each 8 columns
  CUTE_UNROLL
  for (int j = 0; j < size<1>(scores); j += 2) {
    float4 const four = lse_log2.fours[j / 4];
    float const lse[2] = {j % 4 == 0 ? four.x : four.z, j % 4 == 0 ? four.y : four.w};
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      float p[2];
      CUTE_UNROLL
      for (int k = 0; k < 2; ++k) {
        float score = scores(i, j + k);
        if constexpr (kTerms == Terms::kBounded) score = cap_by_polynomial(score, terms.softcap);
        float offset = -lse[k];
        if constexpr (has_bias(kTerms)) {
          int const key = get<0>(tScS_0(i, _0{}));
          float const distance = static_cast<float>(bias.offset - thread_distance(tScS) - key);
          float const row = static_cast<float>(get<1>(tScS_0(_0{}, j + k)));
          offset = fmaf(-bias.slope_log2, fabsf(distance + row), offset);
        }
        p[k] = exp2_approx(fmaf(score, scale_log2, offset));
        scores(i, j + k) = has_cap(kTerms) ? p[k] * derivative_of_capped(score) : p[k];
      }
      words(i + j) = pack<Element>(p[0], p[1]);
    }
  }
}

}  // namespace flash_cute::sm90::bwd
