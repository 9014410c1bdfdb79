// The resources of the sm80 backward for head dims above 256.
#pragma once

#include "contract/kernel_shape.h"
#include "sm80/streaming/tile.h"

namespace flash_cute::sm80::backward::streamed {

using streaming::Ring;

constexpr int kTileRows = streaming::kBlockM;   // keys or query rows that a CTA owns
constexpr int kOtherRows = streaming::kBlockN;  // of the other side, per step of the mainloop

constexpr int kFixedBytes = streaming::kWeightBytes + 4096;  // W, the statistics and the task, see Storage

// Of CTAs that compute dS and of those that compute P alone, for dV. dP = dO V^T needs chunks of its own.
struct Rings {
  Ring gradients;
  Ring weights;
};

constexpr int gradient_chunks(int head_dim, int head_dim_v) {
  return streaming::num_chunks(head_dim) + streaming::num_chunks(head_dim_v);
}

constexpr Rings rings(int head_dim, int head_dim_v, int chip) {
  return {.gradients = streaming::choose_ring(gradient_chunks(head_dim, head_dim_v), kFixedBytes, chip),
          .weights = streaming::choose_ring(streaming::num_chunks(head_dim), kFixedBytes, chip)};
}

constexpr int smem_bytes(int head_dim, int head_dim_v, int chip) {
  Rings const chosen = rings(head_dim, head_dim_v, chip);
  return std::max(streaming::smem_bytes(chosen.gradients, gradient_chunks(head_dim, head_dim_v), kFixedBytes),
                  streaming::smem_bytes(chosen.weights, streaming::num_chunks(head_dim), kFixedBytes));
}

// `head_dim`, `head_dim_v`: those of the tensors.
constexpr KernelShape kernel_shape(int head_dim, int head_dim_v, int chip) {
  return {.block_m = kOtherRows,
          .block_n = kTileRows,
          .threads = streaming::kThreads,
          .stages = rings(head_dim, head_dim_v, chip).gradients.stages,
          .smem_bytes = smem_bytes(head_dim, head_dim_v, chip),
          .ctas_per_sm = 1,
          .dq_in_registers = true};
}

}  // namespace flash_cute::sm80::backward::streamed
