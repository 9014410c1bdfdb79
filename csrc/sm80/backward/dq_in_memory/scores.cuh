// The elementwise part of a step: P^T and dS^T in the fragments of the transposed scores, (keys, rows).
#pragma once

#include <cute/tensor.hpp>

#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/registers.cuh"
#include "core/softmax.cuh"
#include "schedule.cuh"
#include "task.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// (BLK_N, BLK_M / parts) -> (key, row), for one part of a row tile.
template <class Traits>
CUTE_DEVICE auto score_coords() {
  return make_identity_tensor(Shape<Int<Traits::kBlockN>, Int<Traits::kScoreRows>>{});
}

// The same for the registers of thread 0, where the coordinates are static: (keys, rows) -> (key, row).
template <class Traits>
CUTE_DEVICE auto score_coords_of_thread_0() {
  return rowcol_view(typename Traits::MmaScores{}.get_slice(_0{}).partition_C(score_coords<Traits>()));
}

// A statistic (LSE or delta) of this thread's rows of a part. They come in pairs of neighbours.
template <class Schedule>
struct RowStats {
  using Traits = typename Schedule::Traits;
  using Coords0 = decltype(score_coords_of_thread_0<Traits>());
  static constexpr int kPairs = decltype(size<1>(Coords0{}))::value / 2;

  float const* stats;  // of this thread's first row, in shared memory
  cute::array<float2, Schedule::kReadsStatsEarly ? kPairs : 0> pairs;

  __device__ inline RowStats(float const* stat, int part) {
    auto const mma_thread = typename Traits::MmaScores{}.get_slice(fresh_thread_index());
    auto tScS = mma_thread.partition_C(score_coords<Traits>());  // (MMA, MMA_N, MMA_M) -> (key, row)
    stats = stat + part * Traits::kScoreRows + get<1>(tScS(_0{}, _0{}, _0{}));
    if constexpr (Schedule::kReadsStatsEarly) {
      CUTE_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) pairs[pair] = read(pair);
    }
  }

  __device__ inline float2 operator()(int pair) const {
    if constexpr (Schedule::kReadsStatsEarly) {
      return pairs[pair];
    } else {
      return read(pair);
    }
  }

 private:
  __device__ inline float2 read(int pair) const {
    auto tScS_0 = score_coords_of_thread_0<Traits>();  // (keys, rows) -> (key, row)
    return *reinterpret_cast<float2 const*>(stats + get<1>(tScS_0(_0{}, 2 * pair)));
  }
};

// Sets the scores outside the mask to -inf.
template <class Schedule, class Accumulator>
__device__ inline void mask_scores(Task<Schedule> const& task, int m_block, int part,
                                   Accumulator& tSrS) {  // (MMA, MMA_N, MMA_M)
  using Traits = typename Schedule::Traits;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  BwdParams const& params = task.params;
  int const row = m_block * kBlockM + part * Traits::kScoreRows, column = opaque(task.tile.n_block) * kBlockN;
  bool const needs_mask = Schedule::kWholeRangeInRegs
                              ? task.range.needs_mask(m_block)
                              : crosses_band<kBlockM, kBlockN>(params, m_block * kBlockM - column) ||
                                    column + kBlockN > params.len_k;
  if (needs_mask) {
    auto const mma_thread = typename Traits::MmaScores{}.get_slice(fresh_thread_index());
    auto scores = rowcol_view(tSrS);                                          // (keys, rows)
    auto tScS = rowcol_view(mma_thread.partition_C(score_coords<Traits>()));  // (keys, rows) -> (key, row)
    apply_mask_transposed(scores, tScS, score_coords_of_thread_0<Traits>(), params, row, column);
  }
}

// S^T to P^T = exp2(scale_log2 S^T - lse_log2).
template <class Accumulator, class Stats>
__device__ inline void exponentiate(Accumulator& tSrS,  // (MMA, MMA_N, MMA_M)
                                    Stats const& lse_log2, float scale_log2) {
  auto p = rowcol_view(tSrS);  // (keys, rows)
  CUTE_UNROLL
  for (int j = 0; j < size<1>(p); j += 2) {
    float2 const lse = lse_log2(j / 2);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(p); ++i) {
      p(i, j) = exp2_approx(p(i, j) * scale_log2 - lse.x);
      p(i, j + 1) = exp2_approx(p(i, j + 1) * scale_log2 - lse.y);
    }
  }
}

// dP^T to dS^T = P^T (dP^T - delta).
template <class Accumulator, class Probabilities, class Stats>
__device__ inline void differentiate(Accumulator& tSrdP,         // (MMA, MMA_N, MMA_M)
                                     Probabilities const& tSrP,  // (MMA, MMA_N, MMA_M)
                                     Stats const& deltas) {
  auto ds = rowcol_view(tSrdP);  // (keys, rows)
  auto p = rowcol_view(tSrP);    // (keys, rows)
  CUTE_STATIC_ASSERT_V(size<0>(ds) == size<0>(p));
  CUTE_STATIC_ASSERT_V(size<1>(ds) == size<1>(p));
  CUTE_UNROLL
  for (int j = 0; j < size<1>(p); j += 2) {
    float2 const delta = deltas(j / 2);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(p); ++i) {
      ds(i, j) = float(p(i, j)) * (ds(i, j) - delta.x);
      ds(i, j + 1) = float(p(i, j + 1)) * (ds(i, j + 1) - delta.y);
    }
  }
}

// Stores a part of P^T or dS^T to shared memory.
template <class Schedule, class Fragment, class Smem>
__device__ inline void store_scores(Fragment const& rX,  // (MMA, MMA_N, MMA_M / parts)
                                    Smem&& sX,           // (BLK_N, BLK_M)
                                    int part) {
  using Traits = typename Schedule::Traits;
  typename Traits::SmemStoreAtom const atom;
  auto const copy_c = make_tiled_copy_C(atom, typename Traits::MmaScores{}).get_slice(fresh_thread_index());
  auto tXrX = copy_c.retile_S(rX);     // (CPY, CPY_N, CPY_M / parts)
  auto tXsX = copy_c.partition_D(sX);  // (CPY, CPY_N, CPY_M)
  CUTE_STATIC_ASSERT_V(size<1>(tXrX) == size<1>(tXsX));
  CUTE_STATIC_ASSERT_V(size<2>(tXrX) * Int<Traits::kParts>{} == size<2>(tXsX));
  CUTE_UNROLL
  for (int j = 0; j < size<2>(tXrX); ++j) copy(atom, tXrX(_, _, j), tXsX(_, _, part * size<2>(tXrX) + j));
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
