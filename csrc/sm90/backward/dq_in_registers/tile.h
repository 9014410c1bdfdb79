// The tiles of the sm90 backward above head dim 128: one kernel for dK and dV, one for dQ. Plain constants.
#pragma once

#include "contract/kernel_shape.h"
#include "sm90/backward/dq_in_memory/tile.h"

namespace flash_cute::sm90::backward::dq_in_registers {

constexpr int kRows = 64;            // per step of dK and dV, and per warpgroup of dQ
constexpr int kKeys = 64;            // per CTA of dK and dV, and per step of dQ
constexpr int kQueryTileRows = 128;  // per CTA of dQ
constexpr int kStages = 2;

// Of head dims 192 and 128 those that dq_in_memory does not have.
constexpr bool has_kernel(int head_dim, int head_dim_v, Variant variant, bool bfloat16) {
  return head_dim == head_dim_v || !dq_in_memory::has_kernel(head_dim, head_dim_v, variant, bfloat16);
}

// The dQ kernel has tiles of 64 rows, two each of Q, dO and K and one of V, and 1 KB for the barriers. That of dK and
// dV has one K, and room for dK in place of V; two of P^T in float32; and 2 KB for row statistics and barriers.
constexpr int smem_bytes(int head_dim, int head_dim_v) {
  int const queries = 2 * 64 * (4 * head_dim + 3 * head_dim_v) + 1024;
  int const keys = 2 * 64 * (4 * head_dim + 2 * head_dim_v) + 2 * 4 * 64 * 64 + 2048;
  return queries > keys ? queries : keys;
}

constexpr KernelShape kernel_shape(int head_dim, int head_dim_v) {
  return {.block_m = kRows,
          .block_n = kKeys,
          .threads = 384,
          .stages = kStages,
          .smem_bytes = smem_bytes(head_dim, head_dim_v),
          .ctas_per_sm = 1,
          .dq_in_registers = true};
}

}  // namespace flash_cute::sm90::backward::dq_in_registers
