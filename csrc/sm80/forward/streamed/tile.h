// The resources of the sm80 forward for head dims above 256.
#pragma once

#include "contract/kernel_shape.h"
#include "sm80/streaming/tile.h"

namespace flash_cute::sm80::forward::streamed {

using streaming::kBlockM, streaming::kBlockN, streaming::Ring;

constexpr int kFixedBytes = streaming::kWeightBytes + 4096;  // P, the row statistics and the tile, see Storage

constexpr Ring ring(int head_dim, int chip) {
  return streaming::choose_ring(streaming::num_chunks(head_dim), kFixedBytes, chip);
}

// `head_dim`: that of the tensors q and k.
constexpr KernelShape kernel_shape(int head_dim, int chip) {
  Ring const chosen = ring(head_dim, chip);
  return {.block_m = kBlockM,
          .block_n = kBlockN,
          .threads = streaming::kThreads,
          .stages = chosen.stages,
          .smem_bytes = streaming::smem_bytes(chosen, streaming::num_chunks(head_dim), kFixedBytes),
          .ctas_per_sm = 1};
}

}  // namespace flash_cute::sm80::forward::streamed
