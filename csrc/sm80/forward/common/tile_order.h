// The order of row tiles, and when CTAs find their sequences themselves. Plain constants.
#pragma once

#include "contract/kernel_shape.h"
#include "contract/tile_order.h"

namespace flash_cute::sm80::forward {

// Up to so many sequences of a packed batch, with the two that nobody uses, every CTA finds its own among the offsets:
// a kernel before it would cost a small call 3 to 5 us of the host's time. With more, that is faster.
constexpr int kMostSearchedSequences = 256;

// With a mask row tiles differ in length: heads are grouped so that their K and V share L2 with the Q and O streams.
constexpr TileOrder tile_order(KernelShape const& shape, bool masked, int batch, int heads_q, int heads_kv, int len_q,
                               int len_k, int head_dim) {
  int const num_heads = batch * heads_q, heads_per_kv = heads_q / heads_kv;
  int const group = masked ? heads_in_l2(int64_t{32} << 20, len_k, head_dim, heads_per_kv, num_heads) : 1;
  return {.m_blocks = (len_q + shape.block_m - 1) / shape.block_m,
          .heads_q = heads_q,
          .heads_per_kv = heads_per_kv,
          .num_heads = num_heads,
          .group = group,
          .last_group = (num_heads - 1) / group,
          .longest_first = true};
}

}  // namespace flash_cute::sm80::forward
