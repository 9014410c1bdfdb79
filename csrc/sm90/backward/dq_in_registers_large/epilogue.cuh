// Stores the CTA's columns of 64 rows of dK, dV or dQ, from the registers of one warpgroup.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/layout.cuh"
#include "sm90/common/store_tma.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::backward::dq_in_registers_large {

// Stores the sums times `factor` through `buffer` in shared memory, by TMA, which clips what is outside the tensor.
// Rows from `used` on get 0, even if the sequence has a NaN. `buffer` is an operand whose last use, if it is still in
// flight, is in products on stale data (of dQ), whose result is not used. `row`: the tile's first one.
template <class Traits, class Accumulator>
CUTE_DEVICE void store_sums(CUtensorMap const& map, typename Traits::Element* buffer, int warpgroup,
                            Accumulator& sums,  // (MMA, MMA_M, MMA_N)
                            float factor, int row, int used, int head, SequenceOrigin const& origin) {
  int const thread = fresh_thread_index() % 128;
  typename Traits::MmaSums mma;
  auto cSums = make_identity_tensor(Shape<_64, Int<Traits::kColumns>>{});  // -> (row, column)
  auto const coords = rowcol_view(mma.get_slice(thread).partition_C(cSums));
  auto acc = rowcol_view(sums);  // (rows, columns)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(acc); ++i) {
    if (row + int{get<0>(coords(i, _0{}))} < used) continue;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = 0.f;
  }
  stage_rows<typename Traits::MmaSums, typename Traits::SmemLayout>(buffer, thread, sums, factor);
  tma_store_fence();
  named_sync(kResults + warpgroup, 128);  // all threads of the warpgroup have written their share
  if (thread == 0) {
    CUTE_UNROLL
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      SM90_TMA_STORE_5D::copy(&map, buffer + chunk * kTileRows * Traits::kChunk,
                              chunk * Traits::kChunk, origin.row + row, head,
                              origin.last, origin.back);
    }
    tma_store_arrive();
    tma_store_wait<0>();  // shared memory must live until the TMA store has read it
  }
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
