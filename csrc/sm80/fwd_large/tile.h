// The tile of the sm80 forward for head dims above 256: one for all head dims and chips. What depends on them is how
// many columns a CTA computes, whether Q stays in shared memory, and the number of stages, all at run time.
#pragma once

#include <algorithm>

#include "../../core/kernel_shape.h"
#include "../chip.h"

namespace flash_cute::sm80::fwd_large {

constexpr int kBlockM = 64;
constexpr int kBlockN = 128;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kColumns = 512;   // of out that a CTA computes, at most: 64 x 512 sums take half of the register file
constexpr int kChunk = 64;      // columns of Q and K per step of S = Q K^T
constexpr int kValueKeys = 16;  // keys per step of O += P V

constexpr int kMinStages = 3;  // a step's data must have arrived one step ahead, and one stage is being read
constexpr int kMaxStages = 6;  // 64 KB in flight: more gains nothing

constexpr int kChunkBytes = 2 * kBlockM * kChunk;  // of Q
constexpr int kStageBytes = 2 * kBlockN * kChunk;  // of K, or of V: as large
static_assert(kStageBytes == 2 * kValueKeys * kColumns);

// P, the row statistics, and what a CTA knows of its tile; see Storage in traits.cuh.
constexpr int kFixedBytes = 2 * kBlockM * kBlockN + 4096;

// The ring of buffers through which K and V pass and, where Q does not fit beside it, Q.
struct Ring {
  bool q_resident;
  int stages;

  constexpr int stage_bytes() const { return kStageBytes + (q_resident ? 0 : kChunkBytes); }
};

constexpr int num_chunks(int head_dim) { return (head_dim + kChunk - 1) / kChunk; }

constexpr Ring ring(int head_dim, int chip) {
  constexpr int kEnough = 4;  // with fewer stages, streaming Q too is faster
  int const bytes = kMaxSmemBytes[chip] - kFixedBytes;
  int const beside_q = (bytes - num_chunks(head_dim) * kChunkBytes) / kStageBytes;
  if (beside_q >= kEnough) return {.q_resident = true, .stages = std::min(beside_q, kMaxStages)};
  return {.q_resident = false, .stages = std::min(bytes / (kStageBytes + kChunkBytes), kMaxStages)};
}

constexpr int smem_bytes(Ring const& ring, int head_dim) {
  return kFixedBytes + (ring.q_resident ? num_chunks(head_dim) * kChunkBytes : 0) + ring.stages * ring.stage_bytes();
}

// `head_dim`: that of the tensors q and k.
constexpr KernelShape kernel_shape(int head_dim, int chip) {
  Ring const chosen = ring(head_dim, chip);
  return {.block_m = kBlockM,
          .block_n = kBlockN,
          .threads = kThreads,
          .stages = chosen.stages,
          .smem_bytes = smem_bytes(chosen, head_dim),
          .ctas_per_sm = 1};
}

// CTAs per row tile: each computes the scores of its rows, and an equal part of out's columns.
constexpr int column_parts(int head_dim_v) { return (head_dim_v + kColumns - 1) / kColumns; }

}  // namespace flash_cute::sm80::fwd_large
