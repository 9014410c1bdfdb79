// The order in which the CTAs of the sm90 backward, up to head dim 128, take key tiles, and which tiles they share. Plain
// constants and data, a function of the shapes and of the number of SMs.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "../../core/tile_split.h"
#include "tile.h"

namespace flash_cute::sm90::bwd {

constexpr int kMaxDqShare = 8;  // row tiles of dQ a task, where there are many for few key tiles

struct TaskOrder {
  int tiles;           // tasks_per_head of each key head, of all batches
  int tasks_per_head;  // at least the key tiles
  int num_tasks;       // those, the ranges of split tiles instead of the last of them, and dQ of the last heads
  int dq_share;        // row tiles of dQ a task
  int dq_lag;          // tasks by which that is behind the key tiles
  int heads_abreast;   // key heads whose key tiles of one number are neighbours in the order of tasks
  int larger_groups;   // of heads abreast, the first ones, which have one head more
};

// How many row tiles, of a query head each, shall lie between a key tile and the next one of its head. More: the next
// one's turn has come at every row tile, and the last group's many tiles even out. Fewer: the heads' Q, dO and dQ stay
// in L2, and fewer tasks at the end have nothing but dQ. Measured with 40 to 2,400.
constexpr int heads_distance(bool causal, bool deterministic, int n_blocks) {
  bool const few_tiles = n_blocks < 16;
  if (deterministic) return !causal ? 240 : few_tiles ? 400 : n_blocks < 64 ? 800 : 1200;
  return (causal ? 400 : 240) / (few_tiles ? 2 : 1);
}

// `heads`: key heads of all batches; `group`: query heads of each. There are some of each, and of row tiles and key tiles.
// No tasks: there are too many to be counted.
constexpr TaskOrder task_order(bool causal, bool deterministic, int m_blocks, int n_blocks, int group, int64_t heads,
                             int num_sms) {
  auto const ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int64_t const row_tiles_per_head = int64_t{m_blocks} * group;
  int64_t const tasks_per_head = std::max<int64_t>(n_blocks, ceil_div(row_tiles_per_head, kMaxDqShare));
  int64_t const tiles = tasks_per_head * heads;
  int64_t const groups = ceil_div(heads, ceil_div(heads_distance(causal, deterministic, n_blocks), m_blocks));
  // When a share's turn comes, its head's key tiles shall have ended: the last of them began as many tasks ago as
  // CTAs run, and the first, with a causal mask, take twice the mean.
  int64_t const behind_group = tasks_per_head * ceil_div(heads, groups) + num_sms;
  int64_t const lag = std::min(tiles, causal ? std::max(behind_group, int64_t{3 * num_sms}) : behind_group);
  if (tiles + lag > INT_MAX || row_tiles_per_head * heads > INT_MAX) return {};
  return {.tiles = int(tiles),
          .tasks_per_head = int(tasks_per_head),
          .num_tasks = int(tiles + lag),
          .dq_share = int(ceil_div(row_tiles_per_head, tasks_per_head)),
          .dq_lag = int(lag),
          .heads_abreast = int(heads / groups),
          .larger_groups = int(heads % groups)};
}

// A part takes as much memory as so many row tiles' sums of dQ.
constexpr int part_row_tiles(TileConfig tile) { return 2 * tile.block_n / tile.block_m; }

// The key tiles of the last wave, split by rows. With a causal mask the tiles even out by themselves, and in the
// deterministic mode the parts would wait for each other's turns. Key tile 0 is not split: the others wait for it. (The
// last group of heads is never a larger one.)
constexpr TileSplit split_key_tiles(int head_dim, bool causal, bool deterministic, int len_q, int len_k, int group,
                                    int64_t heads, int num_sms) {
  if (causal || deterministic) return {};
  TileConfig const tile = tile_config(head_dim, causal, 0);
  int const m_blocks = int((int64_t{len_q} + tile.block_m - 1) / tile.block_m);
  int const n_blocks = int((int64_t{len_k} + tile.block_n - 1) / tile.block_n);
  TaskOrder const order = task_order(causal, deterministic, m_blocks, n_blocks, group, heads, num_sms);
  if (order.num_tasks == 0 || order.tasks_per_head != n_blocks) return {};
  int64_t const row_tiles_per_head = int64_t{m_blocks} * group;
  TileSplit const split = split_last_wave(order.tiles, row_tiles_per_head, num_sms, false);
  if (split.tiles > int64_t{order.heads_abreast} * (n_blocks - 1)) return {};
  // The first heads, whose place the parts take, up to the end of a group: their shares of dQ come before the ranges, by
  // as many tasks as run at once.
  int64_t const parts_end = int64_t{split.ranges} * part_row_tiles(tile);
  int64_t const heads_before = (parts_end + row_tiles_per_head - 1) / row_tiles_per_head + order.heads_abreast;
  bool const room = heads_before * n_blocks + order.dq_lag + num_sms <= order.tiles - split.tiles;
  return room ? split : TileSplit{};
}

}  // namespace flash_cute::sm90::bwd
