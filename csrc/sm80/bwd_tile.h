// The tile table of the sm80 backward. Plain constants: the kernel traits, the dispatcher and the build's
// resource test all read them here.
#pragma once

#include "../plan.h"
#include "fwd_tile.h"  // Chip

namespace flash_cute::sm80 {

struct BwdTile {
  int block_m;
  int block_n;
  int warps;
  int ctas_per_sm;
};

constexpr BwdTile bwd_tile(int head_dim, bool /*causal*/, int /*chip*/) {
  if (head_dim <= 64) return {.block_m = 128, .block_n = 128, .warps = 8, .ctas_per_sm = 1};
  return {.block_m = 64, .block_n = head_dim <= 128 ? 128 : 64, .warps = 8, .ctas_per_sm = 1};
}

constexpr int bwd_smem_bytes(BwdTile tile, int head_dim) {
  return 2 * head_dim * 2 * (tile.block_n + tile.block_m) + 4 * tile.block_m * tile.block_n;
}

constexpr KernelShape bwd_shape(int head_dim, bool causal, int chip) {
  BwdTile const tile = bwd_tile(head_dim, causal, chip);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 32 * tile.warps,
          .stages = 1,
          .smem_bytes = bwd_smem_bytes(tile, head_dim),
          .ctas_per_sm = tile.ctas_per_sm};
}

}  // namespace flash_cute::sm80
