// The tiles of the sm90 forward with a mask. Plain constants, as rows/tile.h.
#pragma once

#include "sm90/forward/rows/tile.h"

namespace flash_cute::sm90::forward::masked_rows {

using rows::TileConfig;

constexpr int kUnitRows = 64;  // of a mask's lists: a warpgroup's

// One tile per head dim: the fastest of those without a mask, whose edges are also those of most masks up to head dim
// 64.
constexpr TileConfig tile_config(int head_dim, int head_dim_v) {
  int const entry = head_dim <= 64 ? rows::kRows256 : head_dim <= 128 ? rows::kRows192 : rows::kRows128;
  return rows::tile_config(head_dim, entry, head_dim_v);
}

// Beside K of a key tile, its number and the intervals of its columns.
constexpr int interval_bytes(TileConfig tile) { return tile.stages * 2 * 8 * tile.block_n; }

// Shared memory: Q, the buffers of K, V and intervals, 512 bytes for barriers and tile coordinates; O, and a second
// buffer of Q, where there is room for them.
struct SmemBytes {
  int total;
  bool has_o = false;
  int q_stages = 1;

  constexpr SmemBytes(TileConfig tile, int head_dim, int head_dim_v) {
    int const keys = tile.stages * tile.block_n, q = 2 * head_dim * tile.block_m, o = 2 * head_dim_v * tile.block_m;
    int const control = (interval_bytes(tile) + 512 + 1023) / 1024 * 1024;
    total = q + 2 * (head_dim + head_dim_v) * keys + control;
    if (total + o <= rows::SmemBytes::kLimit) {
      total += o;
      has_o = true;
    }
    if (total + q <= rows::SmemBytes::kLimit) {
      total += q;
      q_stages = 2;
    }
  }
};

constexpr KernelShape kernel_shape(int head_dim, int head_dim_v) {
  TileConfig const tile = tile_config(head_dim, head_dim_v);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 2 * tile.block_m + 128,
          .stages = tile.stages,
          .smem_bytes = SmemBytes(tile, head_dim, head_dim_v).total,
          .ctas_per_sm = 1};
}

}  // namespace flash_cute::sm90::forward::masked_rows
