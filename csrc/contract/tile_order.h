// The order of a forward's row tiles. Plain data and integer arithmetic, for host and device.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_cute {

struct RowTileCoord {
  int m_block;
  int head;  // query head
  int batch;
};

// Heads are processed in groups whose K and V fit in L2 together. Within a group the last row tile of every head comes
// first: with a causal mask the longest tiles start first, and the shortest fill the tail. Without `longest_first`, all
// row tiles of a head come before those of the next head.
struct TileOrder {
  int m_blocks;      // row tiles per head
  int heads_q;
  int heads_per_kv;
  int num_heads;     // batch * heads_q
  int group;         // heads per group
  int last_group;    // its index; it has all the heads that remain
  bool longest_first;

  constexpr int64_t num_tiles() const { return int64_t{m_blocks} * num_heads; }

  constexpr RowTileCoord coord(int index) const {
    int m_block = index % m_blocks, head = index / m_blocks;
    if (longest_first) {
      int const number = index / (group * m_blocks) < last_group ? index / (group * m_blocks) : last_group;
      int const first_head = number * group;
      int const rank = index - first_head * m_blocks;
      int const heads = number < last_group ? group : num_heads - first_head;
      m_block = m_blocks - 1 - rank / heads;
      head = first_head + rank % heads;
    }
    return {m_block, head % heads_q, head / heads_q};
  }

  // Longest first, a group of heads has a wave of as many row tiles as there are `slots` for, then the next wave: which
  // one a row tile is in.
  constexpr int wave(int m_block, int slots) const { return (m_blocks - 1 - m_block) * group / slots; }
};
static_assert([] {
  TileOrder const order{.m_blocks = 8, .heads_q = 4, .heads_per_kv = 1, .num_heads = 4, .group = 2, .last_group = 1,
                        .longest_first = true};
  return order.wave(7, 6) == 0 && order.wave(5, 6) == 0 && order.wave(4, 6) == 1 && order.wave(0, 6) == 2;
}());

// Query heads per group so that K and V of a group take at most `bytes` of L2; at least those of one KV head.
constexpr int heads_in_l2(int64_t bytes, int len_k, int head_dim, int heads_per_kv, int num_heads) {
  int64_t const kv_bytes = std::max<int64_t>(1, int64_t{4} * len_k * head_dim);
  int64_t const heads = std::max<int64_t>(1, bytes / kv_bytes) * heads_per_kv;
  return int(std::max<int64_t>(1, std::min<int64_t>(heads, num_heads)));
}

}  // namespace flash_cute
