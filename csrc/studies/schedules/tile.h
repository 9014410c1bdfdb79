// The family of schedules: the ways to divide an attention tile among warps and shared memory. Plain constants: the
// kernels' traits, the operator and `flash_cute.schedules` all read them here. docs/schedules.md explains each.
#pragma once

#include "contract/kernel_shape.h"
#include "sm80/forward/rows/tile.h"

namespace flash_cute::studies::schedules {

using namespace sm80;
namespace rows = sm80::forward::rows;

enum Schedule : int {
  kSplitKv,         // warps divide a tile's keys, one stage of K and V
  kSplitKv2Stages,  // the same, two stages
  kSplitQ,          // warps divide the rows: the library's kernel, one stage
  kSplitQ2Stages,   // the same, two stages
  kSharedKv,        // K and V take turns in one buffer
  kSharedQkv,       // Q's buffer, once Q is in registers, is K's and V's
  kTiledQk,         // Q and K come in tiles of a few columns
  kTiledQkv,        // and V: shared memory does not grow with the head dim
  kNumSchedules,
};

constexpr char const* kScheduleNames[kNumSchedules] = {
    "split_kv", "split_kv_2stages", "split_q", "split_q_2stages", "shared_kv", "shared_qkv", "tiled_qk", "tiled_qkv"};

struct TileConfig {
  rows::TileConfig tile;  // of tiled schedules `stages` counts the buffers of column tiles
  int columns = 0;       // of a column tile of Q and K, and in tiled_qkv of V; 0: whole rows
  int out_columns = 0;   // of O per CTA, where that is not the head dim: CTAs compute S again for their columns
};

constexpr bool divides_keys(Schedule schedule) { return schedule == kSplitKv || schedule == kSplitKv2Stages; }
constexpr bool is_tiled(Schedule schedule) { return schedule == kTiledQk || schedule == kTiledQkv; }

// The largest head dim of a schedule. Whole rows of Q, K and V fit in shared memory beyond 128 too, but there the
// library's tables have nothing that the other schedules would add to.
constexpr int max_head_dim(Schedule schedule) {
  return schedule == kTiledQkv ? 512 : schedule == kTiledQk ? 256 : 128;
}

// The instances: other head dims run in the next larger one.
constexpr int kHeadDims[] = {64, 128, 256, 512};

namespace detail {

// Every warp has all rows: its part of O takes rows * head_dim / 32 registers, its scores rows * keys / 128.
constexpr TileConfig split_kv(int head_dim, int stages) {
  return {.tile = {.block_m = head_dim <= 64 ? 64 : 32,
                   .block_n = 64,
                   .warps = 4,
                   .stages = stages,
                   .q_in_regs = false,
                   .ctas_per_sm = 2}};
}

constexpr TileConfig split_q(int head_dim, int stages) {
  return {.tile = {.block_m = 128,
                   .block_n = head_dim <= 64 ? 64 : 48,
                   .warps = 4,
                   .stages = stages,
                   .q_in_regs = head_dim <= 64,
                   .ctas_per_sm = 2}};
}

// K and V beside each other take as much as Q. At head dim 128 Q's fragments of 32 rows per warp, kept with O's, spill.
constexpr TileConfig shared_qkv(int head_dim) {
  int const block_m = head_dim <= 64 ? 128 : 64;
  return {.tile = {.block_m = block_m,
                   .block_n = block_m / 2,
                   .warps = 4,
                   .stages = 1,
                   .q_in_regs = true,
                   .ctas_per_sm = head_dim <= 64 ? 2 : 3}};
}

// 32 rows per warp leave registers for O up to head dim 64 (at 128 they spill), and at 256 columns of O 16 rows leave
// registers for the scores of 32 keys.
constexpr TileConfig tiled(int head_dim, int out_columns) {
  bool const wide = head_dim > 64;
  return {.tile = {.block_m = 128,
                   .block_n = head_dim == 128 ? 64 : 32,
                   .warps = wide ? 8 : 4,
                   .stages = 2,
                   .q_in_regs = false,
                   .ctas_per_sm = wide ? 1 : 2},
          .columns = head_dim > 128 ? 64 : 32,
          .out_columns = out_columns};
}

}  // namespace detail

constexpr TileConfig tile_config(Schedule schedule, int head_dim) {
  switch (schedule) {
    case kSplitKv: return detail::split_kv(head_dim, 1);
    case kSplitKv2Stages: return detail::split_kv(head_dim, 2);
    case kSplitQ: return detail::split_q(head_dim, 1);
    case kSplitQ2Stages: return detail::split_q(head_dim, 2);
    case kSharedKv: return detail::split_q(head_dim, 1);
    case kSharedQkv: return detail::shared_qkv(head_dim);
    case kTiledQk: return detail::tiled(head_dim, head_dim);
    default: return detail::tiled(head_dim, head_dim < 256 ? head_dim : 256);
  }
}

// CTAs per row tile.
constexpr int column_parts(Schedule schedule, int head_dim) {
  TileConfig const config = tile_config(schedule, head_dim);
  return config.out_columns == 0 ? 1 : head_dim / config.out_columns;
}

constexpr int smem_bytes(Schedule schedule, int head_dim) {
  TileConfig const config = tile_config(schedule, head_dim);
  rows::TileConfig const tile = config.tile;
  int const q = 2 * tile.block_m * head_dim, keys = 2 * tile.block_n * head_dim;
  int const column_tile = 2 * config.columns * (tile.block_m + tile.block_n);
  switch (schedule) {
    case kSplitKv:
    case kSplitKv2Stages: return q + 2 * tile.stages * keys + 4 * tile.block_m * (tile.warps + 1);
    case kSharedKv: return q + keys;
    case kSharedQkv: return q;
    case kTiledQk: return tile.stages * column_tile + keys;
    case kTiledQkv: return tile.stages * column_tile;
    default: return rows::smem_bytes(tile, head_dim);
  }
}

// What a CTA reads from L2 or DRAM: once, and for each key tile.
struct Traffic {
  int once;
  int per_key_tile;
};
constexpr Traffic traffic(Schedule schedule, int head_dim) {
  TileConfig const config = tile_config(schedule, head_dim);
  int const q = 2 * config.tile.block_m * head_dim, keys = 2 * config.tile.block_n * head_dim;
  int const v = config.out_columns == 0 ? keys : 2 * config.tile.block_n * config.out_columns;
  return is_tiled(schedule) ? Traffic{0, q + keys + v} : Traffic{q, keys + v};
}

// Barriers of the CTA per key tile.
constexpr int barriers(Schedule schedule, int head_dim) {
  TileConfig const config = tile_config(schedule, head_dim);
  int const column_tiles = config.columns == 0 ? 0 : head_dim / config.columns;
  switch (schedule) {
    case kSplitQ2Stages: return 1;
    case kSharedKv: return 4;
    case kTiledQk: return column_tiles + 1;
    case kTiledQkv: return column_tiles + config.out_columns / config.columns;
    default: return 2;
  }
}

constexpr KernelShape kernel_shape(Schedule schedule, int head_dim) {
  rows::TileConfig const tile = tile_config(schedule, head_dim).tile;
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 32 * tile.warps,
          .stages = tile.stages,
          .smem_bytes = smem_bytes(schedule, head_dim),
          .ctas_per_sm = tile.ctas_per_sm};
}

}  // namespace flash_cute::studies::schedules
