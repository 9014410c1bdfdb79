// What a step does otherwise with a mask: the mask itself, and the turns of the deterministic mode.
#pragma once

#include <cute/tensor.hpp>

#include "core/bits_mask.cuh"
#include "core/interval_mask.cuh"
#include "masked_traits.cuh"
#include "sequence_dq.cuh"
#include "sequence_scores.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// Sets the scores outside the mask to -inf.
template <class Schedule, class Accumulator>
__device__ inline void mask_scores(BwdParams const& params, MaskedTask const& task, RowTile const& now, int part,
                                   Accumulator& tSrS) {  // (MMA, MMA_N, MMA_M)
  using Traits = typename Schedule::Traits;
  if (is_set(task.whole, now.m_block)) return;
  auto scores = rowcol_view(tSrS);  // (keys, rows)
  TileMask const& mask = params.mask;
  auto const tScS = thread_coords<Traits>(task);           // (keys, rows) -> (key, row)
  auto const tScS_0 = score_coords_of_thread_0<Traits>();  // the same of thread 0, static
  int const row = now.m_block * Traits::kBlockM + part * Traits::kScoreRows;
  if (mask.bits != nullptr) {
    static_assert(kBitRows % Traits::kBlockM == 0);
    apply_bits_transposed(scores, tScS, tScS_0, row, task.columns + row / kBitRows * mask.bits_block_stride);
  } else {
    apply_interval_mask_transposed(scores, tScS, tScS_0, row, reinterpret_cast<RowInterval const*>(task.columns),
                                   mask.intervals_per_column, mask.interval_stride);
  }
}

// The semaphore of a row tile holds the number after that of the key tile that added last. The key tile of the turn
// knows its predecessor from the row tile's list, and need not count those before it.
template <class Traits>
__device__ inline void wait_turn(BwdParams const& params, MaskedTask const& task, RowTile const& row_tile) {
  int const turn = visitor_before(params, task, row_tile.m_block) + 1;
  while (turns_ended(semaphore(params, task, row_tile)) != turn) continue;
}
CUTE_DEVICE void end_turn(int* semaphore, MaskedTask const& task) { store_release(semaphore, task.n_block + 1); }

}  // namespace flash_cute::sm80::backward::dq_in_memory
