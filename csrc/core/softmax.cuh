// Online softmax in base 2 over the rows a thread shares with its quad (Milakov and Gimelshein,
// arXiv 1805.02867; the deferred rescale follows FlashAttention-4's idea).
//
// The running maximum may lag the true one by kLag in the exponent: the accumulator is rescaled only when
// some row of the warp has grown past that. Numerators then reach 2^kLag, far from overflow in fp16 and
// without loss of relative precision; the result is the same sum in another scaling.
#pragma once

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Reduces over the four threads that share a row.
template <class Op>
CUTE_DEVICE float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffff, x, 2));
  return op(x, __shfl_xor_sync(0xffffffff, x, 1));
}

template <int kRows>
struct OnlineSoftmax {
  static constexpr float kLag = 8.f;

  float scale_log2;
  float row_max[kRows];  // the maximum in use, in units of the raw scores
  float row_sum[kRows];  // this thread's columns only, until finish()

  CUTE_DEVICE explicit OnlineSoftmax(float scale_log2_) : scale_log2(scale_log2_) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = -INFINITY;
      row_sum[i] = 0.f;
    }
  }

  // Turns a tile of raw scores into numerators exp2(scale_log2 * (s - max)), after bringing the accumulator
  // and the sums to a new maximum if one is needed.
  template <class Scores, class Accumulator>
  CUTE_DEVICE void step(Scores& scores,      // (rows, columns)
                        Accumulator& acc) {  // (rows, head dim)
    static_assert(decltype(size<0>(scores))::value == kRows);
    float new_max[kRows];
    bool grown = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float thread_max = scores(i, _0{});
      CUTE_UNROLL
      for (int j = 1; j < size<1>(scores); ++j) {
        thread_max = fmaxf(thread_max, scores(i, j));
      }
      new_max[i] = fmaxf(row_max[i], quad_reduce(thread_max, [](float a, float b) { return fmaxf(a, b); }));
      grown |= (new_max[i] - row_max[i]) * scale_log2 > kLag;  // -inf to -inf compares false
    }
    if (__any_sync(0xffffffff, grown)) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const factor = exp2_approx((row_max[i] - finite(new_max[i])) * scale_log2);
        row_max[i] = new_max[i];
        row_sum[i] *= factor;
        CUTE_UNROLL
        for (int j = 0; j < size<1>(acc); ++j) {
          acc(i, j) *= factor;
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const offset = finite(row_max[i]) * scale_log2;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = exp2_approx(scores(i, j) * scale_log2 - offset);
        row_sum[i] += scores(i, j);
      }
    }
  }

  // Completes the sums, divides the accumulator by them and returns each row's log-sum-exp in `lse`.
  // A row with sum 0 gets out 0 and lse -inf.
  template <class Accumulator>
  CUTE_DEVICE void finish(Accumulator& acc, float (&lse)[kRows]) {
    constexpr float kLn2 = 0.693147180559945f;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const sum = quad_reduce(row_sum[i], [](float a, float b) { return a + b; });
      float const inverse = sum == 0.f ? 0.f : 1.f / sum;
      lse[i] = sum == 0.f ? -INFINITY : row_max[i] * (scale_log2 * kLn2) + __logf(sum);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(acc); ++j) {
        acc(i, j) *= inverse;
      }
    }
  }

 private:
  // A row whose scores so far are all -inf is measured from 0, so that its numerators are 0 and not NaN.
  CUTE_DEVICE static float finite(float x) { return x == -INFINITY ? 0.f : x; }
};

}  // namespace flash_cute
