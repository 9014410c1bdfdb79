// The tile table of the sm80 forward. Plain constants: the kernel traits, the dispatcher and the
// build's resource test all read them here.
#pragma once

#include "contract/kernel_shape.h"
#include "contract/tile_mask.h"
#include "contract/tile_order.h"
#include "contract/variant.h"
#include "sm80/common/chip.h"
#include "sm80/forward/common/tile_order.h"

namespace flash_cute::sm80::forward::rows {

// One kernel's tuning. Every warp owns block_m / warps whole query rows (split-Q).
struct TileConfig {
  int block_m;
  int block_n;
  int warps;
  int stages;       // K and V buffers; 1: the loads of K and V alternate, each one GEMM ahead
  bool q_in_regs;   // keep Q's fragments for the whole loop instead of reading shared memory at each step
  int ctas_per_sm;  // register budget: 65536 / (32 * warps * ctas_per_sm)
};

// The aim is 8 warps per SM with up to 255 registers per thread; ctas_per_sm is 1 where the tile's shared memory leaves
// room for only one CTA of four warps. docs/trials/sm80_forward.md has the measurements behind each row.
constexpr TileConfig tile_config(int head_dim, int chip) {
  if (head_dim <= 32) {
    return {.block_m = 128, .block_n = 64, .warps = 4, .stages = 2, .q_in_regs = true, .ctas_per_sm = 2};
  }
  if (head_dim <= 64) {
    return {.block_m = 128, .block_n = 64, .warps = 4, .stages = 1, .q_in_regs = true, .ctas_per_sm = 2};
  }
  if (head_dim <= 96) {
    return {.block_m = 128, .block_n = 64, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 2};
  }
  if (head_dim <= 128) {  // 64 keys per step spill
    int const block_n = chip == kSmem99K ? 32 : 48;
    return {.block_m = 128, .block_n = block_n, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 2};
  }
  if (head_dim <= 192) {  // from here on 16 rows per warp: a 32 x 192 accumulator would take all registers
    return chip == kH100
               ? TileConfig{.block_m = 64, .block_n = 48, .warps = 4, .stages = 2, .q_in_regs = true, .ctas_per_sm = 2}
               : TileConfig{.block_m = 64, .block_n = 32, .warps = 4, .stages = 1, .q_in_regs = true, .ctas_per_sm = 2};
  }
  switch (chip) {
    case kA100: return {.block_m = 128, .block_n = 64, .warps = 8, .stages = 1, .q_in_regs = false, .ctas_per_sm = 1};
    case kSmem99K: return {.block_m = 64, .block_n = 64, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 1};
    default: return {.block_m = 64, .block_n = 64, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 2};
  }
}

// The tiles of the kernels that read sequences, or a mask, at run time: those of dense kernels where these leave enough
// registers, else one for all chips.
constexpr TileConfig tile_config(int head_dim, int chip, Variant variant) {
  bool const modified = variant.modifies_scores;
  if (variant == Variant::kDense || head_dim <= 64) return tile_config(head_dim, chip);
  if (head_dim <= 128) {
    if (head_dim > 96 && !modified) return tile_config(head_dim, chip);
    return {.block_m = 128, .block_n = 32, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 2};
  }
  if (head_dim <= 192) {
    return {.block_m = 64, .block_n = 48, .warps = 4, .stages = 2, .q_in_regs = !modified, .ctas_per_sm = 2};
  }
  return {.block_m = 64, .block_n = 48, .warps = 4, .stages = 1, .q_in_regs = false, .ctas_per_sm = 2};
}

// Whether a head dim has the kernel of a variant. Masked kernels are few, for the time that they take to compile: where
// there is none, that of the next larger head dim serves.
constexpr bool has_kernel(int head_dim, Variant variant) {
  if (!variant.reads_mask) return true;
  return variant.modifies_scores ? head_dim == 64 || head_dim == 128 || head_dim == 256 : head_dim >= 64;
}

// Q, then `stages` buffers each of K and V, 16-bit; the output tile reuses Q's memory.
constexpr int smem_bytes(TileConfig tile, int head_dim) {
  return 2 * head_dim * (tile.block_m + 2 * tile.stages * tile.block_n);
}

// What a kernel adds to it whose sequences are read at run time.
constexpr int kSequenceBytes = 128;

// What a kernel adds to it that reads a mask: the tile, and the intervals of the columns of each stage's keys, or the
// bits of two blocks of rows.
constexpr int masked_bytes(TileConfig tile) {
  return kSequenceBytes + tile.stages * kMaxIntervals * tile.block_n * static_cast<int>(sizeof(RowInterval));
}

// What the kernel of a variant adds.
constexpr int added_bytes(TileConfig tile, Variant variant) {
  return variant.reads_mask ? masked_bytes(tile) : variant.reads_sequences ? kSequenceBytes : 0;
}

// How many CTAs of a tile an SM of the chip has room for, up to those that the register budget is set for.
constexpr int ctas_that_fit(TileConfig tile, int smem_bytes, int chip) {
  constexpr int kReservedBytes = 1024;  // per CTA, and an SM has so much more than one CTA may have
  int const fitting = (kMaxSmemBytes[chip] + kReservedBytes) / (smem_bytes + kReservedBytes);
  return tile.ctas_per_sm < fitting ? tile.ctas_per_sm : fitting;
}

constexpr KernelShape kernel_shape(int head_dim, int chip, Variant variant = Variant::kDense) {
  TileConfig const tile = tile_config(head_dim, chip, variant);
  int const smem = smem_bytes(tile, head_dim) + added_bytes(tile, variant);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 32 * tile.warps,
          .stages = tile.stages,
          .smem_bytes = smem,
          .ctas_per_sm = ctas_that_fit(tile, smem, chip)};
}

}  // namespace flash_cute::sm80::forward::rows
