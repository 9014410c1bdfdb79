// The tile of the Hopper forward for head dims above 512. Plain constants: the kernel traits, the plan and the build's
// resource test all read them here. docs/sm90_forward_large.md has the arithmetic behind them.
#pragma once

#include "contract/kernel_shape.h"

namespace flash_cute::sm90::forward::pair_by_columns {

constexpr int kBlockM = 64;   // query rows: those of one WGMMA
constexpr int kBlockN = 64;   // keys per step
constexpr int kCtas = 2;      // per row tile
constexpr int kColumns = 512;  // of Q, K, V and O per CTA

// K and V are loaded in units of equal size: kBlockN keys x kUnitColumns of K, or kUnitKeys keys x kUnitColumnsOfV.
constexpr int kUnitElements = 4096;
constexpr int kUnitColumns = kUnitElements / kBlockN;
constexpr int kUnitKeys = 32;  // boxes of 4 KB
constexpr int kUnitColumnsOfV = kUnitElements / kUnitKeys;

constexpr int kWarpgroups = 2;  // of consumers
constexpr int kThreads = 128 * (1 + kWarpgroups);

// They pass through three rings: of K, one tile, and of each half of V.
constexpr int kUnitsOfK = kColumns / kUnitColumns;
constexpr int kUnitsOfVRing = 4;
constexpr int kScoreBytes = 4 * kBlockM * kBlockN;

// Q, the rings, two steps' scores, and 2 KB for row statistics, barriers and tile coordinates.
constexpr int kSmemBytes =
    2 * kBlockM * kColumns + 2 * kUnitElements * (kUnitsOfK + 2 * kUnitsOfVRing) + 2 * kScoreBytes + 2048;

constexpr KernelShape kernel_shape() {
  return {.block_m = kBlockM,
          .block_n = kBlockN,
          .threads = kThreads,
          .stages = 1,
          .smem_bytes = kSmemBytes,
          .ctas_per_sm = 1};
}

}  // namespace flash_cute::sm90::forward::pair_by_columns
