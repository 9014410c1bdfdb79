// What a kernel makes of the scores q.k before the mask: nothing, or a softcap (Gemma 2, arXiv 2408.00118) and ALiBi
// biases (arXiv 2108.12409).
#pragma once

#include <cute/tensor.hpp>

#include "softmax.cuh"

namespace flash_cute {

using namespace cute;

CUTE_DEVICE float clamp_keeping_nan(float x, float low, float high) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(low));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(high));
  return x;
}

// tanh(y) from z = kTanhScale * y, with a relative error of at most 2.5e-5: z P(z^2) / Q(z^2), minimax for |y| <= 5.8,
// and constant beyond. It takes one instruction of the special-function unit, which limits the kernels at head dim 128
// since it also computes the exponentials of the softmax. 1 - 2 / (1 + exp(2 y)) takes two; tanh.approx takes one, too,
// but its relative error of 5e-4 is too large for the log-sum-exp. The scale makes the leading coefficients of P and Q
// equal, so that they cancel: all constants are addends, which are immediates. As factors they take registers.
constexpr float kTanhScale = 0.03758956275517571f;
CUTE_DEVICE float tanh_of_scaled(float z) {
  constexpr float kEnd = 5.8f * kTanhScale;
  z = clamp_keeping_nan(z, -kEnd, kEnd);
  float const u = z * z;
  float const p = fmaf(u + 0.10576097059514178f, u, 0.0012971520771215138f);
  float const q = fmaf(fmaf(u + 0.43358835689823977f, u, 0.015476928441675603f), u, 4.8759664223607274e-05f);
  return z * p * reciprocal(q);
}

// A head's slope in the units of the modified scores; 0 where there are no slopes. It is limited, so that times any
// distance it is finite.
CUTE_DEVICE float head_slope(ScoreTerms const& terms, int batch, int head) {
  if (terms.slopes == nullptr) return 0.f;
  float const slope = __ldg(terms.slopes + batch * terms.slopes_batch_stride + head * terms.slopes_head_stride);
  float result = terms.slope_factor * slope;
  asm("max.NaN.f32 %0, %0, 0fefa18f08;\n\tmin.NaN.f32 %0, %0, 0f6fa18f08;" : "+f"(result));
  return result;
}

// A thread's part of the distance from row to column, see add_biases.
template <class Coords>
CUTE_DEVICE int thread_distance(Coords const& tScS) {  // (rows, columns) -> (row, column)
  return get<0>(tScS(_0{}, _0{})) - get<1>(tScS(_0{}, _0{}));
}

// Whether one of the warp's scores is past the polynomial's limit.
template <class Scores>
CUTE_DEVICE bool exceed_polynomial(Scores const& scores, SoftcapPolynomial const& softcap) {
  constexpr int kChains = 4;  // for the latency
  float largest[kChains] = {};
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) largest[i % kChains] = fmaxf(largest[i % kChains], fabsf(scores(i)));
  float const all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  return __any_sync(0xffffffff, all > softcap.limit);
}

template <class Scores>
CUTE_DEVICE void cap_scores_by_tanh(Scores& scores, ScoreTerms const& terms) {
  float const scale = terms.softcap_scale * kTanhScale;
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) scores(i) = tanh_of_scaled(scores(i) * scale);
}

CUTE_DEVICE float softcap_factor(float const (&c)[3], float square) {
  return fmaf(fmaf(c[2], square, c[1]), square, c[0]);
}

// Caps the raw scores q.k of one tile, see ScoreTerms. Per score, five instructions where all scores of the warp are
// within the polynomial's limit, half the cap, else twelve and one of the special-function unit. Both keep NaN.
template <class Scores>
CUTE_DEVICE void cap_scores(Scores& scores, ScoreTerms const& terms) {  // (rows, columns)
  if (exceed_polynomial(scores, terms.softcap)) {
    cap_scores_by_tanh(scores, terms);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) *= softcap_factor(terms.softcap.c, scores(i) * scores(i));
  }
}

// Adds ALiBi's biases to the scores of one tile. `distance`: the row's position minus the column, of thread 0's first
// element, plus the thread's own part of it.
template <class Scores, class Coords0>
CUTE_DEVICE void add_biases(Scores& scores,         // (rows, columns)
                            Coords0 const& tScS_0,  // (rows, columns) -> (row, column) of thread 0, static
                            float slope, int distance) {
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    float const row_distance = static_cast<float>(distance + get<0>(tScS_0(i, _0{})));
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      float const column = static_cast<float>(get<1>(tScS_0(_0{}, j)));
      scores(i, j) = fmaf(-slope, fabsf(row_distance - column), scores(i, j));
    }
  }
}

// The same for a tile of which every column that a row sees is on one side of the row's position, so that |distance| is
// linear: the columns' part alone is added, one instruction per score; `shift` gets what is missing of each row's.
// `slope`: negative where the columns are on the right.
template <class Scores, class Coords0, int kRows>
CUTE_DEVICE void add_linear_biases(Scores& scores,         // (rows, columns)
                                   Coords0 const& tScS_0,  // (rows, columns) -> (row, column) of thread 0, static
                                   float slope, int distance, float (&shift)[kRows]) {
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    shift[i] = -slope * static_cast<float>(distance + get<0>(tScS_0(i, _0{})));
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      scores(i, j) = fmaf(slope, static_cast<float>(get<1>(tScS_0(_0{}, j))), scores(i, j));
    }
  }
}

// Raw scores of one tile to modified ones, in few registers: without the polynomial and the linear form. `offset`: the
// position of the tile's first row minus its first column.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void modify_scores(Scores& scores,         // (rows, columns)
                               Coords const& tScS,     // (rows, columns) -> (row, column)
                               Coords0 const& tScS_0,  // the same for thread 0, static
                               ScoreTerms const& terms, float slope, int offset) {
  if (terms.softcap_scale != 0.f) cap_scores_by_tanh(scores, terms);
  if (slope != 0.f) add_biases(scores, tScS_0, slope, offset + thread_distance(tScS));
}

}  // namespace flash_cute
