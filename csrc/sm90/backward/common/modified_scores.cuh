// Modified scores in the backward: P and, for dS, P times the derivative of the capped score by the raw one, which is
// 1 - tanh^2. The bias of ALiBi has the derivative 1. It is added to the exponent, so that the derivative can be
// computed from the capped score.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

#include "core/registers.cuh"
#include "core/score_bwd.cuh"
#include "core/softmax.cuh"
#include "scores.cuh"

namespace flash_cute::sm90::backward {

using namespace cute;

// How far the scores of a warp's rows reach, but for those whose P is nothing: a softcap's polynomials serve scores of
// kNear and of kFar, see softcap.h.
enum class Reach { kAny, kFar, kNear };

// It follows from the log-sum-exps (base 2) of the rows, so that no score has to be compared. A capped score is at most
// its row's log-sum-exp, which bounds the positive ones. For negative ones beyond a polynomial's limit it gives less
// than at the limit, where P is below 2^-kNegligible. Rows that see no key, with +inf, may have any scores. Not with
// biases, which the log-sum-exp contains.
template <class... Lse>
CUTE_DEVICE Reach reach_of_rows(ScoreTerms const& terms, float scale_log2, Lse... lse_log2) {
  constexpr float kNegligible = 20.f;
  constexpr float kFarTanh = 0.4621f;  // of SoftcapPolynomial, rounded down
  if (terms.softcap.limit <= 0.f || terms.slopes != nullptr) return Reach::kAny;
  float distance = 0.f;  // the largest, from the middle of the range that a polynomial serves
  ((distance = fmaxf(distance, lse_log2 == INFINITY ? 0.f : fabsf(lse_log2 - kNegligible / 2))), ...);
  auto const beyond = [&](float tanh_limit) {
    return __any_sync(0xffffffff, distance > tanh_limit * scale_log2 - kNegligible / 2);
  };
  if (!beyond(static_cast<float>(kNearTanh))) return Reach::kNear;
  return beyond(kFarTanh) ? Reach::kAny : Reach::kFar;
}

// The same for the rows of a tile in shared memory, in any order.
template <int kRows>
CUTE_DEVICE Reach reach_of_tile(ScoreTerms const& terms, float scale_log2, float const* lse_log2) {
  int const lane = fresh_lane_index();
  if constexpr (kRows == 128) {
    float4 const lse = reinterpret_cast<float4 const*>(lse_log2)[lane];
    return reach_of_rows(terms, scale_log2, lse.x, lse.y, lse.z, lse.w);
  } else {
    static_assert(kRows == 64);
    float2 const lse = reinterpret_cast<float2 const*>(lse_log2)[lane];
    return reach_of_rows(terms, scale_log2, lse.x, lse.y);
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

// What of a step's scores is modified. The common cases have code of their own. kNear and kFar: a cap, of scores that
// are still raw or masked, with the polynomial: its multiply-adds then run beside the exponentials, whose unit takes as
// long as 8 instructions for each. Per score kNear takes 6.5 instructions, kFar 8.5 and a plain score 2.5.
enum class Terms { kNear, kFar, kCap, kBias, kBoth };
constexpr bool has_bias(Terms terms) { return terms == Terms::kBias || terms == Terms::kBoth; }

// Calls function(C<Terms>) for scores that are capped already if they have a cap, and may reach anywhere.
template <class Function>
CUTE_DEVICE void with_terms(ScoreTerms const& terms, Reach reach, Function&& function) {
  if (reach == Reach::kNear) {
    function(C<Terms::kNear>{});
  } else if (reach == Reach::kFar) {
    function(C<Terms::kFar>{});
  } else if (terms.softcap_scale == 0.f) {
    function(C<Terms::kBias>{});
  } else if (terms.slopes == nullptr) {
    function(C<Terms::kCap>{});
  } else {
    function(C<Terms::kBoth>{});
  }
}

// P of a score, and times the derivative. `offset`: the negative log-sum-exp and the bias, in base 2. A score of -inf,
// where a mask is, has a P of 0.
struct ModifiedP {
  float p;
  float times_derivative;
};
template <Terms kTerms>
CUTE_DEVICE ModifiedP modified_p(float score, ScoreTerms const& terms, float scale_log2, float offset) {
  if constexpr (kTerms == Terms::kNear) {
    float w;
    asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(w) : "f"(score), "f"(score * terms.softcap.near_square));
    float const p = exp2_approx(fmaf(score, fmaf(terms.softcap.near_log2[1], w, terms.softcap.near_log2[0]), offset));
    return {.p = p, .times_derivative = fmaf(-w, p, p)};
  } else {
    if constexpr (kTerms == Terms::kFar) score *= softcap_factor(terms.softcap.c, score * score);
    float const p = exp2_approx(fmaf(score, scale_log2, offset));
    return {.p = p, .times_derivative = kTerms == Terms::kBias ? p : p * derivative_of_capped(score)};
  }
}

// The biases of a tile: -slope * |position - column|, in base 2.
struct TileBias {
  float slope_log2;
  int offset;  // the position of the tile's first row minus its first column
};

// The same as set_to_negative, but in the same place for the compiler: it would move what all kinds of scores have in
// common behind them, where no exponentials hide it.
template <class Scores, int kRows>
CUTE_DEVICE void set_to_negative_here(Scores&& dscores, RowStats<kRows> const& stats) {  // (keys, rows)
  static_assert(decltype(size<1>(dscores))::value * 4 == kRows);
  CUTE_UNROLL
  for (int j = 0; j < kRows / 4; j += 4) {
    float4 const four = stats.fours[j / 4];
    float const values[4] = {four.x, four.y, four.z, four.w};
    CUTE_UNROLL
    for (int k = 0; k < 4; ++k) {
      CUTE_UNROLL
      for (int i = 0; i < size<0>(dscores); ++i) asm("neg.f32 %0, %1;" : "=f"(dscores(i, j + k)) : "f"(values[k]));
    }
  }
}

// Transposed scores, capped if they are, to P times the derivative. P, rounded, is in rP. `before_four(j)` is called
// before the scores of the j-th four rows, whose log-sum-exps it may set.
template <Terms kTerms, class Scores, class Coords, class Coords0, class Stats, class BeforeFour, class Rounded>
CUTE_DEVICE void exponentiate_modified(Scores& scores,         // (keys, rows)
                                       Coords const& tScS,     // (keys, rows) -> (key, row)
                                       Coords0 const& tScS_0,  // the same for thread 0, static
                                       Stats const& lse_log2, ScoreTerms const& terms, float scale_log2,
                                       TileBias const& bias, BeforeFour const& before_four,
                                       Rounded& rP) {  // (MMA, MMA_N, MMA_M)
  using Element = typename Rounded::value_type;
  CUTE_STATIC_ASSERT_V(size(scores) == size(rP));
  auto words = recast<uint32_t>(rP);  // (MMA / 2, MMA_N, MMA_M), in the order (row 0, row 1) of each 8 columns
  [[maybe_unused]] float const distance = static_cast<float>(bias.offset - thread_distance(tScS));
  CUTE_UNROLL
  for (int j = 0; j < size<1>(scores); j += 2) {
    if (j % 4 == 0) before_four(j / 4);
    float4 const four = lse_log2.fours[j / 4];
    float const lse[2] = {j % 4 == 0 ? four.x : four.z, j % 4 == 0 ? four.y : four.w};
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      ModifiedP both[2];
      CUTE_UNROLL
      for (int k = 0; k < 2; ++k) {
        float offset = -lse[k];
        if constexpr (has_bias(kTerms)) {
          // One addition for all scores of the thread that have the same distance.
          int const row_from_key = get<1>(tScS_0(_0{}, j + k)) - get<0>(tScS_0(i, _0{}));
          offset = fmaf(-bias.slope_log2, fabsf(distance + static_cast<float>(row_from_key)), offset);
        }
        both[k] = modified_p<kTerms>(scores(i, j + k), terms, scale_log2, offset);
        scores(i, j + k) = both[k].times_derivative;
      }
      words(i + j) = pack<Element>(both[0].p, both[1].p);
    }
  }
}

}  // namespace flash_cute::sm90::backward
