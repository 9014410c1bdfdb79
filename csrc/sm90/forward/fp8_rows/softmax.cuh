// Online softmax in base 2 whose numerators are rounded to e4m3. The maximum is exact at each tile: a lagging one, as
// core/softmax.cuh has it, would leave numerators of up to 2^8 above the largest, where e4m3 ends. The largest numerator
// is 2^8, of e4m3's range of 2^-9 to 448.
//
// O is divided by the sum of the rounded numerators, which the tensor cores compute as P times ones: what all values have
// in common does not see the rounding then, nor the few bits that float8 products keep of their sums. The exact LSE is of
// the unrounded ones, whose sum takes an instruction for each, 9 % of the time at head dim 128: a call that does not use
// the LSE leaves it out.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "core/softmax.cuh"
#include "key_order.h"

namespace flash_cute::sm90::forward::fp8_rows {

using namespace cute;

template <bool kExactLse>
struct Softmax {
  static constexpr int kRows = 2;        // per thread
  static constexpr float kLargest = 8;   // the exponent of the largest numerator
  static constexpr float kLn2 = 0.693147180559945f;

  float offset[kRows];   // an exponent is score * scale - offset; at first lower than that of any finite score
  float sum[kRows];      // of the rounded numerators, of the tiles whose product has been added to O
  float exact_sum[kExactLse ? kRows : 1];  // of the unrounded ones; over this thread's columns only until finish()
  float factor[kRows];   // by which O is multiplied before the product of the tile at hand is added

  CUTE_DEVICE Softmax() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      offset[i] = -FLT_MAX;
      sum[i] = 0.f;
      factor[i] = 1.f;
      if constexpr (kExactLse) exact_sum[i] = 0.f;
    }
  }

  // The maximum over this tile and those before. Returns what O is to be multiplied by. `scale`: of this tile's scores.
  template <class Scores, class Shift>
  CUTE_DEVICE float2 update_max(Scores const& scores,  // (rows, columns)
                                float scale, Shift const& shift) {
    float even[kRows], odd[kRows], factors[kRows];  // four chains: two would expose the latency
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
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const own = fmaxf(even[i], odd[i]) + shift_of(shift, i);  // a shift is of the thread's columns
      float const largest = quad_reduce(own, [](float a, float b) { return fmaxf(a, b); });
      float const next = fmaxf(offset[i], largest * scale - kLargest);
      factors[i] = exp2_approx(offset[i] - next);
      offset[i] = next;
      if constexpr (kExactLse) exact_sum[i] *= factors[i];
    }
    return {factors[0], factors[1]};
  }

  // Scores to numerators, of the share `kPart` of `kParts` of the columns.
  template <int kPart, int kParts, class Scores, class Shift>
  CUTE_DEVICE void numerators(Scores& scores,  // (rows, columns)
                              float scale, Shift const& shift) {
    constexpr int kColumns = decltype(size<1>(scores))::value;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const subtracted = offset[i] - shift_of(shift, i) * scale;
      CUTE_UNROLL
      for (int j = kColumns * kPart / kParts; j < kColumns * (kPart + 1) / kParts; ++j) {
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
  CUTE_DEVICE static float shift_of(OnlineSoftmax<2>::NoShift, int) { return 0.f; }
  CUTE_DEVICE static float shift_of(OnlineSoftmax<2>::Shift const& shift, int i) { return shift[i]; }
};

// Numerators to the A operand of P V.
template <class Scores, class Fragment>
CUTE_DEVICE void convert_numerators(Scores const& scores,  // (rows, columns)
                                    Fragment& tOrP) {      // (MMA, MMA_M, MMA_K)
  auto words = recast<uint32_t>(tOrP);
  constexpr int kWords = decltype(size<1>(scores))::value / 4;  // of a row
  CUTE_UNROLL
  for (int j = 0; j < kWords; ++j) {
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
