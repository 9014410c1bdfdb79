// Online softmax in base 2 whose numerators are rounded to e4m3, of 2^-9 to 448 = 2^8.81. As in core/softmax.cuh the
// maximum in use lags the true one, here by at most kLag in the exponent: a row's largest numerator is between 2^7 and
// 2^8.8. A row takes a new maximum when it exceeds that, whatever its neighbours do, and a warp multiplies its
// accumulator only when one of its rows does. Each thread checks its own columns.
//
// O is divided by the sum of the rounded numerators, which the tensor cores compute as P times ones: what all values
// have in common does not see the rounding then, nor the few bits that float8 products keep of their sums. The exact
// LSE is of the unrounded ones, whose sum takes an instruction for each: a call that does not use the LSE leaves it
// out.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "core/softmax.cuh"
#include "key_order.h"

namespace flash_cute::sm90::forward::fp8_rows {

using namespace cute;

template <bool kExactLse>
struct Softmax {
  static constexpr int kRows = 2;       // per thread
  static constexpr float kLargest = 7;  // the exponent of the largest numerator when a maximum is taken
  static constexpr float kLag = 1.8f;
  static constexpr float kLn2 = 0.693147180559945f;

  float offset[kRows];   // an exponent is score * scale - offset; at first lower than that of any finite score
  float sum[kRows];      // of the rounded numerators, of the tiles whose product has been added to O
  float exact_sum[kExactLse ? kRows : 1];  // of the unrounded ones; over this thread's columns only until finish()

  CUTE_DEVICE Softmax() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      offset[i] = -FLT_MAX;
      sum[i] = 0.f;
      if constexpr (kExactLse) exact_sum[i] = 0.f;
    }
  }

  // Takes new maxima of the rows that need one, and multiplies what there is of them. `scale`: of this tile's scores.
  template <class Scores, class Shift, class Accumulator>
  CUTE_DEVICE void update_max(Scores const& scores,  // (rows, columns)
                              float scale, Shift const& shift,
                              Accumulator& acc) {    // (rows, columns)
    float even[kRows], odd[kRows], largest[kRows];  // four chains: two would expose the latency
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      even[i] = scores(i, _0{});
      odd[i] = scores(i, _1{});
    }
    CUTE_UNROLL
    for (int j = 2; j < size<1>(scores); j += 2) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        even[i] = fmaxf(even[i], scores(i, j));
        odd[i] = fmaxf(odd[i], scores(i, j + 1));
      }
    }
    bool grown = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      largest[i] = fmaxf(even[i], odd[i]) + shift_of(shift, i);  // a shift is of the thread's columns
      grown |= exceeds(i, largest[i], scale);
    }
    if (!__any_sync(0xffffffff, grown)) return;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const of_row = quad_reduce(largest[i], [](float a, float b) { return fmaxf(a, b); });
      float const next = exceeds(i, of_row, scale) ? of_row * scale - kLargest : offset[i];
      float const factor = exp2_approx(offset[i] - next);
      offset[i] = next;
      sum[i] *= factor;
      if constexpr (kExactLse) exact_sum[i] *= factor;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= factor;
    }
  }

  // Scores to numerators, of group `group` of 32 keys.
  template <class Scores, class Shift>
  CUTE_DEVICE void numerators(Scores& scores,  // (rows, columns)
                              int group, float scale, Shift const& shift) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const subtracted = offset[i] - shift_of(shift, i) * scale;
      CUTE_UNROLL
      for (int j = 8 * group; j < 8 * group + 8; ++j) {
        scores(i, j) = exp2_approx(scores(i, j) * scale - subtracted);
        if constexpr (kExactLse) exact_sum[i] += scores(i, j);
      }
    }
  }

  CUTE_DEVICE void finish() {
    if constexpr (kExactLse) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) exact_sum[i] = quad_reduce(exact_sum[i], [](float a, float b) { return a + b; });
    }
  }

  // As those of OnlineSoftmax.
  CUTE_DEVICE float inverse(int i, float sink_log2) const {
    return reciprocal(sum[i] + exp2_approx(sink_log2 - offset[i]));
  }
  CUTE_DEVICE float lse(int i) const {
    float const of_lse = kExactLse ? exact_sum[i] : sum[i];
    return of_lse == 0.f ? -INFINITY : (offset[i] + log2_approx(of_lse)) * kLn2;
  }

 private:
  // Whether a score of row i leaves the range of e4m3.
  CUTE_DEVICE bool exceeds(int i, float score, float scale) const {
    return fmaf(score, scale, -offset[i]) > kLargest + kLag;
  }
  CUTE_DEVICE static float shift_of(OnlineSoftmax<2>::NoShift, int) { return 0.f; }
  CUTE_DEVICE static float shift_of(OnlineSoftmax<2>::Shift const& shift, int i) { return shift[i]; }
};

// Numerators of 32 keys to the A operand of P V.
template <class Scores, class Fragment>
CUTE_DEVICE void convert_numerators(Scores const& scores,  // (rows, columns)
                                    int group,
                                    Fragment& tOrP) {      // (MMA, MMA_M, MMA_K)
  auto words = recast<uint32_t>(tOrP);
  CUTE_UNROLL
  for (int j = 2 * group; j < 2 * group + 2; ++j) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      asm("{ .reg .b16 low, high;\n"
          "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
          "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
          "mov.b32 %0, {low, high}; }\n"
          : "=r"(words(word_of_numerators(i, j)))
          : "f"(scores(i, 4 * j)), "f"(scores(i, 4 * j + 1)), "f"(scores(i, 4 * j + 2)), "f"(scores(i, 4 * j + 3)));
    }
  }
}

}  // namespace flash_cute::sm90::forward::fp8_rows
