// The tiles of long sequences over a cache: plain constants.
#pragma once

#include "sm90/decode/common/small_pages.h"
#include "sm90/forward/rows/tile.h"

namespace flash_cute::sm90::decode::long_rows {

using forward::rows::TileConfig;

// Of q and k, and of v. Others, and calls that modify the scores, have all their rows computed as short sequences are.
constexpr bool has_kernel(int head_dim, int head_dim_v) {
  return head_dim == head_dim_v && (head_dim == 64 || head_dim == 128 || head_dim == 256);
}

// Beside tiles of head dim 256 the stages of float8 numbers have no room.
constexpr bool has_kernel(int head_dim, int head_dim_v, bool float8_cache) {
  return has_kernel(head_dim, head_dim_v) && (!float8_cache || head_dim <= 128);
}

// The forward's for many rows.
constexpr TileConfig tile_config(int head_dim) {
  using namespace forward::rows;
  return forward::rows::tile_config(head_dim, head_dim <= 64 ? kRows256 : head_dim <= 128 ? kRows192 : kRows128);
}

// Whether the rows of keys, of so many bytes, are copied. Beside the consumers of many rows boxes of 8 rows, and of 4
// short ones, are faster: docs/trials/sm90_decode.md, "Prompts".
constexpr bool copies_rows(bool paged, int page_size, int row_bytes) {
  return decode::copies_rows(paged, page_size, /*least=*/row_bytes >= 256 ? 8 : 4);
}

// Of caches of float8: a stage that TMA writes. WGMMA reads others.
constexpr int float8_stage_bytes(int head_dim) { return tile_config(head_dim).block_n * head_dim; }

constexpr forward::rows::SmemBytes smem(int head_dim, bool float8_cache) {
  TileConfig const tile = tile_config(head_dim);
  return {tile, head_dim, head_dim, float8_cache ? 2 * tile.stages * float8_stage_bytes(head_dim) : 0};
}

constexpr KernelShape kernel_shape(int head_dim, bool float8_cache) {
  TileConfig const tile = tile_config(head_dim);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 2 * tile.block_m + 128,
          .stages = tile.stages,
          .smem_bytes = smem(head_dim, float8_cache).total,
          .ctas_per_sm = 1};
}

}  // namespace flash_cute::sm90::decode::long_rows
