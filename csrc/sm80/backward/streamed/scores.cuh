// The elementwise part of a step: P = exp2(scale_log2 S - lse_log2) and dS = P (dP - delta), for a tile of keys (the
// products are transposed then) or of query rows.
#pragma once

#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/score_bwd.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::backward::streamed {

// Of a thread's scores: (this side, other side) -> (row of this side, row of the other).
template <class Traits>
CUTE_DEVICE auto score_coords(int thread) {
  auto cS = make_identity_tensor(Shape<Int<kTileRows>, Int<kOtherRows>>{});
  return rowcol_view(typename Traits::ScoreMma{}.get_slice(thread).partition_C(cS));
}
// The same of thread 0, static.
template <class Traits>
CUTE_DEVICE auto score_coords_of_thread_0() {
  auto cS = make_identity_tensor(Shape<Int<kTileRows>, Int<kOtherRows>>{});
  return rowcol_view(typename Traits::ScoreMma{}.get_slice(_0{}).partition_C(cS));
}

// A statistic of the query row of a score.
template <Side kSide, class Coords>
CUTE_DEVICE float row_statistic(float const* statistic, Coords const& tScS, int i, int j) {
  return statistic[kSide == Side::kKeys ? int{get<1>(tScS(_0{}, j))} : int{get<0>(tScS(i, _0{}))}];
}

// Of a thread's scores those that the call's mask lets through, as bits; without a mask all.
template <class Traits, Side kSide>
CUTE_DEVICE uint32_t seen_scores(BwdParams const& params, typename Traits::Storage const& smem, int head, int other,
                                 int thread) {
  if (!has_mask(params.mask)) return ~0u;
  auto const& task = smem.task;
  HeadMask const mask(params.mask, task.index, head / params.heads_per_kv, task.sequence.len_q, task.sequence.len_k);
  auto const tScS = score_coords<Traits>(thread);  // (this side, other side) -> (row of this side, of the other)
  int const own_row = task.tile * kTileRows, other_row = other * kOtherRows;
  if constexpr (kSide == Side::kKeys) {
    return seen_bits<0>(tScS, mask, other_row, own_row);
  } else {
    return seen_bits<1>(tScS, mask, own_row, other_row);
  }
}

// Raw scores to P, where dS is needed times the derivative of the softcap. `other`: the tile of the other side; `seen`:
// see seen_scores.
template <class Traits, Side kSide, class Accumulator>
CUTE_DEVICE void exponentiate(BwdParams const& params, typename Traits::Storage const& smem, int head, int other,
                              Accumulator& tSrS,  // (4, 2, 4)
                              uint32_t seen, int thread) {
  auto const& task = smem.task;
  auto scores = rowcol_view(tSrS);                     // (this side, other side)
  auto const tScS = score_coords<Traits>(thread);      // (this side, other side) -> (row of this side, of the other)
  auto tScS_0 = score_coords_of_thread_0<Traits>();    // the same for thread 0, static
  auto derivatives = make_tensor_like<float>(scores);  // (this side, other side)
  fill(derivatives, 1.f);
  if (params.score.softcap_scale != 0.f) {
    float const scale = params.score.softcap_scale * kTanhScale, square = task.needs_dp() ? -1.f : 0.f;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      scores(i) = tanh_of_scaled(scores(i) * scale);
      derivatives(i) = fmaf(square * scores(i), scores(i), 1.f);
    }
  }
  float const slope = head_slope(params.score, task.index, head);
  if constexpr (kSide == Side::kKeys) {
    int const row = other * kOtherRows, column = task.tile * kTileRows;
    add_bias_transposed(scores, tScS, tScS_0, slope, row - column + task.sequence.shift);
    if (task.others.needs_mask(other)) apply_mask_transposed(scores, tScS, tScS_0, task.sequence, row, column);
  } else {
    int const row = task.tile * kTileRows, column = other * kOtherRows;
    add_bias(scores, tScS, tScS_0, slope, row - column + task.sequence.shift);
    if (task.others.needs_mask(other)) {
      apply_mask(scores, tScS, tScS_0, task.sequence, row - column, task.sequence.len_k - column);
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      float const lse_log2 = row_statistic<kSide>(smem.lse_log2, tScS, i, j);
      scores(i, j) = derivatives(i, j) * exp2_approx(fmaf(scores(i, j), params.scale_log2, -lse_log2));
    }
  }
  if (seen != ~0u) keep_seen(scores, seen, 0.f);
}

// P to dS.
template <class Traits, Side kSide, class Accumulator>
CUTE_DEVICE void differentiate(typename Traits::Storage const& smem,
                               Accumulator& tSrS,         // (4, 2, 4)
                               Accumulator const& tSrdP,  // (4, 2, 4)
                               int thread) {
  auto weights = rowcol_view(tSrS);                // (this side, other side)
  auto const dp = rowcol_view(tSrdP);              // (this side, other side)
  auto const tScS = score_coords<Traits>(thread);  // (this side, other side) -> (row of this side, of the other)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(weights); ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<1>(weights); ++j) {
      weights(i, j) *= dp(i, j) - row_statistic<kSide>(smem.delta, tScS, i, j);
    }
  }
}

}  // namespace flash_cute::sm80::backward::streamed
