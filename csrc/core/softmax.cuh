// Online softmax in base 2 over rows that the four threads of a quad share (Milakov and Gimelshein, arXiv 1805.02867;
// the lazy rescale follows an idea of FlashAttention-4). It has two steps: update_max, during which the P V GEMM of the
// tile before may still run, and which rescales the accumulator if needed; then numerators.
//
// With two rows per thread, the maximum in use may lag the true one by up to kLag in the exponent. A row takes a new
// maximum only when it exceeds that, and a warp rescales its accumulator only if one of its rows takes a new maximum.
// Numerators then reach 2^kLag, far from overflow in fp16; numerator and denominator carry the same scale, so that the
// result does not change. Each thread checks its own columns only; the quad reduces the maximum only when a new one is
// taken.
//
// P V uses numerators rounded to 16 bits, but is divided by the sum of the unrounded ones. The rounding error of the
// largest numerator thus multiplies whatever all values have in common, and the backward's rowsum(dO * O) carries that
// to every key. With the exact maximum the largest numerator is 1, which rounding leaves unchanged. With a lagging
// maximum, the rounding error of each thread's largest numerator is added to the divisor (`error`); the LSE does not
// use it.
//
// An exponent is one FFMA, score * scale_log2 - offset, which leaves the rounding of the offset in it: a factor that
// all numerators of a row share, so that it cancels, but that overflows where the offset is large. Past kFused, where
// scores that differ at all differ by exponents of 4 and more, a row's scale is a power of two instead: its offset, the
// maximum times the scale, is not rounded.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "convert.cuh"
#include "contract/power_scale.h"

namespace flash_cute {

using namespace cute;

CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// `kRows`: per thread. `kLazy_`: with a lagging maximum; four rows per thread leave too few registers for it.
template <int kRows, bool kLazy_ = kRows == 2, PowerScale kPowerScale = PowerScale::kGiven>
struct OnlineSoftmax {
  static constexpr bool kLazy = kLazy_;
  static constexpr float kLag = 8.f;
  static constexpr float kFused = 0x1p26f;  // the offset's rounding is then at most 4

  float scale_log2;
  float power_scale;     // unless kComputed: the power of two from scale_log2 on
  float offset[kRows];   // the maximum in use times row_scale; at first lower than that of any finite score
  float sum[kRows];      // of the numerators; over this thread's columns only until finish()
  float own_max[kRows];  // kLazy: of the raw scores so far, over this thread's columns only; else of the tile's row
  float limit[kRows];    // kLazy: the row takes a new maximum when a raw score exceeds this
  float error[kRows];    // after finish(): the rounding errors of the largest numerators

  CUTE_DEVICE OnlineSoftmax(float scale_log2_, float power_scale_)
      : scale_log2(scale_log2_), power_scale(power_scale_) {
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
  struct NoAccumulator {};  // of the first tile

  // What is missing of the scores of each row of a tile, see add_linear_biases.
  struct NoShift {};
  using Shift = float[kRows];

  // Updates the maximum of the rows that need it, and rescales their accumulator and sums. `wait_product` waits for the
  // GEMM in flight into acc, before the warp's vote or, with kLateWait, after it, and `release` then frees its operand.
  // (If the compiler may choose, it waits halfway through the maximum.) Not where the vote decides: the warps of a
  // warpgroup vote by themselves, and all of them must execute each wait for a WGMMA.
  // Returns the vote.
  template <bool kLateWait = false, class Scores, class Accumulator, class WaitProduct = Nothing,
            class Release = Nothing, class Shifts = NoShift>
  CUTE_DEVICE bool update_max(Scores const& scores,  // (rows, columns)
                              Accumulator& acc,      // (rows, head dim)
                              WaitProduct wait_product = {}, Release release = {}, Shifts const& shift = {}) {
    static_assert(decltype(size<0>(scores))::value == kRows);
    constexpr bool kShifted = !std::is_same_v<Shifts, NoShift>;
    static_assert(kLazy || !kShifted);
    bool grown = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float even = scores(i, _0{}), odd = scores(i, _1{});  // two rows: four chains, since two would expose the latency
      if constexpr (kLazy && !kShifted) even = fmaxf(even, own_max[i]);
      CUTE_UNROLL
      for (int j = 2; j < size<1>(scores); ++j) {
        float& chain = kRows == 2 && j % 2 == 1 ? odd : even;
        chain = fmaxf(chain, scores(i, j));
      }
      if constexpr (kShifted) {
        own_max[i] = fmaxf(own_max[i], fmaxf(even, odd) + shift[i]);
      } else {
        own_max[i] = kLazy ? fmaxf(even, odd) : quad_reduce(fmaxf(even, odd), larger);
      }
      if constexpr (kLazy) {
        grown |= own_max[i] > limit[i];
      } else if constexpr (kPowerScale == PowerScale::kVoted) {
        grown |= own_max[i] * scale_log2 > offset[i] || fabsf(offset[i]) > kFused;
      } else {
        grown |= own_max[i] * row_scale(offset[i]) > offset[i];
      }
    }
    auto const wait = [&] {
      wait_product();
      release();
    };
    if constexpr (!kLateWait) wait();
    bool const vote = __any_sync(0xffffffff, grown);
    if constexpr (kLateWait) wait();
    if (vote) rescale(acc);
    return vote;
  }

