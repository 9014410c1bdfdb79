// Scores with a softcap alone, where the polynomial of softcap.h is part of the exponential's argument:
//
//     2^(cap_log2 tanh(scale x) - offset) = 2^(x (c_log2[0] + c_log2[1] x^2 + c_log2[2] x^4) - offset)
//
// for three instructions more per score than without a softcap. Nothing else is done per score: both the softcap and
// its polynomial grow with x, so that the largest raw score of a row tells its maximum, and whether the polynomial
// serves at the upper end; at the lower end it serves any score where the row's maximum is large enough, see
// softcap_floor.
#pragma once

#include <cute/tensor.hpp>

#include "core/score.cuh"
#include "core/softmax.cuh"

namespace flash_cute::sm90::forward::rows {

using namespace cute;

// The mask of a tile all of whose rows see all of its columns.
struct NoMask {
  CUTE_DEVICE void operator()() const {}
};

// The largest score of each row over this thread's columns.
template <class Scores>
CUTE_DEVICE void find_maxima(Scores const& scores, float (&maxima)[2]) {  // (rows, columns)
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    float even = scores(i, _0{}), odd = scores(i, _1{});  // with two rows four chains, for the latency
    CUTE_UNROLL
    for (int j = 2; j < size<1>(scores); j += 2) {
      even = fmaxf(even, scores(i, j));
      odd = fmaxf(odd, scores(i, j + 1));
    }
    maxima[i] = fmaxf(even, odd);
  }
}

// The same as integers, of which one instruction (VIMNMX3) takes two scores: right where the result is not negative. A
// NaN may be the result; the row's sum is NaN in any case.
template <class Scores>
CUTE_DEVICE void find_maxima_as_integers(Scores const& scores, float (&maxima)[2]) {  // (rows, columns)
  constexpr int kColumns = decltype(size<1>(scores))::value;
  static_assert(kColumns % 4 == 0);
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    auto const bits = [&](int j) { return __float_as_int(scores(i, j)); };
    int even = bits(0), odd = bits(1);
    CUTE_UNROLL
    for (int j = 2; j + 3 < kColumns; j += 4) {
      even = __vimax3_s32(even, bits(j), bits(j + 1));
      odd = __vimax3_s32(odd, bits(j + 2), bits(j + 3));
    }
    maxima[i] = __int_as_float(::max(__vimax3_s32(even, bits(kColumns - 2), bits(kColumns - 1)), odd));
  }
}

// The raw scores of one tile.
template <class Scores>
struct CappedScores {
  using Softmax = OnlineSoftmax<2>;

  Softmax& softmax;
  Scores& scores;  // (rows, columns)
  ScoreTerms const& terms;

  // Scores to numerators; rescales the accumulator if the maximum changes. `wait_product`, `release`: as in
  // OnlineSoftmax::update_max.
  template <class Mask, class Accumulator, class WaitProduct, class Release>
  CUTE_DEVICE void finish(Mask const& mask, Accumulator& acc, WaitProduct wait_product, Release release) {
    bool folds = true;
    if constexpr (std::is_same_v<Mask, NoMask>) {
      folds = update_max_of_whole_tile(acc, wait_product, release);
    } else {
      float maxima[2];
      find_maxima(scores, maxima);
      folds = serves(past_polynomial(maxima));
      if (!folds) cap_scores_by_tanh(scores, terms);
      mask();
      find_maxima(scores, maxima);
      wait_product();
      release();
      if (folds) cap(maxima);
      softmax.update_max_to(maxima, acc);
    }
    if (folds) {
      numerators();
    } else {
      softmax.numerators(scores);
    }
  }

 private:
  // One vote, unless a row's maximum is negative or past its limit, or the polynomial might not serve. Returns whether
  // it serves; else the scores have been capped.
  template <class Accumulator, class WaitProduct, class Release>
  CUTE_DEVICE bool update_max_of_whole_tile(Accumulator& acc, WaitProduct wait_product, Release release) {
    float maxima[2], own_max[2];
    find_maxima_as_integers(scores, maxima);
    bool const past = past_polynomial(maxima);
    bool special = past || (__float_as_int(maxima[0]) | __float_as_int(maxima[1])) < 0;
    cap(maxima);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      own_max[i] = fmaxf(softmax.own_max[i], maxima[i]);
      special |= own_max[i] > softmax.limit[i];
    }
    wait_product();
    release();
    bool folds = true;
    if (__any_sync(0xffffffff, special)) {
      folds = serves(past);  // a maximum that is not the right one is negative, and tells the same
      if (!folds) cap_scores_by_tanh(scores, terms);
      find_maxima(scores, maxima);
      if (folds) cap(maxima);
      softmax.update_max_to(maxima, acc);
    } else {
      softmax.own_max[0] = own_max[0];
      softmax.own_max[1] = own_max[1];
    }
    return folds;
  }

  // Whether, for all that the maxima tell, some score of the thread needs more than the polynomial.
  CUTE_DEVICE bool past_polynomial(float const (&maxima)[2]) const {
    return fmaxf(maxima[0], maxima[1]) > terms.softcap.limit ||
           fminf(softmax.offset[0], softmax.offset[1]) < terms.softcap.floor;
  }
  CUTE_DEVICE bool serves(bool past) const {
    return !__any_sync(0xffffffff, past) || !exceed_polynomial(scores, terms.softcap);
  }

  // Maxima of raw scores to those of capped ones. -inf stays.
  CUTE_DEVICE void cap(float (&maxima)[2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) maxima[i] *= softcap_factor(terms.softcap.c, maxima[i] * maxima[i]);
  }

  CUTE_DEVICE void numerators() {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        float const x = scores(i, j);
        scores(i, j) = exp2_approx(fmaf(x, softcap_factor(terms.softcap.c_log2, x * x), -softmax.offset[i]));
        softmax.sum[i] += scores(i, j);
      }
    }
  }
};

}  // namespace flash_cute::sm90::forward::rows
