// The order in which the CTAs of the sm90 backward, up to head dim 128, take key tiles, and which tiles they share. Plain
// constants and data, a function of the shapes and of the number of SMs.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "../../core/tile_split.h"
#include "tile.h"

namespace flash_cute::sm90::bwd {

constexpr int kMaxDqShare = 8;  // row tiles of dQ per task, where there are many for few key tiles

// Tasks are numbered: the key tiles of all heads in the order of groups of interleaved heads, and `dq_lag` tasks behind
// them shares of dQ's conversion to 16-bit rows.
struct TaskOrder {
  int tiles;              // tasks_per_head of each KV head, of all batches
  int tasks_per_head;     // at least the key tiles
  int num_tasks;          // those, the ranges of split tiles instead of the last of them, and dQ of the last heads
  int dq_share;           // row tiles of dQ per task
  int dq_lag;             // tasks by which those are behind the key tiles
  int interleaved_heads;  // KV heads whose key tiles of one number are neighbours in the order of tasks
  int larger_groups;      // of interleaved heads, the first ones, which have one head more
};

// A backward's shape, in tiles.
struct TileCounts {
  int m_blocks;       // row tiles per query head
  int n_blocks;       // key tiles per KV head
  int group;          // query heads per KV head
  int64_t heads;      // KV heads of all batches
  int visited_rows;   // row tiles per query head that the longest key tile visits
};

// How many row tiles, of one query head each, lie between a key tile and the next one of its head. More: the next one's
// ordered add never waits, and the last group's many tiles even out. Fewer: the heads' Q, dO and dQ stay in L2, and fewer
// tasks at the end have nothing but dQ. Measured with 40 to 2,400.
constexpr int heads_distance(bool masked, bool deterministic, int n_blocks) {
  bool const few_tiles = n_blocks < 16;
  if (deterministic) return !masked ? 240 : few_tiles ? 400 : n_blocks < 64 ? 800 : 1200;
  return (masked ? 400 : 240) / (few_tiles ? 2 : 1);
}

// num_tasks is 0 where there are too many to be counted.
constexpr TaskOrder task_order(TileCounts const& counts, bool masked, bool deterministic, int num_sms) {
  auto const ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int64_t const heads = counts.heads;
  int64_t const row_tiles_per_head = int64_t{counts.m_blocks} * counts.group;
  int64_t const tasks_per_head = std::max<int64_t>(counts.n_blocks, ceil_div(row_tiles_per_head, kMaxDqShare));
  int64_t const tiles = tasks_per_head * heads;
  int64_t const distance = heads_distance(masked, deterministic, counts.n_blocks);
  int64_t const groups = ceil_div(heads, ceil_div(distance, std::max(1, counts.visited_rows)));
  // When a share's turn comes, its head's key tiles should have ended: the last of them began as many tasks ago as CTAs
  // run, and the first, with a causal mask, take twice the mean.
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

// A part takes as much memory as so many row tiles' sums of dQ.
constexpr int part_row_tiles(int block_m, int block_n) { return 2 * block_n / block_m; }

// The key tiles of the last wave, split by rows. With a mask the tiles even out by themselves, and in the deterministic
// mode the parts would wait for each other's ordered adds. Key tile 0 is not split: the others wait for it. (The last group
// of heads is never a larger one.)
constexpr TileSplit split_key_tiles(TaskOrder const& order, TileCounts const& counts, KernelShape const& shape,
                                    bool masked, bool deterministic, int num_sms) {
  if (masked || deterministic || order.tasks_per_head != counts.n_blocks) return {};
  int64_t const row_tiles_per_head = int64_t{counts.m_blocks} * counts.group;
  TileSplit const split = split_last_wave(order.tiles, row_tiles_per_head, num_sms, false);
  if (split.tiles > int64_t{order.interleaved_heads} * (counts.n_blocks - 1)) return {};
  // The parts overwrite the sums of the first heads, up to the end of a group: the shares of dQ of those come before the
  // ranges, by as many tasks as run at once.
  int64_t const parts_end = int64_t{split.ranges} * part_row_tiles(shape.block_m, shape.block_n);
  int64_t const heads_before = (parts_end + row_tiles_per_head - 1) / row_tiles_per_head + order.interleaved_heads;
  bool const room = heads_before * counts.n_blocks + order.dq_lag + num_sms <= order.tiles - split.tiles;
  return room ? split : TileSplit{};
}

}  // namespace flash_cute::sm90::bwd
