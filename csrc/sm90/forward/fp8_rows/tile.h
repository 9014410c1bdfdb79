// The tile table of the sm90 forward in float8. Plain constants. docs/trials/sm90_fp8.md has the measurements behind
// it.
#pragma once

#include "contract/kernel_shape.h"
#include "contract/variant.h"

namespace flash_cute::sm90::forward::fp8_rows {

// A consumer warpgroup owns 64 query rows. A key tile is within one block of 128 keys, which share a factor.
struct TileConfig {
  int block_m;  // 64 * consumer warpgroups
  int block_n;  // keys per mainloop step
  int pieces;   // shares of V's columns, each a product of its own

  static constexpr int kStages = 2;

  // Pieces whose products are in registers at a time: one is computed while another one is added to O.
  constexpr int buffers() const { return pieces > 1 ? 2 : 1; }
  // Columns of ones behind those of V transposed, for P's sums: 8 are the fewest that a product has. With several
  // pieces they are a product of their own.
  constexpr int sum_columns() const { return pieces > 1 ? 0 : 8; }
};

// As many warpgroups as the registers allow: scores, P, its product and O of 64 rows leave room for four at head dim
// 64, for three up to 128 and for two above. Modified scores need more.
constexpr TileConfig tile_config(int head_dim_v, bool modifies_scores) {
  int const warpgroups = modifies_scores || head_dim_v > 128 ? 2 : head_dim_v > 64 ? 3 : 4;
  return {.block_m = 64 * warpgroups, .block_n = 128, .pieces = head_dim_v > 128 ? head_dim_v / 64 : 1};
}

// The kernels for each combination of formats; the others are for e4m3 alone. They serve smaller head dims, too.
constexpr bool serves_all_formats(int head_dim, int head_dim_v) {
  return head_dim == head_dim_v && (head_dim == 128 || head_dim == 256);
}

// Shared memory: Q, two buffers each of K, of V as it is in memory and of V transposed, with its columns of ones, 2 KB
// for other ones, barriers and tile coordinates; a second buffer of Q where there is room.
struct SmemBytes {
  static constexpr int kLimit = 227 * 1024;

  int total;
  int q_stages = 1;

  constexpr SmemBytes(TileConfig tile, int head_dim, int head_dim_v) {
    int const q = head_dim * tile.block_m;
    total = q + TileConfig::kStages * tile.block_n * (head_dim + 2 * head_dim_v + tile.sum_columns()) + 2048;
    if (total + q <= kLimit) {
      total += q;
      q_stages = 2;
    }
  }
};

constexpr KernelShape kernel_shape(int head_dim, int head_dim_v, bool modifies_scores) {
  TileConfig const tile = tile_config(head_dim_v, modifies_scores);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 2 * tile.block_m + 128,
          .stages = TileConfig::kStages,
          .smem_bytes = SmemBytes(tile, head_dim, head_dim_v).total,
          .ctas_per_sm = 1};
}

}  // namespace flash_cute::sm90::forward::fp8_rows
