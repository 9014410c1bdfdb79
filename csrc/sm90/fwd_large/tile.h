// The tile of the Hopper forward for large head dims. Plain constants: the kernel traits, the plan and the build's
// resource test all read them here. docs/sm90_forward_large.md has the arithmetic behind them.
#pragma once

#include "../../core/kernel_shape.h"

namespace flash_cute::sm90::fwd_large {

constexpr int kBlockM = 64;   // query rows: those of one WGMMA
constexpr int kBlockN = 64;   // keys per step
constexpr int kColumns = 512;  // of Q, K, V and O per CTA

// K and V are loaded in units of equal size: kBlockN keys x kUnitColumns of K, or kUnitKeys keys x half of the columns
// of V.
constexpr int kUnitKeys = 16;
constexpr int kUnitElements = kUnitKeys * kColumns / 2;
constexpr int kUnitColumns = kUnitElements / kBlockN;

// The CTAs that compute a row tile: each has kColumns of the columns.
constexpr int ctas_per_tile(int head_dim) { return (head_dim + kColumns - 1) / kColumns; }

constexpr int kThreads = 384;  // a producer and two consumer warpgroups

// They pass through two rings of units, one for each consumer warpgroup. Two CTAs also need room for the scores that
// they exchange.
constexpr int kScoreBytes = 4 * kBlockM * kBlockN;
constexpr int ring_bytes(int ctas) { return 144 * 1024 - (ctas > 1 ? kScoreBytes : 0); }
constexpr int units_of_ring(int ctas) { return ring_bytes(ctas) / 2 / (2 * kUnitElements); }

// Q, the rings and the scores, P of two steps, and 2 KB for row statistics, barriers and tile coordinates.
constexpr int kSmemBytes = 2 * kBlockM * kColumns + ring_bytes(1) + 2 * 2 * kBlockM * kBlockN + 2048;

constexpr KernelShape kernel_shape() {
  return {.block_m = kBlockM,
          .block_n = kBlockN,
          .threads = kThreads,
          .stages = 1,
          .smem_bytes = kSmemBytes,
          .ctas_per_sm = 1};
}

}  // namespace flash_cute::sm90::fwd_large
