// The order of the row tiles of the persistent forwards whose CTA owns query rows. Plain constants.
#pragma once

#include <algorithm>
#include <cstdint>

#include "contract/kernel_shape.h"
#include "contract/tile_order.h"

namespace flash_cute::sm90::forward {

// Row tiles that differ in length are dealt to the CTAs back and forth, the longest first, or else drawn by them, where
// there are more waves than this. To draw them takes 1 to 2 us more, since a kernel zeroes the counter before;
// dealt, they even out less. `alike`: all sequences are equally long, or none has two tiles.
constexpr int most_dealt_waves(bool alike) { return alike ? 4 : 2; }

// With a mask, row tiles differ in length and heads are grouped, longest tiles first. The fewer bytes of K and V per
// group, the surer they stay in L2; but where a head has many keys, a group of few heads has too few tiles to overlap
// with its longest ones, and tiles that are dealt even out only if each wave has shorter ones than the wave before. The
// last group has at least one tile per SM, or its longest tile would start when other SMs run out of work.
constexpr TileOrder tile_order(KernelShape const& shape, bool masked, int batch, int heads_q, int heads_kv, int len_q,
                               int len_k, int head_dim, int num_sms, int tile_heads = 1) {
  int const rows = shape.block_m / tile_heads;
  heads_q /= tile_heads;
  int const m_blocks = (len_q + rows - 1) / rows;
  int const num_heads = batch * heads_q, heads_per_kv = heads_q / heads_kv;
  bool const dealt = int64_t{m_blocks} * num_heads <= int64_t{num_sms} * most_dealt_waves(/*alike=*/true);
  int64_t const l2_bytes = int64_t{len_k <= 1024 && !dealt ? 4 : 32} << 20;
  int const group = masked ? heads_in_l2(l2_bytes, len_k, head_dim, heads_per_kv, num_heads) : num_heads;
  int const last_heads = std::max(group, (num_sms + m_blocks - 1) / m_blocks);
  return {.m_blocks = m_blocks,
          .heads_q = heads_q,
          .heads_per_kv = heads_per_kv,
          .num_heads = num_heads,
          .group = group,
          .last_group = std::max(0, num_heads - last_heads) / group,
          .longest_first = masked};
}

}  // namespace flash_cute::sm90::forward
