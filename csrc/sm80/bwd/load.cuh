// The loads of the backward's mainloop: a row tile of Q or dO with its row statistics (LSE or delta).
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/tensor.hpp>

#include "task.cuh"
#include "traits.cuh"
#include "../load_cp_async.cuh"

namespace flash_cute::sm80::bwd {

// Starts the copy of a row tile. sX holds it in parts, one shared-memory tile per part.
template <class Traits, class Smem>
CUTE_DEVICE void load_row_tile(BwdParams const& params, int batch, RowTile const& row_tile, void const* base,
                               Strides const& strides,
                               Smem&& sX,  // (BLK_M / parts, D, part)
                               float const* stats, float* smem_stats) {
  using Element = typename Traits::Element;
  int const first_row = row_tile.m_block * Traits::kBlockM;
  auto const* gX = static_cast<Element const*>(base) + batch * strides.batch + row_tile.head * strides.head +
                   first_row * strides.row;
  CUTE_UNROLL
  for (int part = 0; part < Traits::kParts; ++part) {
    int const row = part * Traits::kScoreRows;
    load_tile<false>(typename Traits::GmemLoad{}, gX + row * strides.row, strides.row, sX(_, _, part),
                     params.len_q - first_row - row, params.head_dim);
  }
  int const four = 4 * fresh_thread_index();  // no check of len_q: the workspace is padded to whole row tiles
  if (four < Traits::kBlockM) {
    SM80_CP_ASYNC_CACHEALWAYS<uint128_t>::copy(
        *reinterpret_cast<uint128_t const*>(stats + row_tile.index(params, batch) * Traits::kBlockM + four),
        *reinterpret_cast<uint128_t*>(smem_stats + four));
  }
}

}  // namespace flash_cute::sm80::bwd
