// The resources of the sm80 backward for head dims above 256.
#pragma once

#include "../../contract/kernel_shape.h"
#include "../large/tile.h"

namespace flash_cute::sm80::bwd_large {

using large::Ring;

constexpr int kTileRows = large::kBlockM;   // keys or query rows that a CTA owns
constexpr int kOtherRows = large::kBlockN;  // of the other side, per step of the mainloop

constexpr int kFixedBytes = large::kWeightBytes + 4096;  // W, the statistics and the task, see Storage

// Of CTAs that compute dS and of those that compute P alone, for dV. dP = dO V^T needs chunks of its own.
struct Rings {
  Ring gradients;
  Ring weights;
};

constexpr int gradient_chunks(int head_dim, int head_dim_v) {
  return large::num_chunks(head_dim) + large::num_chunks(head_dim_v);
}

constexpr Rings rings(int head_dim, int head_dim_v, int chip) {
  return {.gradients = large::choose_ring(gradient_chunks(head_dim, head_dim_v), kFixedBytes, chip),
          .weights = large::choose_ring(large::num_chunks(head_dim), kFixedBytes, chip)};
}

constexpr int smem_bytes(int head_dim, int head_dim_v, int chip) {
  Rings const chosen = rings(head_dim, head_dim_v, chip);
  return std::max(large::smem_bytes(chosen.gradients, gradient_chunks(head_dim, head_dim_v), kFixedBytes),
                  large::smem_bytes(chosen.weights, large::num_chunks(head_dim), kFixedBytes));
}

// `head_dim`, `head_dim_v`: those of the tensors.
constexpr KernelShape kernel_shape(int head_dim, int head_dim_v, int chip) {
  return {.block_m = kOtherRows,
          .block_n = kTileRows,
          .threads = large::kThreads,
          .stages = rings(head_dim, head_dim_v, chip).gradients.stages,
          .smem_bytes = smem_bytes(head_dim, head_dim_v, chip),
          .ctas_per_sm = 1,
          .dq_in_registers = true};
}

}  // namespace flash_cute::sm80::bwd_large
