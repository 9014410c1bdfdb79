// The CTAs' walks over the row tiles of a dense batch, of sm90's persistent forwards.
#pragma once

#include <algorithm>
#include <vector>

#include "problem.h"
#include "registry.h"

#include "contract/tile_split.h"
#include "planning/time_model.h"
#include "sm90/forward/common/draws_tiles.h"
#include "sm90/forward/common/scheduler.cuh"

namespace inspect::sm90_forward {

using namespace flash_cute;
using namespace flash_cute::sm90::forward;

inline time_model::Work work_of(FwdParams const& params, int head_dim, int num_sms) {
  return {.sequences = {{{params.batch, params.len_q, params.len_k}}},
          .packed = false,
          .ends_aligned = false,
          .heads_q = params.heads_q,
          .heads_kv = params.heads_kv,
          .head_dim = time_model::nominal_head_dim(head_dim),
          .head_dim_v = time_model::nominal_head_dim(head_dim),
          .band = params.band,
          .num_sms = num_sms};
}

// `head_dim_of_16_bits`: the head dim with which 16-bit rows of K and V have as many bytes.
inline TileOrder order_of(FwdParams const& params, KernelShape const& shape, int head_dim_of_16_bits, int num_sms) {
  return tile_order(shape, is_masked(params.band), params.batch, params.heads_q, params.heads_kv, params.len_q,
                    params.len_k, head_dim_of_16_bits, num_sms);
}

// Where the CTAs draw tiles, the next goes to the one with the least work so far: its key tiles, and one for what a
// tile costs besides. Else tiles are dealt, after those of `split`.
template <int kBlockM, int kBlockN>
Array walks(FwdParams const& params, TileOrder const& order, bool drawn, TileSplit const& split, int num_sms) {
  bool const only_split = split.tiles > 0 && split.tiles == order.num_tiles();
  int const ctas = only_split ? split.ranges : int(std::min<int64_t>(order.num_tiles(), num_sms));

  Array array{{12, 0}, {}};
  std::vector<int> rounds(ctas), work(ctas);
  auto const add = [&](TileCoord const volatile& tile, int cta) {
    int const m_block = tile.m_block;
    TileRange const range = key_range<kBlockM, kBlockN>(params, m_block);
    int const begin = std::max(int(tile.keys.begin), range.begin);
    int const end = std::max(begin, std::min(int(tile.keys.end), range.end));
    append(array, {m_block, tile.head, tile.batch}, range);
    array.data.insert(array.data.end(), {cta, rounds[cta]++, begin, end, int(tile.parts)});
    work[cta] += end - begin + 1;
    ++array.shape[1];
  };
  TileCoord volatile tile;
  if (drawn) {
    deal_tile({}, 0, 1, 0, tile);  // all keys of a tile
    for (int index = 0; index < order.num_tiles(); ++index) {
      place_tile(order, index, tile);
      add(tile, int(std::min_element(work.begin(), work.end()) - work.begin()));
    }
    return array;
  }
  for (bool more = true; more;) {
    more = false;
    for (int cta = 0; cta < ctas; ++cta) {
      place_tile(order, deal_tile(split, cta, ctas, rounds[cta], tile), tile);
      if (tile.m_block < 0) continue;
      add(tile, cta);
      more = true;
    }
  }
  return array;
}

}  // namespace inspect::sm90_forward
