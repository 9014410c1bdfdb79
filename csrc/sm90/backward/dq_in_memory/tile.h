// The tile table of the sm90 backward up to head dim 128, and for head dims of 192 and 128. Plain constants: the kernel
// traits, the plan and the build's resource test all read them here.
#pragma once

#include "contract/kernel_shape.h"
#include "contract/variant.h"

namespace flash_cute::sm90::backward::dq_in_memory {

constexpr int kMaxHeadDim = 128;

// Whether q and v have the head dims of multi-head latent attention, whose kernel is that of mla_mainloop.cuh.
constexpr bool is_mla(int head_dim, int head_dim_v) { return head_dim == 192 && head_dim_v == 128; }

// The kernels of each head dim; of 192 and 128 those alone of plain scores and bfloat16: that for MLA keeps P in
// float16 until dP is there, which is nearly exact only for inputs that are less exact. The others are of
// dq_in_registers. With a mask by intervals head dim 32 runs in the kernel of 64, which saves compile time.
constexpr bool has_kernel(int head_dim, int head_dim_v, Variant variant, bool bfloat16) {
  if (variant.reads_mask) return head_dim != 32 && !is_mla(head_dim, head_dim_v);
  return !is_mla(head_dim, head_dim_v) || (!variant.modifies_scores && bfloat16);
}

// One kernel's tuning. A consumer warpgroup owns 64 keys: their dK and dV stay in its registers.
struct TileConfig {
  int block_m;   // query rows per mainloop step
  int block_n;   // keys per CTA
  int stages;    // Q and dO buffers
  bool late_dp;  // dP^T is issued after P^T is done, so that S^T and dP^T share registers
  int v_steps;   // k steps (16 columns) of V that stay in registers
};

constexpr TileConfig tile_config(int head_dim, Variant variant = Variant::kDense) {
  bool const modified = variant.modifies_scores;
  if (head_dim > kMaxHeadDim) {
    return {.block_m = 64, .block_n = 128, .stages = 2, .late_dp = false, .v_steps = 0};
  }
  if (head_dim > 64) {  // with all of V in registers at head dim 96, for which it has room: 2 % faster than with two
    return {.block_m = 64, .block_n = 128, .stages = 2, .late_dp = true, .v_steps = head_dim == 96 ? 6 : 2};
  }
  // With 64 rows per step: 15 to 30 % slower.
  return {.block_m = 128, .block_n = 128, .stages = 2, .late_dp = head_dim == 64 || modified, .v_steps = 0};
}

// K and V, `stages` buffers each of Q and dO with their row statistics, two of dS, two row tiles of dQ, and 1 KB for
// barriers and tasks. With 192 and 128 columns there is room for one of dS and one row tile.
constexpr int smem_bytes(TileConfig tile, int head_dim, int head_dim_v) {
  int const buffers = head_dim == head_dim_v ? 2 : 1;
  int const operands = 2 * (head_dim + head_dim_v) * (tile.block_n + tile.stages * tile.block_m);
  int const results = buffers * (2 * tile.block_m * tile.block_n + 4 * tile.block_m * head_dim);
  return operands + results + 8 * tile.stages * tile.block_m + 1024;
}

constexpr KernelShape kernel_shape(int head_dim, int head_dim_v, Variant variant = Variant::kDense) {
  TileConfig const tile = tile_config(head_dim, variant);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 384,
          .stages = tile.stages,
          .smem_bytes = smem_bytes(tile, head_dim, head_dim_v),
          .ctas_per_sm = 1};
}

}  // namespace flash_cute::sm90::backward::dq_in_memory
