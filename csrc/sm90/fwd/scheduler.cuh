// The order of the tiles, and which of them a CTA of the persistent grid works on.
//
// Where a mask makes some rows longer than others, tiles come in groups of as many heads as keep their keys and values
// in L2 together, and inside a group the longest tiles first; a CTA that is done draws the next one from a counter.
// Tiles of equal length, and those of which a CTA has one at most, are dealt in turn, after those split by keys.
#pragma once

#include <algorithm>
#include <climits>

#include <cute/tensor.hpp>

#include "../../core/mask.cuh"

namespace flash_cute::sm90::fwd {

// Key tiles [begin, end), of those that a row tile sees, as the `count`-th and following of a CTA's way.
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
  int parts;  // of the tile that other CTAs have, and this one takes in; -1: this is such a part
};

struct TileSchedule {
  int num_m_blocks;
  int heads_q;
  int heads_per_kv;
  int num_heads;   // batch * heads_q
  int group;       // heads a group
  int last_group;  // its number; it has the heads that remain
  bool longest_first;

  // Bytes of K and V a group. Less keeps them in L2 more surely; but where a head has many keys, a group of few heads
  // has too few tiles to hide its longest behind.
  static int64_t l2_budget(int len_k) { return int64_t{len_k <= 1024 ? 4 : 32} << 20; }

  static TileSchedule make(FwdParams const& params, int block_m, bool longest_first, int num_sms) {
    int const num_heads = params.batch * params.heads_q;
    int const num_m_blocks = (params.len_q + block_m - 1) / block_m;
    int64_t const kv_bytes = std::max<int64_t>(1, int64_t{4} * params.len_k * params.head_dim);
    int64_t const fitting_kv = std::max<int64_t>(1, l2_budget(params.len_k) / kv_bytes);
    int64_t const fitting = std::min<int64_t>(num_heads, fitting_kv * (params.heads_q / params.heads_kv));
    int64_t const group = longest_first ? fitting : num_heads;
    // The last has a tile for every SM at least, or its longest would come when others have no more to do.
    int64_t const last_heads = std::max<int64_t>(group, (num_sms + num_m_blocks - 1) / num_m_blocks);
    return {.num_m_blocks = num_m_blocks,
            .heads_q = params.heads_q,
            .heads_per_kv = params.heads_q / params.heads_kv,
            .num_heads = num_heads,
            .group = int(group),
            .last_group = int(std::max<int64_t>(0, num_heads - last_heads) / group),
            .longest_first = longest_first};
  }

  CUTE_HOST_DEVICE int64_t num_tiles() const { return int64_t{num_m_blocks} * num_heads; }

  // The index-th tile of the order, whole.
  CUTE_HOST_DEVICE void place(int index, TileCoord volatile& tile) const {
    int m_block = index % num_m_blocks, head = index / num_m_blocks;
    if (longest_first) {
      int const number = cute::min(index / (group * num_m_blocks), last_group);
      int const first_head = number * group;
      int const rank = index - first_head * num_m_blocks;
      int const heads = number < last_group ? group : num_heads - first_head;
      m_block = num_m_blocks - 1 - rank / heads;
      head = first_head + rank % heads;
    }
    tile.m_block = unsigned(index) < unsigned(num_tiles()) ? m_block : -1;
    tile.head = head % heads_q;
    tile.head_kv = head % heads_q / heads_per_kv;
    tile.batch = head / heads_q;
    tile.keys.begin = 0;
    tile.keys.end = INT_MAX;
    tile.parts = 0;
  }

  // A CTA's turn-th tile where they are dealt: first those of its range of the split ones, then whole ones. It waits
  // for parts of the ranges after its own, which CTAs have that are launched before it.
  CUTE_HOST_DEVICE void deal(TileSplit const& split, int cta, int ctas, int turn, TileCoord volatile& tile) const {
    int const range = split.ranges - 1 - cta;
    if (range >= 0) {
      int const begin = split.range_begin(range), end = split.range_begin(range + 1);
      int const index = begin / split.steps + cute::min(turn, split.tiles), first = index * split.steps;
      if (first < end) {
        place(index, tile);
        tile.keys.begin = cute::max(begin - first, 0);
        tile.keys.end = cute::min(end - first, split.steps);
        tile.parts = first < begin ? -1 : split.parts(index, range);
        return;
      }
      turn -= (end - 1) / split.steps - begin / split.steps + 1;
    }
    place(split.tiles + cta + turn * ctas, tile);
  }
};

}  // namespace flash_cute::sm90::fwd
