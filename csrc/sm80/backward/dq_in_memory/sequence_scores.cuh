// The elementwise part of a step where sequences are read at run time. Modified scores have S^T and dP^T in registers
// together, so that the derivative of a softcap is applied to dP^T at once and needs no registers of its own.
#pragma once

#include <cute/tensor.hpp>

#include "core/mask.cuh"
#include "core/score_bwd.cuh"
#include "scores.cuh"
#include "sequence_traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// The coordinates of a thread's scores: (keys, rows) -> (key, row).
template <class Traits>
CUTE_DEVICE auto thread_coords(typename Traits::Task const& task) {
  auto const mma_thread = typename Traits::MmaScores{}.get_slice(task.thread_again());
  return rowcol_view(mma_thread.partition_C(score_coords<Traits>()));
}

// A statistic (LSE or delta) of a thread's rows of a part, in pairs of neighbours.
template <class Traits>
CUTE_DEVICE auto row_stats(typename Traits::Task const& task, float const* stat, int part) {
  float const* const first = stat + part * Traits::kScoreRows + get<1>(thread_coords<Traits>(task)(_0{}, _0{}));
  return [first](int pair) {
    auto tScS_0 = score_coords_of_thread_0<Traits>();  // (keys, rows) -> (key, row)
    return *reinterpret_cast<float2 const*>(first + get<1>(tScS_0(_0{}, 2 * pair)));
  };
}

// dP^T to dP^T - delta.
template <class Accumulator, class Stats>
__device__ inline void subtract(Accumulator& tSrdP,  // (MMA, MMA_N, MMA_M)
                                Stats const& deltas) {
  auto dp = rowcol_view(tSrdP);  // (keys, rows)
  CUTE_UNROLL
  for (int j = 0; j < size<1>(dp); j += 2) {
    float2 const delta = deltas(j / 2);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(dp); ++i) {
      dp(i, j) -= delta.x;
      dp(i, j + 1) -= delta.y;
    }
  }
}

// Modifies the scores as the forward does, and dP^T by the derivative.
template <class Schedule, class Accumulator>
__device__ inline void modify_scores(BwdParams const& params, typename Schedule::Traits::Task const& task,
                                     RowTile const& now, int part,
                                     Accumulator& tSrS,     // (MMA, MMA_N, MMA_M)
                                     Accumulator& tSrdP) {  // (MMA, MMA_N, MMA_M)
  using Traits = typename Schedule::Traits;
  cap_scores_by_tanh_and_differentiate(tSrS, tSrdP, params.score);
  float const slope = head_slope(params.score, task.index, now.head);
  if (slope == 0.f) return;
  int const row = now.m_block * Traits::kBlockM + part * Traits::kScoreRows, column = task.n_block * Traits::kBlockN;
  auto scores = rowcol_view(tSrS);  // (keys, rows)
  add_bias_transposed(scores, thread_coords<Traits>(task), score_coords_of_thread_0<Traits>(), slope,
                      row - column + task.sequence.shift);
}

// Sets the scores outside the mask to -inf.
template <class Schedule, class Accumulator>
__device__ inline void mask_scores(BwdParams const&, SequenceTask const& task, RowTile const& now, int part,
                                   Accumulator& tSrS) {  // (MMA, MMA_N, MMA_M)
  using Traits = typename Schedule::Traits;
  if (!task.range.needs_mask(now.m_block)) return;
  int const row = now.m_block * Traits::kBlockM + part * Traits::kScoreRows, column = task.n_block * Traits::kBlockN;
  auto scores = rowcol_view(tSrS);  // (keys, rows)
  apply_mask_transposed(scores, thread_coords<Traits>(task), score_coords_of_thread_0<Traits>(), task.sequence, row,
                        column);
}

// dP^T - delta to dS^T, its product with P^T.
template <class Accumulator>
__device__ inline void multiply(Accumulator& tSrdP,         // (MMA, MMA_N, MMA_M)
                                Accumulator const& tSrP) {  // (MMA, MMA_N, MMA_M)
  CUTE_UNROLL
  for (int i = 0; i < size(tSrdP); ++i) tSrdP(i) *= tSrP(i);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
