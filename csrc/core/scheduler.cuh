// Which tile a CTA works on.
#pragma once

#include <algorithm>

#include <cute/numeric/math.hpp>

#include "../params.h"

namespace flash_cute {

struct TileCoord {
  int m_block;
  int head;  // of q
  int batch;
};

// Tiles in launch order. Heads are taken in groups whose keys and values stay in L2 together; inside a
// group the last row tile of every head comes first, so that with a causal mask the longest work starts
// first and the shortest fills the gaps at the end. A group of one head is the plain order.
struct TileScheduler {
  int num_m_blocks;
  int heads_q;
  int num_heads;  // batch * heads_q
  int group;      // heads a group

  static constexpr int64_t kL2Budget = 32 << 20;  // bytes of K and V that share L2 with the Q, O streams

  static TileScheduler make(FwdParams const& params, int block_m, bool longest_first) {
    int const num_heads = params.batch * params.heads_q;
    int64_t const kv_bytes = std::max<int64_t>(1, int64_t{2} * params.len_k * params.head_dim * 2);
    int64_t const fitting = std::max<int64_t>(1, kL2Budget / kv_bytes) * (params.heads_q / params.heads_kv);
    int const group = longest_first ? int(std::min<int64_t>(fitting, num_heads)) : 1;
    return {(params.len_q + block_m - 1) / block_m, params.heads_q, num_heads, group};
  }

  CUTE_HOST_DEVICE int64_t num_tiles() const { return int64_t{num_m_blocks} * num_heads; }

  CUTE_HOST_DEVICE TileCoord operator()(unsigned index) const {
    unsigned const group_tiles = unsigned(group) * unsigned(num_m_blocks);
    unsigned const first_head = index / group_tiles * unsigned(group);
    unsigned const in_group = index % group_tiles;
    unsigned const heads_here = cute::min(unsigned(group), unsigned(num_heads) - first_head);
    unsigned const head = first_head + in_group % heads_here;
    return {num_m_blocks - 1 - int(in_group / heads_here), int(head) % heads_q, int(head) / heads_q};
  }
};

}  // namespace flash_cute
