// Which rows of a tile see a key, as the epilogue asks for it.
#pragma once

#include "core/fwd_normalize.cuh"
#include "core/interval_mask.cuh"
#include "core/mask_columns.cuh"
#include "core/place.cuh"
#include "core/tile_bits.cuh"
#include "sm90/common/warpgroup.cuh"
#include "sm90/forward/common/scheduler.cuh"

namespace flash_cute::sm90::forward::masked_rows {

// A thread's two rows.
struct SeeingRows {
  FwdParams const& params;
  uint32_t bits;

  CUTE_DEVICE operator FwdParams const&() const { return params; }
};
CUTE_DEVICE bool row_sees_a_key(SeeingRows const& rows, int /*row*/, int i) { return rows.bits >> i & 1; }
CUTE_DEVICE int written_rows(SeeingRows const& rows) { return rows.params.len_q; }
CUTE_DEVICE int first_row(SeeingRows const&) { return 0; }

// Of the 16 rows from `first_row` on, those that some column sees, as bits. By a warp.
template <class Traits>
CUTE_DEVICE uint32_t seeing_rows_of_warp(FwdParams const& params, TileCoord const& tile, int first_row) {
  TileMask const& mask = params.mask;
  int const unit = first_row / Traits::kRows, head_kv = tile.head / params.order.heads_per_kv;
  uint32_t const* const visited = mask.of_rows.visited + tile.batch * mask.row_list_batch_stride +
                                  head_kv * mask.row_list_head_stride + int64_t{unit} * mask.of_rows.words;
  RowBits const* columns = columns_of_head(mask, tile.batch, head_kv);
  bool const are_bits = mask.bits != nullptr;
  if (are_bits) columns += unit * mask.bits_block_stride;
  auto const low_bits = [&](int row) { return (1u << max(0, min(row - first_row, 16))) - 1; };
  uint32_t seeing = 0;
#pragma unroll 1
  for (int n = last_set_before(visited, 32 * mask.of_rows.words); n >= 0; n = last_set_before(visited, n)) {
#pragma unroll 1
    for (int column = threadIdx.x % 32; column < Traits::kBlockN; column += 32) {
      RowBits const* const own = columns + int64_t{n} * Traits::kBlockN + column;
      if (are_bits) seeing |= static_cast<uint32_t>(*own >> first_row % kBitRows) & 0xffff;
      for (int i = 0; i < mask.intervals_per_column; ++i) {
        RowInterval const rows = read_interval(reinterpret_cast<RowInterval const*>(own) + i * mask.interval_stride);
        seeing |= low_bits(rows.limit) & ~low_bits(rows.first);
      }
    }
  }
  return __reduce_or_sync(0xffffffff, seeing);
}

// A row whose sum is not 0 sees a key. Only for others the mask is read again: such a row sees none, unless all of its
// scores are -inf. After softmax.finish(), by whole warps.
template <class Traits>
CUTE_DEVICE SeeingRows find_seeing_rows(FwdParams const& params, TileCoord const& tile, int warpgroup,
                                        OnlineSoftmax<2> const& softmax) {
  int const row =
      tile.m_block * Traits::kBlockM + warpgroup * Traits::kRows + first_row_of_thread(fresh_thread_index());
  uint32_t seeing = 0;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) seeing |= uint32_t{softmax.sum[i] != 0.f || row + 8 * i >= params.len_q} << i;
  if (__any_sync(0xffffffff, seeing != 3)) {
    uint32_t const of_warp = seeing_rows_of_warp<Traits>(params, tile, row / 16 * 16) >> row % 16;
    seeing |= (of_warp & 1) | (of_warp >> 8 & 1) << 1;
  }
  return {params, seeing};
}

}  // namespace flash_cute::sm90::forward::masked_rows
