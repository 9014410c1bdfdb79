// The tiles of the sm90 backward for large head dims: one kernel for dK and dV, one for dQ. Plain constants: the kernel
// traits, the plan and the build's resource test all read them here. docs/sm90_backward_large.md has the arithmetic
// behind them.
#pragma once

#include "../../core/kernel_shape.h"

namespace flash_cute::sm90::bwd_large {

constexpr int kTileRows = 64;  // query rows, or keys: those of one WGMMA

// A tile has a cluster of CTAs, each of which has so many of the columns of every operand and gradient.
constexpr int ctas_per_tile(int head_dim) { return head_dim <= 512 ? 2 : 4; }
constexpr int columns_per_cta(int head_dim) { return head_dim <= 384 ? 192 : 256; }

// Buffers in shared memory, as many as there is room for.
constexpr int stages_of_rows(int columns) { return columns <= 192 ? 3 : 2; }    // of Q, of dO; dK and dV
constexpr int kStagesOfKeys = 3;                                                // of K; dQ
constexpr int stages_of_values(int columns) { return columns <= 192 ? 2 : 1; }  // of V; dQ

constexpr int kPartBytes = 4 * kTileRows * kTileRows;  // of the scores, which the CTAs of a tile exchange

// The kernel of dK and dV has K, V, and stages of Q and dO; that of dQ has Q, dO, and stages of K and V. Both exchange
// parts of S and of dP, and have 2 KB for row statistics, barriers and the tile.
constexpr int smem_bytes(int head_dim) {
  int const columns = columns_per_cta(head_dim);
  int const keys = 2 + 2 * stages_of_rows(columns), queries = 2 + kStagesOfKeys + stages_of_values(columns);
  return 2 * kTileRows * columns * (keys > queries ? keys : queries) + 2 * kPartBytes + 2048;
}

constexpr KernelShape kernel_shape(int head_dim) {
  return {.block_m = kTileRows,
          .block_n = kTileRows,
          .threads = 384,  // a producer and two consumer warpgroups
          .stages = stages_of_rows(columns_per_cta(head_dim)),
          .smem_bytes = smem_bytes(head_dim),
          .ctas_per_sm = 1,
          .dq_in_registers = true};
}

}  // namespace flash_cute::sm90::bwd_large
