// The tile table of the sm80 backward. Plain constants: the kernel traits, the dispatcher and the build's
// resource test all read them here.
#pragma once

#include "contract/kernel_shape.h"
#include "contract/variant.h"
#include "sm80/common/chip.h"

namespace flash_cute::sm80::backward::dq_in_memory {

// One kernel's tuning. Each of the three kinds of GEMM has its own split over the warps: `..._warps` of them along its
// first mode, warps / `..._warps` along its second.
struct TileConfig {
  int block_m;       // query rows per mainloop step
  int block_n;       // keys per CTA
  int warps;
  int score_warps;   // S^T and dP^T (keys, rows): warps along the keys
  int key_warps;     // dK and dV (keys, head dim): warps along the keys
  int row_warps;     // dQ (rows, head dim): warps along the rows
  int q_stages;      // Q buffers
  int dout_stages;   // dO buffers
  int ctas_per_sm;   // register budget: 65536 / (32 * warps * ctas_per_sm)

  // If a warp has the same keys in S^T, dP^T, dK and dV, and all rows of the step, P and dS stay in its registers.
  constexpr bool p_in_regs() const { return score_warps == warps && key_warps == warps; }
};

// docs/trials/sm80_backward.md has the measurements behind each row.
constexpr TileConfig tile_config(int head_dim, int chip) {
  if (head_dim <= 64) {
    return {.block_m = 64, .block_n = 128, .warps = 4, .score_warps = 4, .key_warps = 4, .row_warps = 2,
            .q_stages = 1, .dout_stages = 1, .ctas_per_sm = 2};
  }
  if (chip == kSmem99K) {  // one CTA per SM
    if (head_dim <= 96) {
      return {.block_m = 64, .block_n = 64, .warps = 8, .score_warps = 4, .key_warps = 4, .row_warps = 4,
              .q_stages = 2, .dout_stages = 1, .ctas_per_sm = 1};
    }
    if (head_dim <= 192) {
      return {.block_m = head_dim <= 128 ? 64 : 32, .block_n = 64, .warps = 8, .score_warps = 4, .key_warps = 2,
              .row_warps = 2, .q_stages = 2, .dout_stages = 1, .ctas_per_sm = 1};
    }
    return {.block_m = 32, .block_n = 32, .warps = 4, .score_warps = 2, .key_warps = 1, .row_warps = 1,
            .q_stages = 2, .dout_stages = 1, .ctas_per_sm = 1};
  }
  if (head_dim <= 128) {
    int const stages = chip == kH100 ? 2 : 1;
    return {.block_m = 64, .block_n = 64, .warps = 4, .score_warps = 2, .key_warps = 2, .row_warps = 2,
            .q_stages = stages, .dout_stages = stages, .ctas_per_sm = 2};
  }
  bool const fits = chip == kH100;
  int const stages = fits || head_dim <= 192 ? 2 : 1;
  return {.block_m = fits && head_dim <= 192 ? 96 : 64, .block_n = 64, .warps = 8, .score_warps = 4, .key_warps = 2,
          .row_warps = 2, .q_stages = stages, .dout_stages = stages, .ctas_per_sm = 1};
}

// Whether plain scores of packed batches have a kernel of their own, with a tile of the dense kernels. Elsewhere the
// kernel of modified scores serves them.
constexpr bool has_plain_sequence_kernel(int head_dim, int chip) {
  return head_dim > 32 && head_dim <= 128 && chip != kSmem99K;
}

// The tile of a chip for plain scores of packed batches; has_plain_sequence_kernel holds.
constexpr TileConfig plain_sequence_tile_config(int head_dim, int chip) { return tile_config(head_dim, chip); }

// The same with a mask, where one tile serves both chips. Masked kernels are few, for the time that they
// take to compile: up to head dim 64 those of 64 serve.
constexpr bool has_masked_kernel(int head_dim) { return head_dim >= 64; }
constexpr bool has_plain_masked_kernel(int head_dim, int chip) {
  return (head_dim == 64 || head_dim == 128) && chip != kSmem99K;
}
constexpr TileConfig plain_masked_tile_config(int head_dim) { return tile_config(head_dim, kA100); }

// The tiles of the kernel of modified scores, packed or dense: one per head dim, which every chip has room for. The
// dense tiles of head dims 64 and 128 have no registers for the derivative of a softcap.
constexpr TileConfig sequence_tile_config(int head_dim) {
  if (head_dim > 32 && head_dim <= 64) {
    return {.block_m = 64, .block_n = 64, .warps = 4, .score_warps = 2, .key_warps = 2, .row_warps = 2,
            .q_stages = 1, .dout_stages = 1, .ctas_per_sm = 2};
  }
  TileConfig tile = tile_config(head_dim, kSmem99K);
  if (head_dim > 192) tile.ctas_per_sm = 2;  // which has room on an H100 alone
  return tile;
}

// K and V, the stages of Q and dO with their row statistics, dS, and P unless it stays in registers.
constexpr int smem_bytes(TileConfig tile, int head_dim) {
  int const row_stages = tile.q_stages + tile.dout_stages;
  int const score_tiles = tile.p_in_regs() ? 1 : 2;
  return 2 * head_dim * (2 * tile.block_n + row_stages * tile.block_m) + 2 * score_tiles * tile.block_m * tile.block_n +
         4 * row_stages * tile.block_m;
}

// The same where sequences or a mask are read at run time: one stage of row statistics, and the task.
constexpr int sequence_smem_bytes(TileConfig tile, int head_dim) {
  constexpr int kTaskBytes = 128;
  int const further_stages = tile.q_stages + tile.dout_stages - 2;
  return smem_bytes(tile, head_dim) - 4 * further_stages * tile.block_m + kTaskBytes;
}

constexpr KernelShape kernel_shape(int head_dim, int chip, Variant variant = Variant::kDense) {
  bool const reads = variant.reads_sequences || variant.reads_mask;
  bool const has_plain = variant.reads_mask ? has_plain_masked_kernel(head_dim, chip)
                                            : has_plain_sequence_kernel(head_dim, chip);
  bool const plain = has_plain && !variant.modifies_scores;
  TileConfig const tile = !reads               ? tile_config(head_dim, chip)
                          : !plain             ? sequence_tile_config(head_dim)
                          : variant.reads_mask ? plain_masked_tile_config(head_dim)
                                               : plain_sequence_tile_config(head_dim, chip);
  int const bytes = reads ? sequence_smem_bytes(tile, head_dim) : smem_bytes(tile, head_dim);
  int const fitting = (kMaxSmemBytes[chip] + 1024) / (bytes + 1024);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 32 * tile.warps,
          .stages = tile.q_stages,
          .smem_bytes = bytes,
          .ctas_per_sm = tile.ctas_per_sm < fitting ? tile.ctas_per_sm : fitting};
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
