// The tile of the sm80 kernels for head dims above 256, forward and backward: one for all head dims and chips. What
// depends on them is decided at run time: how many columns a CTA computes, whether the left operand of the scores stays
// in shared memory, and the number of stages.
//
// Both directions compute out += W X, step by step over tiles of the other side's rows: the forward out = O, W = P and
// X = V. `Rows` below are those of the CTA's tile, `keys` those of the other side.
#pragma once

#include <algorithm>

#include "sm80/common/chip.h"

namespace flash_cute::sm80::streaming {

constexpr int kBlockM = 64;   // rows
constexpr int kBlockN = 128;  // keys per tile
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kColumns = 512;   // of out that a CTA computes, at most: 64 x 512 sums take half of the register file
constexpr int kChunk = 64;      // columns per step of a product over the head dim, as S = Q K^T
constexpr int kValueKeys = 16;  // keys per step of out += W X

constexpr int kMinStages = 3;  // of the data of a step: one is read, one must have arrived a step ahead
constexpr int kMaxStages = 8;
constexpr int kStagesToSpareBarriers = 6;  // from here on a product has a barrier for every second step only

constexpr int kLeftBytes = 2 * kBlockM * kChunk;   // a chunk of the CTA's rows
constexpr int kRightBytes = 2 * kBlockN * kChunk;  // a chunk of the keys; a step of X is as large
constexpr int kWeightBytes = 2 * kBlockM * kBlockN;
static_assert(kRightBytes == 2 * kValueKeys * kColumns);

// The ring of buffers for the data of a step. Where the chunks of the rows do not fit beside it, they pass through it.
struct Ring {
  bool left_resident;
  int stages;

  constexpr int stage_bytes() const { return kRightBytes + (left_resident ? 0 : kLeftBytes); }
};

constexpr int num_chunks(int head_dim) { return (head_dim + kChunk - 1) / kChunk; }

// `chunks`: of the rows, over all products. `fixed_bytes`: of shared memory, beside them and the ring.
constexpr Ring choose_ring(int chunks, int fixed_bytes, int chip) {
  int const bytes = kMaxSmemBytes[chip] - fixed_bytes;
  int const stages = (bytes - chunks * kLeftBytes) / kRightBytes;
  int const stages_of_both = std::min(bytes / (kRightBytes + kLeftBytes), kMaxStages);
  // More stages, if they spare barriers, gain more than the rows' chunks cost.
  int const enough = stages_of_both >= kStagesToSpareBarriers ? kStagesToSpareBarriers : 4;
  if (stages >= enough) return {.left_resident = true, .stages = std::min(stages, kMaxStages)};
  return {.left_resident = false, .stages = stages_of_both};
}

constexpr int smem_bytes(Ring const& ring, int chunks, int fixed_bytes) {
  return fixed_bytes + (ring.left_resident ? chunks * kLeftBytes : 0) + ring.stages * ring.stage_bytes();
}

// CTAs per tile: each computes the scores of its rows, and part of out's columns.
constexpr int column_parts(int head_dim) { return (head_dim + kColumns - 1) / kColumns; }

// The columns of each part but the last one, which may have fewer.
constexpr int part_columns(int head_dim) {
  int const parts = column_parts(head_dim);
  return ((head_dim + parts - 1) / parts + kChunk - 1) / kChunk * kChunk;
}

}  // namespace flash_cute::sm80::streaming
