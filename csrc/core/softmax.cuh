// Online softmax in base 2 over the rows a thread shares with its quad (Milakov and Gimelshein, arXiv 1805.02867; the
// deferred rescale follows FlashAttention-4's idea). It is cut in two, so that a product may run while the maximum of a
// tile is found; then the accumulator may be rescaled, and the numerators follow.
//
// With two rows a thread the maximum in use may lag the true one by kLag in the exponent: only a row that has grown
// past that takes a new one, and only where a row of the warp does is the accumulator rescaled. Numerators then reach
// 2^kLag, far from overflow in fp16; the result is the same quotient in another scaling. Whether a row has grown, its
// threads see from their own columns; they share a maximum only where a new one is taken.
//
// The product with V takes the numerators rounded to 16 bits, and is divided by the sum of the unrounded ones: the
// rounding of the largest so becomes an error of whatever all values have in common, which the backward's
// rowsum(dO * O) carries to every key. With the exact maximum the largest is 1 and rounding leaves it so. With one that
// lags, the divisor gets the rounding error of each thread's largest numerator; the LSE does not.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "convert.cuh"

namespace flash_cute {

using namespace cute;

CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Reduces over the four threads that share a row.
template <class Op>
CUTE_DEVICE float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffff, x, 2));
  return op(x, __shfl_xor_sync(0xffffffff, x, 1));
}

template <int kRows>  // of a thread
struct OnlineSoftmax {
  static constexpr bool kLazy = kRows == 2;  // four rows leave too few registers for it
  static constexpr float kLag = 8.f;

  float scale_log2;
  float offset[kRows];   // the maximum in use times scale_log2; before there is one, less than any finite score's
  float sum[kRows];      // of the numerators, this thread's columns only until finish()
  float own_max[kRows];  // kLazy: of the raw scores so far, this thread's columns only; otherwise of the tile
  float limit[kRows];    // kLazy: of the raw scores, past which the row takes a new maximum
  float error[kRows];    // from finish() on: what rounding has added to the largest numerators

  CUTE_DEVICE explicit OnlineSoftmax(float scale_log2_) : scale_log2(scale_log2_) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      offset[i] = -FLT_MAX;
      own_max[i] = limit[i] = -INFINITY;
      sum[i] = error[i] = 0.f;
    }
  }

  struct Nothing {
    CUTE_DEVICE void operator()() const {}
  };

  // Takes a new maximum for the rows that need one, and brings the accumulator and the sums to it.
  // `wait_product` waits until the accumulator is there, `release` follows: before the vote, or, kLateWait, after it.
  // (Where the compiler has the choice, it waits halfway through the maximum.)
  template <bool kLateWait = false, class Scores, class Accumulator, class WaitProduct = Nothing,
            class Release = Nothing>
  CUTE_DEVICE void update_max(Scores const& scores,  // (rows, columns)
                              Accumulator& acc,      // (rows, head dim)
                              WaitProduct wait_product = {}, Release release = {}) {
    static_assert(decltype(size<0>(scores))::value == kRows);
    auto const max = [](float a, float b) { return fmaxf(a, b); };
    bool grown = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float even = scores(i, _0{}), odd = scores(i, _1{});  // of two rows four chains: the latency of two would show
      if constexpr (kLazy) even = fmaxf(even, own_max[i]);
      CUTE_UNROLL
      for (int j = 2; j < size<1>(scores); ++j) {
        float& chain = kRows == 2 && j % 2 == 1 ? odd : even;
        chain = fmaxf(chain, scores(i, j));
      }
      own_max[i] = kLazy ? fmaxf(even, odd) : quad_reduce(fmaxf(even, odd), max);
      grown |= kLazy ? own_max[i] > limit[i] : own_max[i] * scale_log2 > offset[i];
    }
    if constexpr (!kLateWait) {
      wait_product();
      release();
    }
    if (__any_sync(0xffffffff, grown)) {
      if constexpr (kLateWait) wait_product();
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float new_offset = fmaxf(own_max[i] * scale_log2, offset[i]);
        if constexpr (kLazy) {
          float const row_max = quad_reduce(own_max[i], max);
          bool const past = row_max > limit[i];
          new_offset = past ? row_max * scale_log2 : offset[i];
          limit[i] = past ? row_max + kLag * reciprocal(scale_log2) : limit[i];
        }
        float const factor = exp2_approx(offset[i] - new_offset);
        offset[i] = new_offset;
        sum[i] *= factor;
        CUTE_UNROLL
        for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= factor;
      }
    }
    if constexpr (kLateWait) {
      wait_product();
      release();
    }
  }

  // Raw scores to numerators.
  template <class Scores>
  CUTE_DEVICE void numerators(Scores& scores) {  // (rows, columns)
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = numerator(i, scores(i, j));
        sum[i] += scores(i, j);
      }
    }
  }

  // Makes the sums, and the errors of the largest numerators as Elements, those of whole rows.
  template <class Element>
  CUTE_DEVICE void finish() {
    auto const add = [](float a, float b) { return a + b; };
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) sum[i] = quad_reduce(sum[i], add);
    if constexpr (kLazy) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; i += 2) {
        float2 const own = rounding_errors<Element>(numerator(i, own_max[i]), numerator(i + 1, own_max[i + 1]));
        error[i] = quad_reduce(own.x, add);
        error[i + 1] = quad_reduce(own.y, add);
      }
    }
  }

  // After finish() of both: takes in row i's state over other keys. Returns what brings the two accumulators, its own
  // and the other's, to the new maximum.
  CUTE_DEVICE float2 merge(int i, float other_offset, float other_sum, float other_error) {
    float const new_offset = fmaxf(offset[i], other_offset);
    float2 const factors{exp2_approx(offset[i] - new_offset), exp2_approx(other_offset - new_offset)};
    offset[i] = new_offset;
    sum[i] = sum[i] * factors.x + other_sum * factors.y;
    error[i] = error[i] * factors.x + other_error * factors.y;
    return factors;
  }

  // After finish(): what the accumulator is to be multiplied by (infinite where all scores are -inf), and the row's
  // log-sum-exp (-inf there).
  CUTE_DEVICE float inverse(int i) const { return reciprocal(sum[i] + error[i]); }
  CUTE_DEVICE float lse(int i) const {
    constexpr float kLn2 = 0.693147180559945f;
    return sum[i] == 0.f ? -INFINITY : offset[i] * kLn2 + logf(sum[i]);
  }

 private:
  // exp2(scale_log2 * (score - max)). As long as a row has no maximum its scores are -inf: 0, not NaN.
  CUTE_DEVICE float numerator(int i, float score) const { return exp2_approx(score * scale_log2 - offset[i]); }
};

}  // namespace flash_cute
