// Which row tiles a CTA of the persistent grid works on, see TileOrder.
//
// Where a mask makes some rows longer than others, CTAs draw tiles from a ticket counter, longest first. Tiles of equal
// length, and those of which a CTA has at most one, are dealt in turn, after those split by keys.
#pragma once

#include <climits>

#include <cute/tensor.hpp>

#include "../../params.h"

namespace flash_cute::sm90::fwd {

// Key tiles [begin, end) of a row tile. `count`: of the key tiles that this CTA has passed before; it selects the
// pipeline stage.
struct KeySpan {
  int begin;
  int end;
  int count;
};

struct TileCoord {
  int m_block;  // -1: there are no more
  int head;     // of q
  int head_kv;
  int batch;
  KeySpan keys;
  int parts;  // of the tile that other CTAs have, and this one merges; -1: this is such a part
};

// The index-th tile of the order, whole.
CUTE_HOST_DEVICE void place_tile(TileOrder const& order, int index, TileCoord volatile& tile) {
  bool const exists = unsigned(index) < unsigned(order.num_tiles());
  RowTileCoord const coord = order.coord(exists ? index : 0);
  tile.m_block = exists ? coord.m_block : -1;
  tile.head = coord.head;
  tile.head_kv = coord.head / order.heads_per_kv;
  tile.batch = coord.batch;
  tile.keys.begin = 0;
  tile.keys.end = INT_MAX;
  tile.parts = 0;
}

// The range of split tiles that the number-th CTA has; negative: none. One waits for parts of the ranges after its own,
// which CTAs of lower numbers have.
CUTE_HOST_DEVICE int split_range(TileSplit const& split, int number) { return split.ranges - 1 - number; }

// The turn-th tile of the number-th of `ctas` CTAs: first those of its range of the split ones, then whole ones.
CUTE_HOST_DEVICE void deal_tile(TileOrder const& order, TileSplit const& split, int number, int ctas, int turn,
                                TileCoord volatile& tile) {
  int const range = split_range(split, number);
  if (range >= 0) {
    int const begin = split.range_begin(range), end = split.range_begin(range + 1);
    int const index = begin / split.steps + cute::min(turn, split.tiles), first = index * split.steps;
    if (first < end) {
      place_tile(order, index, tile);
      tile.keys.begin = cute::max(begin - first, 0);
      tile.keys.end = cute::min(end - first, split.steps);
      tile.parts = first < begin ? -1 : split.parts(index, range);
      return;
    }
    turn -= (end - 1) / split.steps - begin / split.steps + 1;
  }
  place_tile(order, split.tiles + number + turn * ctas, tile);
}

}  // namespace flash_cute::sm90::fwd
