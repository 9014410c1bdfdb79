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

// tanh with a relative error of at most 2.4e-5: y P(y^2) / Q(y^2), minimax on [-5.8, 5.8], and constant beyond. It
// takes one instruction of the special-function unit, which limits the kernels at head dim 128 since it also computes
// the exponentials of the softmax. 1 - 2 / (1 + exp(2 y)) takes two; tanh.approx takes one, too, but its relative error
// of 5e-4 is too large for the log-sum-exp.
CUTE_DEVICE float fast_tanh(float y) {
  constexpr float kEnd = 5.8f;
  constexpr float kP[] = {0.999994158744812f, 0.11520373076200485f, 0.0015391312772408128f};
  constexpr float kQ[] = {1.f, 0.4484960436820984f, 0.017753582447767258f, 5.7855271734297276e-05f};
  y = clamp_keeping_nan(y, -kEnd, kEnd);
  float const u = y * y;
  float const p = fmaf(fmaf(kP[2], u, kP[1]), u, kP[0]);
  float const q = fmaf(fmaf(fmaf(kQ[3], u, kQ[2]), u, kQ[1]), u, kQ[0]);
  return y * p * reciprocal(q);
}

// A head's slope in the units of the modified scores; 0 where there are no slopes.
CUTE_DEVICE float head_slope(ScoreTerms const& terms, int batch, int head) {
  if (terms.slopes == nullptr) return 0.f;
  return terms.slope_factor * __ldg(terms.slopes + batch * terms.slopes_batch_stride + head * terms.slopes_head_stride);
}

// A thread's part of the distance from row to column, see add_biases.
template <class Coords>
CUTE_DEVICE int thread_distance(Coords const& tScS) {  // (rows, columns) -> (row, column)
  return get<0>(tScS(_0{}, _0{})) - get<1>(tScS(_0{}, _0{}));
}

// Caps the raw scores q.k of one tile, see ScoreTerms. Per score, five instructions where all scores of the warp are
// within the polynomial's limit, half the cap, else twelve and one of the special-function unit. Both keep NaN.
template <class Scores>
CUTE_DEVICE void cap_scores(Scores& scores, ScoreTerms const& terms) {  // (rows, columns)
  constexpr int kChains = 4;  // for the latency
  float largest[kChains] = {};
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) largest[i % kChains] = fmaxf(largest[i % kChains], fabsf(scores(i)));
  float const all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  if (__any_sync(0xffffffff, all > terms.softcap.limit)) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = fast_tanh(scores(i) * terms.softcap_scale);
  } else {
    float const* const c = terms.softcap.c;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      float const square = scores(i) * scores(i);
      scores(i) *= fmaf(fmaf(c[2], square, c[1]), square, c[0]);
    }
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

// Raw scores of one tile to modified ones. `offset`: the position of the tile's first row minus its first column.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void modify_scores(Scores& scores,         // (rows, columns)
                               Coords const& tScS,     // (rows, columns) -> (row, column)
                               Coords0 const& tScS_0,  // the same for thread 0, static
                               ScoreTerms const& terms, float slope, int offset) {
  if (terms.softcap_scale != 0.f) cap_scores(scores, terms);
  if (slope != 0.f) add_biases(scores, tScS_0, slope, offset + thread_distance(tScS));
}

}  // namespace flash_cute
