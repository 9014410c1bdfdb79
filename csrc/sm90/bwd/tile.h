// The tile table of the sm90 backward. Plain constants: the kernel traits, the dispatcher and the build's
// resource test all read them here.
#pragma once

#include "../../plan.h"

namespace flash_cute::sm90::bwd {

// One kernel's tuning. A consumer warpgroup owns 64 keys: their dK and dV stay in its registers.
struct TileConfig {
  int block_m;   // query rows a mainloop step
  int block_n;   // keys a CTA
  int stages;    // Q and dO buffers
  bool late_dp;  // dP^T begins after P^T, so that the two share registers
  int v_steps;   // of 16 columns of V that stay in registers
};

constexpr int kNumBwdConfigs = 1;

// Above this, a kernel for dK and dV and one for dQ; see bwd_wide_queries.cuh.
constexpr int kMaxHeadDimOfOneKernel = 128;

constexpr TileConfig tile_config(int head_dim, bool /*causal*/, int /*config*/) {
  if (head_dim > kMaxHeadDimOfOneKernel) {
    return {.block_m = 64, .block_n = 64, .stages = 2, .late_dp = false, .v_steps = 0};
  }
  if (head_dim > 64) return {.block_m = 64, .block_n = 128, .stages = 2, .late_dp = true, .v_steps = 4};
  // 64 rows: 15 to 30 % slower.
  return {.block_m = 128, .block_n = 128, .stages = 2, .late_dp = head_dim == 64, .v_steps = 0};
}

// K and V, `stages` buffers of Q and of dO with their row statistics, two of dS and two row tiles of dQ, 1 KB for the
// barriers. The two kernels: 7 tiles of 64 rows and the barriers in that for dQ, 6 and P^T in that for dK and dV, which
// needs less.
constexpr int smem_bytes(TileConfig tile, int head_dim) {
  if (head_dim > kMaxHeadDimOfOneKernel) return 7 * 2 * 64 * head_dim + 1024;
  int const operands = 2 * head_dim * 2 * (tile.block_n + tile.stages * tile.block_m);
  int const results = 2 * 2 * tile.block_m * tile.block_n + 2 * 4 * tile.block_m * head_dim;
  return operands + results + 8 * tile.stages * tile.block_m + 1024;
}

constexpr KernelShape kernel_shape(int head_dim, bool causal, int config) {
  TileConfig const tile = tile_config(head_dim, causal, config);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 384,
          .stages = tile.stages,
          .smem_bytes = smem_bytes(tile, head_dim),
          .ctas_per_sm = 1,
          .dq_in_registers = head_dim > kMaxHeadDimOfOneKernel};
}

// A function of the shapes alone.
constexpr int choose_bwd_config(int /*head_dim*/, bool /*causal*/, int /*len_q*/, int /*len_k*/, int64_t /*heads_kv*/,
                                int /*num_sms*/) {
  return 0;
}

}  // namespace flash_cute::sm90::bwd
