// The tiles of the sm90 backward above head dim 128: one kernel for dK and dV, one for dQ. Plain constants.
#pragma once

#include "../../core/kernel_shape.h"

namespace flash_cute::sm90::bwd_wide {

constexpr int kRows = 64;            // per step of dK and dV, and per warpgroup of dQ
constexpr int kKeys = 64;            // per CTA of dK and dV, and per step of dQ
constexpr int kQueryTileRows = 128;  // per CTA of dQ
constexpr int kStages = 2;

// The dQ kernel has seven tiles of 64 rows, and 1 KB for the barriers; that of dK and dV has six and P^T, which is
// less.
constexpr int smem_bytes(int head_dim) { return 7 * 2 * 64 * head_dim + 1024; }

constexpr KernelShape kernel_shape(int head_dim) {
  return {.block_m = kRows,
          .block_n = kKeys,
          .threads = 384,
          .stages = kStages,
          .smem_bytes = smem_bytes(head_dim),
          .ctas_per_sm = 1,
          .dq_in_registers = true};
}

}  // namespace flash_cute::sm90::bwd_wide
