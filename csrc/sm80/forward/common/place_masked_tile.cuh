// Which row tile of a batch with a mask a CTA computes, and which of the tile's rows see a key.
#pragma once

#include <cute/tensor.hpp>

#include "core/interval_mask.cuh"
#include "core/mask_columns.cuh"
#include "core/place.cuh"
#include "core/score.cuh"
#include "core/tile_bits.cuh"
#include "masked_tile.h"

namespace flash_cute::sm80::forward {

using namespace cute;

// By all threads, which a barrier joins.
template <class Traits>
CUTE_DEVICE void place_masked_tile(FwdParams const& params, MaskedTile& tile, int index = blockIdx.x) {
  if (threadIdx.x == 0) {
    RowTileCoord const coord = params.order.coord(index);
    int const head_kv = coord.head / (params.heads_q / params.heads_kv);
    TileMask const& mask = params.mask;
    int64_t const list = coord.batch * mask.row_list_batch_stride + head_kv * mask.row_list_head_stride +
                         int64_t{coord.m_block} * mask.of_rows.words;
    auto const first_key = [&](void const* base, Strides const& strides) {
      return static_cast<typename Traits::Element const*>(base) + coord.batch * strides.batch + head_kv * strides.head;
    };
    RowBits const* columns = columns_of_head(mask, coord.batch, head_kv);
    int64_t stride = mask.interval_stride;
    int per_column = mask.intervals_per_column;
    if (mask.bits != nullptr) {
      static_assert(Traits::kBlockM % kBitRows == 0);
      constexpr int kBlocks = Traits::kBlockM / kBitRows;
      stride = mask.bits_block_stride;
      columns += coord.m_block * kBlocks * stride;
      per_column = min(kBlocks, ceil_div(params.len_q, int{kBitRows}) - coord.m_block * kBlocks);
    }
    tile = {.coord = coord,
            .visited = mask.of_rows.visited + list,
            .whole = mask.of_rows.whole + list,
            .columns = columns,
            .per_column_stride = stride,
            .per_column = per_column,
            .k = first_key(params.k, params.k_strides),
            .v = first_key(params.v, params.v_strides),
            .zero = 0,
            .slope = Traits::kVariant.modifies_scores ? head_slope(params.score, coord.batch, coord.head) : 0.f};
  }
  __syncthreads();
}

// Which rows of a thread see a key, as `normalize` asks it.
struct SeeingRows {
  FwdParams const& params;
  uint32_t bits;
};
CUTE_DEVICE int written_rows(SeeingRows const& rows) { return rows.params.len_q; }
CUTE_DEVICE bool row_sees_a_key(SeeingRows const& rows, int /*row*/, int i) { return rows.bits >> i & 1; }
template <class Softmax>
CUTE_DEVICE float row_lse(SeeingRows const&, Softmax const& softmax, int i, int /*row*/) {
  return softmax.lse(i);
}

// A row whose sum is not 0 sees a key. Only of others the mask is read again: such a row sees none, unless all of its
// scores are -inf. After softmax.finish(), by whole warps.
template <class Traits, class Softmax, class Coords>
CUTE_DEVICE SeeingRows find_seeing_rows(FwdParams const& params, MaskedTile const& tile, Softmax const& softmax,
                                        Coords const& coords) {  // (rows, head dim) -> (row, column)
  constexpr int kRows = decltype(size<0>(coords))::value, kAll = (1 << kRows) - 1;
  constexpr unsigned kWarp = 0xffffffff;
  int const first_row = tile.coord.m_block * Traits::kBlockM;
  uint32_t seeing = 0;
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    bool const exists = first_row + get<0>(coords(i, _0{})) < params.len_q;
    seeing |= uint32_t{softmax.sum[i] != 0.f || !exists} << i;
  }
  if (!__any_sync(kWarp, seeing != kAll)) return {params, seeing};
  TileMask const& mask = params.mask;
  for (int n = last_set_before(tile.visited, 32 * mask.of_rows.words); n >= 0; n = last_set_before(tile.visited, n)) {
    // The threads of a quad have the same rows: each reads a fourth of the columns.
    for (int column = threadIdx.x % 4; column < Traits::kBlockN; column += 4) {
      for (int number = 0; number < tile.per_column; ++number) {
        RowBits const* const own = tile.columns + number * tile.per_column_stride + n * Traits::kBlockN + column;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          int const row = get<0>(coords(i, _0{}));
          bool const sees = mask.bits != nullptr
                                ? row / kBitRows == number && (*own >> row % kBitRows & 1) != 0
                                : contains(read_interval(reinterpret_cast<RowInterval const*>(own)), first_row + row);
          seeing |= uint32_t{sees} << i;
        }
      }
    }
  }
  seeing |= __shfl_xor_sync(kWarp, seeing, 1);
  seeing |= __shfl_xor_sync(kWarp, seeing, 2);
  return {params, seeing};
}

}  // namespace flash_cute::sm80::forward
