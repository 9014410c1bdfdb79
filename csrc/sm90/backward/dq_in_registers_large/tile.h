// The tiles of the sm90 backward for large head dims: one kernel for dK and dV, one for dQ. Plain constants: the kernel
// traits, the plan and the build's resource test all read them here. docs/sm90_backward_large.md has the arithmetic
// behind them.
#pragma once

#include "contract/kernel_shape.h"

namespace flash_cute::sm90::backward::dq_in_registers_large {

constexpr int kTileRows = 64;  // query rows, or keys: those of one WGMMA

// A tile has one CTA with all columns. Above head dim 320 it has a cluster of CTAs of two sides, each of which has a
// part of the columns of its side's operands and gradients.
constexpr int ctas_per_tile(int head_dim) { return head_dim <= 320 ? 1 : head_dim <= 512 ? 2 : 4; }
constexpr int columns_per_cta(int head_dim) { return head_dim <= 320 ? 320 : 512; }
constexpr bool has_sides(int head_dim) { return ctas_per_tile(head_dim) > 1; }

constexpr int kPartBytes = 4 * kTileRows * kTileRows;      // of a step's scores, in pieces from all CTAs
constexpr int kFragmentBytes = 2 * kTileRows * kTileRows;  // P or dS of a step in 16 bits
constexpr int kFragments = 2;                              // in shared memory

// One CTA: for dK and dV it has K, V, and stages of Q and dO; for dQ it has Q, dO, and stages of K and V.
constexpr int kStagesOfQ = 2;     // dO has one
constexpr int kStagesOfKeys = 2;  // V has one
constexpr int kTilesOfCta = 2 + kStagesOfQ + 1;
static_assert(kTilesOfCta == 2 + kStagesOfKeys + 1);

// A CTA of a side: one tile stays, the others are streamed.
constexpr int kStagesOfSide = 2;

// 2 KB are for row statistics, barriers and the tile's coordinates.
constexpr int smem_bytes(int head_dim) {
  int const tiles = has_sides(head_dim) ? 1 + kStagesOfSide : kTilesOfCta;
  return 2 * kTileRows * columns_per_cta(head_dim) * tiles + (has_sides(head_dim) ? kPartBytes : 0) +
         kFragments * kFragmentBytes + 2048;
}

constexpr KernelShape kernel_shape(int head_dim) {
  return {.block_m = kTileRows,
          .block_n = kTileRows,
          .threads = has_sides(head_dim) ? 512 : 384,  // two warpgroups multiply, one loads, one may make P and dS
          .stages = has_sides(head_dim) ? kStagesOfSide : kStagesOfQ,
          .smem_bytes = smem_bytes(head_dim),
          .ctas_per_sm = 1,
          .dq_in_registers = true};
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
