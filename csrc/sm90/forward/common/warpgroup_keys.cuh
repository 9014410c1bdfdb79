// The key tiles of a row tile that one warpgroup computes.
#pragma once

#include "core/mask.cuh"
#include "place.cuh"
#include "scheduler.cuh"
#include "sm90/common/pipeline.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::forward {

// The key tiles of a row tile that a warpgroup computes, [begin, end), among those that the CTA loads: what it needs to
// know of the CTA's next tile before it can begin.
template <class Traits>
struct WarpgroupKeys {
  bool exists;
  int first_row;
  int begin;
  int whole_begin;  // tiles before this one cross the band's lower edge
  int whole_end;    // tiles from here on cross its upper edge or the end of the keys
  int end;
  int before;  // the CTA's key tiles below `begin`, which only its other warpgroups compute
  int after;   // the same from `end` on
  int count;   // as in KeySpan

  // Waits for the tile.
  CUTE_DEVICE void read(FwdParams const& params, typename Traits::SharedStorage& smem, int tile_number, int warpgroup) {
    smem.tile_pipeline.wait_full(at_step(tile_number));  // the producer has written the tile
    TileCoord const volatile& tile = smem.tile[tile_number & 1];
    int const cta_block = uniform(tile.m_block);
    exists = cta_block >= 0;
    set(params, uniform_lengths_of(params, smem.tile[tile_number & 1]), tile, cta_block, warpgroup);
  }

 private:
  template <class Lengths>
  CUTE_DEVICE void set(FwdParams const& params, Lengths const& sequence, TileCoord const volatile& tile, int cta_block,
                       int warpgroup) {
    int const m_block =
        one_head_per_warpgroup<Traits>(params) ? cta_block : cta_block * Traits::kWarpgroups + warpgroup;
    int const cta_begin = uniform(tile.keys.begin), cta_end = uniform(tile.keys.end);
    TileRange const range = key_range<Traits::kRows, Traits::kBlockN>(sequence, m_block);
    first_row = m_block * Traits::kRows;
    bool const has_rows = first_row < sequence.len_q;
    begin = has_rows ? min(cta_end, max(cta_begin, range.begin)) : cta_end;
    end = has_rows ? max(begin, min(cta_end, range.end)) : begin;
    whole_begin = range.whole_begin;
    whole_end = max(begin, min(end, range.whole_end));
    before = begin - cta_begin;
    after = cta_end - end;
    count = uniform(tile.keys.count);
  }
};

// Calls mask(columns) if the key tile `n` of a row tile crosses an edge of the mask, or ends behind the last key.
// `offset`: the warpgroup's first row minus the key tile's first column; `columns`: of the key tile up to the last key.
template <class Traits, class Mask>
CUTE_DEVICE void mask_at_edge(FwdParams const& params, TileCoord const&, WarpgroupKeys<Traits> const&, int, int offset,
                              int columns, Mask const& mask) {
  if (columns < Traits::kBlockN || crosses_band<Traits::kRows, Traits::kBlockN>(params, offset)) mask(columns);
}
// The band of a sequence is in shared memory, the numbers of its whole key tiles in registers.
template <class Traits, class Mask>
CUTE_DEVICE void mask_at_edge(FwdParams const&, SequenceTile const&, WarpgroupKeys<Traits> const& keys, int n, int,
                              int columns, Mask const& mask) {
  if (unsigned(n - keys.whole_begin) >= unsigned(keys.whole_end - keys.whole_begin)) mask(columns);
}

}  // namespace flash_cute::sm90::forward
