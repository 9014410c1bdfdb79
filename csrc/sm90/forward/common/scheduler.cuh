// The tile scheduler of the persistent forward; TileOrder has the order of row tiles.
//
// Where a mask makes row tiles differ in length and there are many, the schedule is dynamic: a CTA begins with the tile
// of its own number, and draws the others from a ticket counter, longest first. Else it is static: a CTA has its range
// of the split tiles, and then whole tiles, dealt back and forth (most_dealt_waves).
#pragma once

#include <climits>

#include <cute/tensor.hpp>

#include "core/sequence.cuh"
#include "contract/params.h"

namespace flash_cute::sm90::forward {

// Key tiles [begin, end) of a row tile. `count`: the number of key tiles that this CTA has loaded before; it selects
// the pipeline stage.
struct KeySpan {
  int begin;
  int end;
  int count;
};

struct TileCoord {
  int m_block;  // -1: there are no more tiles
  int head;     // query head; where a tile has several, their group's number
  int head_kv;
  int batch;
  KeySpan keys;
  int parts;  // parts of the tile by other CTAs, which this one merges; -1: this CTA's share is a part
};

// A CTA's next tile is determined when it has this many key tiles of the last one left to load: it takes up to as long
// as two of them to draw its ticket, to read the lengths of its sequence and to find its coordinates.
constexpr int kTilesAhead = 2;

// The numbers of a sequence's tiles.
struct TileNumbers {
  int begin;
  int end;
};

// A tile of a sequence that was read at run time.
struct SequenceTile : TileCoord {
  Sequence sequence;
};

// Whether each warpgroup has the same 64 rows of another head, instead of those after the warpgroup's before it.
template <class Traits>
CUTE_DEVICE bool one_head_per_warpgroup(FwdParams const& params) {
  return Traits::kTileHeads > 1 && params.tile_heads > 1;
}

// A warpgroup's head and its first row.
template <class Traits>
CUTE_DEVICE int warpgroup_head(FwdParams const& params, int head, int warpgroup) {
  return one_head_per_warpgroup<Traits>(params) ? head * Traits::kWarpgroups + warpgroup : head;
}
template <class Traits>
CUTE_DEVICE int warpgroup_first_row(FwdParams const& params, int m_block, int warpgroup) {
  return one_head_per_warpgroup<Traits>(params) ? m_block * Traits::kRows
                                       : m_block * Traits::kBlockM + warpgroup * Traits::kRows;
}

// The key tiles of a dense batch's row tile.
template <class Traits>
CUTE_DEVICE TileRange tile_range(FwdParams const& params, int m_block) {
  int const rows = one_head_per_warpgroup<Traits>(params) ? Traits::kRows : Traits::kBlockM;
  return key_range<Traits::kBlockN>(params, m_block, rows);
}

// The coordinates of the tile of an index in the order.
CUTE_HOST_DEVICE void place_tile(TileOrder const& order, int index, TileCoord volatile& tile) {
  bool const exists = unsigned(index) < unsigned(order.num_tiles());
  RowTileCoord const coord = order.coord(exists ? index : 0);
  tile.m_block = exists ? coord.m_block : -1;
  tile.head = coord.head;
  tile.head_kv = coord.head / order.heads_per_kv;
  tile.batch = coord.batch;
}

// The range of split tiles of CTA `number`; negative: none. A CTA waits for parts of the ranges after its own, which
// CTAs of lower number have.
CUTE_HOST_DEVICE int split_range(TileSplit const& split, int number) { return split.ranges - 1 - number; }

// The number of a CTA's tile where tiles are dealt back and forth: where they get shorter, the CTA with the longest one
// has the shortest one next. `number`: the CTA's own, of `ctas`.
CUTE_HOST_DEVICE constexpr int dealt_number(int number, int ctas, int turn) {
  return turn * ctas + (turn % 2 == 0 ? number : ctas - 1 - number);
}

// The index of tile number `turn` of CTA `number` of `ctas`, and what of it is the CTA's: first the tiles of its range,
// then whole ones.
CUTE_HOST_DEVICE int deal_tile(TileSplit const& split, int number, int ctas, int turn, TileCoord volatile& tile) {
  tile.keys.begin = 0;
  tile.keys.end = INT_MAX;
  tile.parts = 0;
  int const range = split_range(split, number);
  if (range >= 0) {
    int const begin = split.range_begin(range), end = split.range_begin(range + 1);
    int const index = begin / split.steps + cute::min(turn, split.tiles), first = index * split.steps;
    if (first < end) {
      tile.keys.begin = cute::max(begin - first, 0);
      tile.keys.end = cute::min(end - first, split.steps);
      tile.parts = first < begin ? -1 : split.parts(index, range);
      return index;
    }
    turn -= (end - 1) / split.steps - begin / split.steps + 1;
  }
  return split.tiles + dealt_number(number, ctas, turn);
}

}  // namespace flash_cute::sm90::forward
