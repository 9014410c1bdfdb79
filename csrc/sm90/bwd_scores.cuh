// P^T and dS^T of a backward step, elementwise, in the fragments of the transposed scores: (keys, rows).
#pragma once

#include <cute/tensor.hpp>

#include "../core/softmax.cuh"

namespace flash_cute::sm90 {

using namespace cute;

// In S^T a thread has columns 2q, 2q + 1, 8 + 2q and 9 + 2q of every 16, q its place in its quad: here they stand
// side by side, and it reads the statistics of four rows at once.
struct StatOrder {
  CUTE_HOST_DEVICE static constexpr int position(int row) {
    int const quad = row % 8 / 2, eight = row % 16 / 8, odd = row % 2;
    return row / 16 * 16 + quad * 4 + eight * 2 + odd;
  }
};

// Read anew at each use: nothing that is computed from it stays in registers, which the accumulators leave few of.
CUTE_DEVICE int consumer_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - 128;
}

// A statistic of this thread's rows j to j + 3.
CUTE_DEVICE float4 four_rows(float const* stat, int j) {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return reinterpret_cast<float4 const*>(stat)[j + lane % 4];
}

// S^T to P^T in the columns [begin, end).
template <class Scores>
CUTE_DEVICE void exponentiate(Scores& scores, float const* lse_log2, float scale_log2, int begin, int end) {
  CUTE_UNROLL
  for (int j = begin; j < end; j += 4) {
    float4 const lse = four_rows(lse_log2, j);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      scores(i, j) = exp2_approx(scores(i, j) * scale_log2 - lse.x);
      scores(i, j + 1) = exp2_approx(scores(i, j + 1) * scale_log2 - lse.y);
      scores(i, j + 2) = exp2_approx(scores(i, j + 2) * scale_log2 - lse.z);
      scores(i, j + 3) = exp2_approx(scores(i, j + 3) * scale_log2 - lse.w);
    }
  }
}

// dP^T to dS^T = P^T (dP^T - delta) in the columns [begin, end).
template <class Probabilities, class Scores>
CUTE_DEVICE void differentiate(Probabilities const& p, Scores& dscores, float const* stat, int begin, int end) {
  CUTE_UNROLL
  for (int j = begin; j < end; j += 4) {
    float4 const delta = four_rows(stat, j);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(dscores); ++i) {
      dscores(i, j) = float(p(i, j)) * (dscores(i, j) - delta.x);
      dscores(i, j + 1) = float(p(i, j + 1)) * (dscores(i, j + 1) - delta.y);
      dscores(i, j + 2) = float(p(i, j + 2)) * (dscores(i, j + 2) - delta.z);
      dscores(i, j + 3) = float(p(i, j + 3)) * (dscores(i, j + 3) - delta.w);
    }
  }
}

}  // namespace flash_cute::sm90
