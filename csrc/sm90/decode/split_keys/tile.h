// Shared memory and threads that follow from the head dims: plain constants.
#pragma once

#include "contract/decode.h"
#include "contract/kernel_shape.h"
#include "sm80/decode/split_keys/tile.h"

namespace flash_cute::sm90::decode::split_keys {

using sm80::decode::split_keys::kConsumerWarps;
using sm80::decode::split_keys::q_bytes;
using sm80::decode::split_keys::tile_keys;

constexpr int kThreads = 32 * (kConsumerWarps + 1);

#ifndef CTAS
#define CTAS 1
#endif
constexpr int ctas_per_sm(int head_dim, int head_dim_v) { return std::max(head_dim, head_dim_v) <= 128 ? CTAS : 1; }

// A stage has one tile of K or of V.
constexpr int stage_bytes(int head_dim, int head_dim_v) {
  return 2 * tile_keys(head_dim) * std::max(head_dim, head_dim_v);
}

// What a multiprocessor has, less what the driver keeps of each CTA.
constexpr int smem_of_cta(int ctas) { return 233'472 / ctas - 1024; }

constexpr int kSmallBytes = 512;  // barriers and units, at most

// What the consumers have beside the stages.
constexpr int consumer_bytes(int head_dim, int head_dim_v) {
  return 4 * kManyRows * head_dim_v + std::max(16, q_bytes(head_dim, head_dim_v)) + 8 * kConsumerWarps * kFewRows;
}

// As many as there is room for.
constexpr int stages(int head_dim, int head_dim_v) {
  int const left = smem_of_cta(ctas_per_sm(head_dim, head_dim_v)) - consumer_bytes(head_dim, head_dim_v) - kSmallBytes;
  return std::min(12, left / stage_bytes(head_dim, head_dim_v));
}

constexpr int smem_bytes(int head_dim, int head_dim_v) {
  return stages(head_dim, head_dim_v) * stage_bytes(head_dim, head_dim_v) + consumer_bytes(head_dim, head_dim_v) +
         kSmallBytes;
}

}  // namespace flash_cute::sm90::decode::split_keys
