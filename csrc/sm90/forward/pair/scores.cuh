// The scores of the forwards for large head dims: which key tiles need the mask.
#pragma once

#include <cute/tensor.hpp>

#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "sm90/forward/common/scores.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::forward::pair {

// The key tiles that need no mask.
struct WholeTiles {
  int begin;
  int size;

  CUTE_DEVICE bool contains(int tile) const { return unsigned(tile - begin) < unsigned(size); }
};

// Of a warpgroup's kRows rows, one of kWarpgroups of the tile, which is in shared memory: see `uniform`.
template <int kRows, int kKeys, int kWarpgroups, class Tile>
CUTE_DEVICE WholeTiles whole_tiles(Tile const& tile, int warpgroup) {
  Sequence const& it = tile.sequence;
  Sequence const sequence{.len_q = uniform(it.len_q),
                          .len_k = uniform(it.len_k),
                          .band = {.lower = uniform(it.band.lower), .upper = uniform(it.band.upper)}};
  TileRange const range = key_range<kRows, kKeys>(sequence, kWarpgroups * uniform(tile.m_block) + warpgroup);
  return {.begin = range.whole_begin, .size = range.whole_end - range.whole_begin};
}

}  // namespace flash_cute::sm90::forward::pair
