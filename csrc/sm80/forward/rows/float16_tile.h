// The tiles of the sm80 forward that accumulates in float16: one per head dim, in the 99 KB of the chips that gain by
// it. Plain constants.
#pragma once

#include "contract/accumulate.h"
#include "tile.h"

namespace flash_cute::sm80::forward::rows {

// Those of the kernels that read sequences at run time, with fewer keys where two CTAs would not fit in 99 KB; at head
// dim 256 one CTA of eight warps. At head dims 64 and 192 Q in registers spilled.
constexpr TileConfig float16_tile_config(int head_dim) {
  if (head_dim <= 32) {
    return {.block_m = 128, .block_n = 64, .warps = 4, .stages = 2, .q_in_regs = true, .ctas_per_sm = 2};
  }
  if (head_dim <= 64) {
    return {.block_m = 128, .block_n = 64, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 2};
  }
  if (head_dim <= 128) {
    return {.block_m = 128, .block_n = 32, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 2};
  }
  if (head_dim <= 192) {
    return {.block_m = 64, .block_n = 32, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 2};
  }
  return {.block_m = 128, .block_n = 32, .warps = 8, .stages = 1, .q_in_regs = false, .ctas_per_sm = 1};
}

// P V alone in float16 spills at head dim 256, where float32 scores are one register too many.
constexpr int float16_max_head_dim(AccumulateIn accumulate) {
  return accumulate == AccumulateIn::kFloat16Pv ? 192 : 256;
}

constexpr KernelShape float16_kernel_shape(int head_dim, int chip) {
  TileConfig const tile = float16_tile_config(head_dim);
  int const smem = smem_bytes(tile, head_dim) + kSequenceBytes;
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 32 * tile.warps,
          .stages = tile.stages,
          .smem_bytes = smem,
          .ctas_per_sm = ctas_that_fit(tile, smem, chip)};
}

}  // namespace flash_cute::sm80::forward::rows
