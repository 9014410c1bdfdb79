// The softmax of a piece, whose tiles two warpgroups compute by turns. Both know the maxima; each has the sums over its
// own tiles.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "core/softmax.cuh"

namespace flash_cute::sm90::decode::latent {

using namespace cute;

struct Softmax {
  static constexpr int kRowsOfThread = 2;

  float scale_log2;
  float max[kRowsOfThread];  // of the raw scores, exact, so that the largest numerator is 1
  float sum[kRowsOfThread];  // of the numerators, over this thread's columns

  CUTE_DEVICE explicit Softmax(float scale_log2_) : scale_log2(scale_log2_) {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      max[i] = -FLT_MAX;  // so that a row without a key has differences to it
      sum[i] = 0.f;
    }
  }

  CUTE_DEVICE bool grows(float const (&new_max)[kRowsOfThread]) const {
    return new_max[0] > max[0] || new_max[1] > max[1];
  }

  // Takes the new maxima. The accumulators are to be multiplied by the factors.
  CUTE_DEVICE void follow(float const (&new_max)[kRowsOfThread], float (&factors)[kRowsOfThread]) {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      factors[i] = exp2_approx((max[i] - new_max[i]) * scale_log2);
      sum[i] *= factors[i];
      max[i] = new_max[i];
    }
  }

  // Takes the maxima of a tile. Returns whether the accumulators are to be multiplied by the factors.
  template <class Scores>
  CUTE_DEVICE bool update_max(Scores const& scores,  // (rows, columns)
                              float (&factors)[kRowsOfThread]) {
    float new_max[kRowsOfThread];
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      float largest = scores(i, _0{});
      CUTE_UNROLL
      for (int j = 1; j < size<1>(scores); ++j) largest = fmaxf(largest, scores(i, j));
      new_max[i] = fmaxf(max[i], quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); }));
    }
    bool const grown = __any_sync(0xffffffff, grows(new_max));
    if (grown) follow(new_max, factors);
    return grown;
  }

  // Raw scores to numerators, of half of the columns.
  template <int kHalf, class Scores>
  CUTE_DEVICE void numerators(Scores& scores) {  // (rows, columns)
    constexpr int kColumns = decltype(size<1>(scores))::value / 2;
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      CUTE_UNROLL
      for (int j = kHalf * kColumns; j < (kHalf + 1) * kColumns; ++j) {
        scores(i, j) = exp2_approx((scores(i, j) - max[i]) * scale_log2);
        sum[i] += scores(i, j);
      }
    }
  }

  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) sum[i] = quad_reduce(sum[i], [](float a, float b) { return a + b; });
  }
};

}  // namespace flash_cute::sm90::decode::latent
