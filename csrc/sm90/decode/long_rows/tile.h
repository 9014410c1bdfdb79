// The tiles of long sequences over a cache: plain constants.
#pragma once

#include "sm90/forward/rows/tile.h"

namespace flash_cute::sm90::decode::long_rows {

using forward::rows::TileConfig;

// Of q and k, and of v. Others, and calls that modify the scores, have all their rows computed as short sequences are.
constexpr bool has_kernel(int head_dim, int head_dim_v) {
  return head_dim == head_dim_v && (head_dim == 64 || head_dim == 128 || head_dim == 256);
}

// The forward's for many rows.
constexpr TileConfig tile_config(int head_dim) {
  using namespace forward::rows;
  return forward::rows::tile_config(head_dim, head_dim <= 64 ? kRows256 : head_dim <= 128 ? kRows192 : kRows128);
}

constexpr KernelShape kernel_shape(int head_dim) {
  TileConfig const tile = tile_config(head_dim);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 2 * tile.block_m + 128,
          .stages = tile.stages,
          .smem_bytes = forward::rows::smem_bytes(tile, head_dim, head_dim),
          .ctas_per_sm = 1};
}

// Beside tiles of head dim 256 the stages of float8 numbers have no room.
constexpr bool has_kernel(int head_dim, int head_dim_v, bool float8_cache) {
  return has_kernel(head_dim, head_dim_v) && (!float8_cache || head_dim <= 128);
}

// Of caches of float8: the stages that TMA writes, beside those of float16 numbers that WGMMA reads.
constexpr int float8_stage_bytes(int head_dim) { return tile_config(head_dim).block_n * head_dim; }
constexpr forward::rows::SmemBytes float8_smem(int head_dim) {
  TileConfig const tile = tile_config(head_dim);
  return {tile, head_dim, head_dim, 2 * tile.stages * float8_stage_bytes(head_dim)};
}
constexpr KernelShape kernel_shape(int head_dim, bool float8_cache) {
  KernelShape shape = kernel_shape(head_dim);
  if (float8_cache) shape.smem_bytes = float8_smem(head_dim).total;
  return shape;
}

}  // namespace flash_cute::sm90::decode::long_rows
