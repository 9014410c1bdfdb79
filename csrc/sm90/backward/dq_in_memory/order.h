// The order of tasks of the sm90 backward up to head dim 128 and of 192/128, and which key tiles are split: a function
// of the shapes and the number of SMs. Plain constants and data.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "contract/orders.h"
#include "contract/tile_split.h"
#include "sm90/backward/common/heads_distance.h"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_memory {

constexpr int kMaxDqShare = 8;  // most row tiles of dQ per task; reached where there are many per key tile

// A backward's shape, in tiles.
struct TileCounts {
  int m_blocks;       // row tiles per query head
  int n_blocks;       // key tiles per KV head
  int heads_per_kv;   // query heads per KV head
  int64_t heads;      // KV heads of all batches
  int visited_rows;   // row tiles per query head that the longest key tile visits
};

// num_tasks is 0 where it would overflow an int.
constexpr TaskOrder task_order(TileCounts const& counts, bool masked, bool deterministic, int num_sms) {
  auto const ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int64_t const heads = counts.heads;
  int64_t const row_tiles_per_head = int64_t{counts.m_blocks} * counts.heads_per_kv;
  int64_t const tasks_per_head = std::max<int64_t>(counts.n_blocks, ceil_div(row_tiles_per_head, kMaxDqShare));
  int64_t const tiles = tasks_per_head * heads;
  int64_t const distance = heads_distance(masked, deterministic, counts.n_blocks);
  int64_t const groups = ceil_div(heads, ceil_div(distance, std::max(1, counts.visited_rows)));
  // When a share of dQ is drawn, the key tiles of its head should have ended: the last of them was drawn at least one
  // wave (num_sms tasks) earlier, and with a causal mask the first ones take twice the mean.
  int64_t const behind_group = tasks_per_head * ceil_div(heads, groups) + num_sms;
  int64_t const lag = std::min(tiles, masked ? std::max(behind_group, int64_t{3 * num_sms}) : behind_group);
  if (tiles + lag > INT_MAX || row_tiles_per_head * heads > INT_MAX) return {};
  return {.tiles = int(tiles),
          .tasks_per_head = int(tasks_per_head),
          .num_tasks = int(tiles + lag),
          .dq_share = int(ceil_div(row_tiles_per_head, tasks_per_head)),
          .dq_lag = int(lag),
          .interleaved_heads = int(heads / groups),
          .larger_groups = int(heads % groups)};
}

// The memory of a part, in units of one row tile's dQ sums.
constexpr int part_row_tiles(int block_m, int block_n) { return 2 * block_n / block_m; }

// Splits the key tiles of the last wave by rows. Not with a mask, where tiles of different length even out, nor in the
// deterministic mode, where parts would wait for each other's ordered adds. Key tile 0 is never split, since the others
// wait for it. (The last group of heads is never one of the larger ones.)
constexpr TileSplit split_key_tiles(TaskOrder const& order, TileCounts const& counts, KernelShape const& shape,
                                    bool masked, bool deterministic, int num_sms) {
  if (masked || deterministic || order.tasks_per_head != counts.n_blocks) return {};
  int64_t const row_tiles_per_head = int64_t{counts.m_blocks} * counts.heads_per_kv;
  constexpr bool kEqualRanges = false;
  TileSplit const split = split_last_wave(order.tiles, row_tiles_per_head, num_sms, kEqualRanges);
  if (split.tiles > int64_t{order.interleaved_heads} * (counts.n_blocks - 1)) return {};
  // The parts overwrite the dQ sums of the first heads. The shares of those heads, up to the end of a group, must be
  // drawn at least one wave (num_sms tasks) before the ranges.
  int64_t const parts_end = int64_t{split.ranges} * part_row_tiles(shape.block_m, shape.block_n);
  int64_t const heads_before = (parts_end + row_tiles_per_head - 1) / row_tiles_per_head + order.interleaved_heads;
  bool const room = heads_before * counts.n_blocks + order.dq_lag + num_sms <= order.tiles - split.tiles;
  return room ? split : TileSplit{};
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
