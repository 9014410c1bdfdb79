// The long sequences of a batch over a cache, and their row tiles.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include "contract/decode.h"
#include "core/sequence.cuh"
#include "core/split_keys/work.cuh"
#include "core/warp_sum.cuh"
#include "sm90/forward/common/sequence_scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::long_rows {

// The forward's, where k and v are caches: len_k is their capacity, and a page has the place of a batch.
struct Params : FwdParams {
  PageTable table;
  int const* cache_seqlens;  // see DecodeParams
  int new_keys;
  int long_rows;
};

template <class Params_>
struct Args {
  CUtensorMap q;  // as the forward's of packed batches
  CUtensorMap k;  // (column, row, head, page)
  CUtensorMap v;
  Params_ params;
  cutlass::FastDivmod page_size;
  int tile_pages;  // a key tile is so many pages
  int tile_rows;   // and so many rows
  int box_bits;    // a TMA box of keys has 2^box_bits rows: a number that divides the page size and the key tile

  CUTE_HOST_DEVICE int box_rows() const { return 1 << box_bits; }
};
using KernelArgs = Args<Params>;

// What else a tile is told by the scheduler: that of float8 caches, see float8.cuh.
CUTE_DEVICE void add_factors(Params const&, SequenceTile&) {}

// A sequence that is not long has no rows here. `floor`: see core/sequence.cuh.
CUTE_DEVICE int rows_of(Params const& params, int index, int floor) {
  int const rows = row_extent(params, index, floor).length;
  return rows < params.long_rows ? 0 : rows;
}

CUTE_DEVICE Sequence read_sequence(Params const& params, int index, int floor) {
  flash_cute::Sequences const& all = params.sequences;
  Extent const rows = row_extent(params, index, floor);
  int const len_k = flash_cute::split_keys::keys_of(params, index, rows.length);
  int const shift = all.bottom_right ? len_k - rows.length : 0;
  return {.len_q = rows.length,
          .len_k = len_k,
          .band = window_band(all.window_left, all.window_right, shift, rows.length, len_k),
          .shift = shift,
          .first_row = rows.first,
          .first_key = 0,
          .rows = rows.length};
}

// Publishes the CTA's row tiles, as schedule_sequences does: 32 neighbouring sequences at a time, one per lane. The
// tiles of all sequences and heads are dealt, so that there is no counter, and the workspace stays that of short
// sequences. By a warp, which has few registers.
template <class Traits, class Params_>
CUTE_DEVICE void schedule(Params_ const& params, typename Traits::SharedStorage& smem) {
  constexpr int kBlockM = Traits::kBlockM;
  constexpr unsigned kAll = forward::kAllLanes;
  int const lane = fresh_thread_index() % 32;
  int volatile& floor = smem.floors[lane].rows;  // of this lane's sequence
  auto volatile& own = smem.own_tiles[lane];     // the numbers of its row tiles
  floor = 0;
  int group = -32, group_end = 0;  // sequences from `group` on; tile numbers below are of these or of those before
  int count = 0;                   // key tiles of the tiles published so far
#pragma unroll 1
  for (int tile_number = 0;; ++tile_number) {
    int const number = forward::dealt_number(blockIdx.x, gridDim.x, tile_number);
#pragma unroll 1
    while (number >= group_end && group + 32 < params.batch) {
      group += 32;
      int const index = group + lane;
      floor = inclusive_warp_max(max(row_begin(params, index), __shfl_sync(kAll, int(floor), 31)));
      int const tiles = index < params.batch ? ceil_div(rows_of(params, index, floor), kBlockM) * params.heads_q : 0;
      int const end = group_end + inclusive_warp_sum(tiles);
      own.begin = end - tiles;
      own.end = end;
      group_end = __shfl_sync(kAll, end, 31);
    }
    bool const exists = number < group_end;
    bool const mine = exists ? own.begin <= number && number < own.end : lane == 0;
    smem.tile_pipeline.wait_empty(at_step(tile_number));  // the tile before the last is not read any more
    int key_tiles = 0;
    if (mine) {
      auto& tile = smem.tile[opaque(tile_number) & 1];
      tile.m_block = -1;
      if (exists) {
        Sequence const sequence = read_sequence(params, group + lane, floor);
        TileOrder const order = forward::sequence_order(params, sequence, ceil_div(sequence.rows, kBlockM));
        RowTileCoord const coord = order.coord(number - own.begin);
        TileRange const range = key_range<kBlockM, Traits::kBlockN>(sequence, coord.m_block);
        key_tiles = range.end - range.begin;
        tile.m_block = coord.m_block;
        tile.head = coord.head;
        tile.head_kv = coord.head / order.heads_per_kv;
        tile.batch = group + lane;
        tile.keys = {range.begin, range.end, count};
        tile.parts = 0;
        tile.sequence = sequence;
        add_factors(params, tile);
      }
      smem.tile_pipeline.publish(at_step(tile_number));
    }
    if (!exists) break;
    count += __reduce_add_sync(kAll, key_tiles);
  }
}

}  // namespace flash_cute::sm90::decode::long_rows