  // The same where the tile's maxima over this thread's columns are known, and no product is in flight.
  template <class Accumulator>
  CUTE_DEVICE void update_max_to(float const (&maxima)[kRows], Accumulator& acc) {
    static_assert(kLazy);
    bool grown = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      own_max[i] = fmaxf(own_max[i], maxima[i]);
      grown |= own_max[i] > limit[i];
    }
    if (__any_sync(0xffffffff, grown)) rescale(acc);
  }

  // Raw scores to numerators.
  template <class Scores, class Shifts = NoShift>
  CUTE_DEVICE void numerators(Scores& scores,  // (rows, columns)
                              Shifts const& shift = {}) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const scale = row_scale(offset[i]);
      float subtracted = offset[i];
      if constexpr (!std::is_same_v<Shifts, NoShift>) subtracted -= shift[i] * scale;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = exp2_approx(scores(i, j) * scale - subtracted);
        sum[i] += scores(i, j);
      }
    }
  }

  // Reduces the sums, and the errors of rounding the largest numerators to Element, over whole rows.
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

  // Merges the state of row i over other keys into this one, both after finish(). Returns the factors that rescale this
  // accumulator and the other one to the new maximum.
  CUTE_DEVICE float2 merge(int i, float other_offset, float other_sum, float other_error) {
    float const new_offset = fmaxf(offset[i], other_offset);
    float2 const factors{exp2_approx(offset[i] - new_offset), exp2_approx(other_offset - new_offset)};
    offset[i] = new_offset;
    sum[i] = sum[i] * factors.x + other_sum * factors.y;
    error[i] = error[i] * factors.x + other_error * factors.y;
    return factors;
  }

  // After finish(): the factor that normalizes the accumulator (infinite where all scores are -inf), and the row's
  // log-sum-exp (-inf there). `sink_log2`: the base-2 logarithm of one more term of the divisor; -inf: none.
  CUTE_DEVICE float inverse(int i, float sink_log2) const {
    return reciprocal(sum[i] + error[i] + exp2_approx(sink_log2 - max_log2(i)));
  }
  CUTE_DEVICE float lse(int i) const {
    constexpr float kLn2 = 0.693147180559945f;
    return sum[i] == 0.f ? -INFINITY : (max_log2(i) + log2_approx(sum[i])) * kLn2;
  }

  // What the scores of a row with this offset, or with this maximum times scale_log2, are multiplied by. The power of
  // two is not below scale_log2, so that offsets grow with the maximum also where that passes kFused.
  CUTE_DEVICE float row_scale(float row_offset) const {
    return fabsf(row_offset) > kFused ? power() : scale_log2;
  }

 private:
  CUTE_DEVICE float power() const {
    if constexpr (kPowerScale != PowerScale::kComputed) return power_scale;
    uint32_t bits;
    asm("add.u32 %0, %1, 0x007fffff;" : "=r"(bits) : "r"(__float_as_uint(scale_log2)));
    return __uint_as_float(bits & 0x7f800000u);
  }

  // The maximum in use times scale_log2.
  CUTE_DEVICE float max_log2(int i) const {
    return fabsf(offset[i]) > kFused ? offset[i] / power() * scale_log2 : offset[i];
  }

  CUTE_DEVICE static float larger(float a, float b) { return fmaxf(a, b); }

  // Rows that have grown past their limit take their maximum. All lanes of the warp take part.
  template <class Accumulator>
  CUTE_DEVICE void rescale(Accumulator& acc) {  // (rows, head dim)
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const row_max = kLazy ? quad_reduce(own_max[i], larger) : own_max[i];
      float const product = row_max * scale_log2, new_scale = row_scale(product);
      float new_offset = fmaxf(row_max * new_scale, offset[i]);
      if constexpr (kLazy) {
        bool const past = row_max > limit[i];
        float const lag = fabsf(product) > kFused ? 0.f : kLag * reciprocal(scale_log2);
        new_offset = past ? new_offset : offset[i];
        limit[i] = past ? row_max + lag : limit[i];
      }
      float const factor = exp2_approx(offset[i] - new_offset);
      offset[i] = new_offset;
      sum[i] *= factor;
      if constexpr (!std::is_same_v<Accumulator, NoAccumulator>) {
        CUTE_UNROLL
        for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= factor;
      }
    }
  }

  // exp2(scale_log2 * (score - max)). Before a row has a maximum all its scores are -inf, which gives 0, not NaN.
  CUTE_DEVICE float numerator(int i, float score) const {
    return exp2_approx(score * row_scale(offset[i]) - offset[i]);
  }
};

}  // namespace flash_cute
