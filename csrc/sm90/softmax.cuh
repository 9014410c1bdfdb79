// Online softmax in base 2, cut in two for the pipelined mainloop: while the maximum of a tile is found, the product of
// the tile before runs on; then the accumulator may be rescaled, and the numerators follow.
//
// The maximum in use may lag the true one by kLag in the exponent: only when some row of the warp has grown
// past that is a new one taken and the accumulator rescaled. Numerators so reach 2^kLag, which costs no
// relative precision; the result is the same quotient in another scaling. Whether a row has grown its threads see
// from their own columns: only for a new maximum do they share them.
#pragma once

#include <cute/tensor.hpp>

#include "../core/softmax.cuh"

namespace flash_cute::sm90 {

using namespace cute;

CUTE_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct PipelinedSoftmax {
  static constexpr int kRows = 2;  // of a thread, in a 64-row WGMMA
  static constexpr float kLag = 8.f;

  float scale_log2;
  float row_max[kRows] = {-INFINITY, -INFINITY};  // the maximum in use, in units of the raw scores
  float row_sum[kRows] = {0.f, 0.f};              // this thread's columns only

  CUTE_DEVICE explicit PipelinedSoftmax(float scale_log2_) : scale_log2(scale_log2_) {}

  // Takes a new maximum, and brings the accumulator and the sums to it, if some row of the warp needs one.
  // `wait_product` waits until the accumulator is there, `release` follows: before the vote, or, kLateWait, after it.
  // (Where the compiler has the choice, it waits halfway through the maximum.)
  template <bool kLateWait, class Scores, class Accumulator, class WaitProduct, class Release>
  CUTE_DEVICE void update_max(Scores const& scores,  // (rows, columns)
                              Accumulator& acc,      // (rows, head dim)
                              WaitProduct&& wait_product, Release&& release) {
    static_assert(decltype(size<0>(scores))::value == kRows);
    float own_max[kRows];  // of this thread's columns
    bool grown = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float even = scores(i, _0{}), odd = scores(i, _1{});  // two chains: the latency of one would show
      CUTE_UNROLL
      for (int j = 2; j < size<1>(scores); j += 2) {
        even = fmaxf(even, scores(i, j));
        odd = fmaxf(odd, scores(i, j + 1));
      }
      own_max[i] = fmaxf(even, odd);
      grown |= (own_max[i] - row_max[i]) * scale_log2 > kLag;  // -inf to -inf compares false
    }
    if constexpr (!kLateWait) {
      wait_product();
      release();
    }
    if (__any_sync(0xffffffff, grown)) {
      if constexpr (kLateWait) wait_product();
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const tile_max = quad_reduce(own_max[i], [](float a, float b) { return fmaxf(a, b); });
        float const new_max = fmaxf(row_max[i], tile_max);
        float const factor = exp2_approx((row_max[i] - finite(new_max)) * scale_log2);
        row_max[i] = new_max;
        row_sum[i] *= factor;
        CUTE_UNROLL
        for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= factor;
      }
    }
    if constexpr (kLateWait) {
      wait_product();
      release();
    }
  }

  // Raw scores to numerators exp2(scale_log2 * (s - max)).
  template <class Scores>
  CUTE_DEVICE void numerators(Scores& scores) {  // (rows, columns)
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

  // The row's whole sum, and from it the log-sum-exp: -inf for a row without a finite score.
  CUTE_DEVICE float sum(int i) const {
    return quad_reduce(row_sum[i], [](float a, float b) { return a + b; });
  }
  CUTE_DEVICE float lse(int i, float sum, float scale) const {
    return sum == 0.f ? -INFINITY : row_max[i] * scale + logf(sum);
  }

 private:
  // A row whose scores so far are all -inf is measured from 0: its numerators are 0, not NaN.
  CUTE_DEVICE static float finite(float x) { return x == -INFINITY ? 0.f : x; }
};

}  // namespace flash_cute::sm90
