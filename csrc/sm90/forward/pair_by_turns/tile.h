// The tile of the Hopper forward for head dims above those of rows/, up to 512. Plain constants: the kernel traits, the
// plan and the build's resource test all read them here. docs/sm90_forward_large.md has the arithmetic behind them.
#pragma once

#include "contract/kernel_shape.h"

namespace flash_cute::sm90::forward::pair_by_turns {

constexpr int kMaxHeadDim = 512;
constexpr int kCtas = 2;  // per row tile
constexpr int kRows = 64;  // query rows of a warpgroup: those of one WGMMA
constexpr int kBlockM = 2 * kRows;
constexpr int kBlockN = 64;                    // keys per step
constexpr int kColumns = kMaxHeadDim / kCtas;  // of V and O per CTA
constexpr int kThreads = 384;                  // a producer and two consumer warpgroups

// K and V pass through one ring, in units of a TMA box each: kBlockN keys x kChunk columns.
constexpr int kChunk = 64;
constexpr int kUnitElements = kBlockN * kChunk;
constexpr int kUnitsOfV = kColumns / kChunk;  // of a step
constexpr int kUnits = 9;                     // of the ring

// What the other CTA sends: P of a step, 16 bytes of row statistics per thread; and 16 bytes at the end.
constexpr int kMessageBytes = 2 * kBlockM * kBlockN + 16 * 256;
constexpr int kSumBytes = 16 * 256;

// Q, the ring, what is received, and 1 KB for barriers and tile coordinates.
constexpr int kSmemBytes =
    2 * kBlockM * kMaxHeadDim + 2 * kUnitElements * kUnits + kMessageBytes + kSumBytes + 1024;

constexpr KernelShape kernel_shape() {
  return {.block_m = kBlockM,
          .block_n = kBlockN,
          .threads = kThreads,
          .stages = 1,
          .smem_bytes = kSmemBytes,
          .ctas_per_sm = 1};
}

}  // namespace flash_cute::sm90::forward::pair_by_turns
