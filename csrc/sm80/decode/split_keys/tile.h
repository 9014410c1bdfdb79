// What follows from the head dims: plain constants.
#pragma once

#include <algorithm>

#include "contract/decode.h"

namespace flash_cute::sm80::decode::split_keys {

constexpr int kConsumerWarps = 4;

constexpr int tile_keys(int head_dim) { return head_dim <= 64 ? 128 : 64; }

// Whether the fragments of Q lie in shared memory: beside those accumulators registers have no room for them.
constexpr bool q_in_shared(int head_dim, int head_dim_v) { return head_dim + head_dim_v > 320; }

// Of all warps' fragments of Q.
constexpr int q_bytes(int head_dim, int head_dim_v) {
  return q_in_shared(head_dim, head_dim_v) ? 2 * 16 * kConsumerWarps * head_dim : 0;
}

// A stage has one tile of K or of V.
constexpr int stage_bytes(int head_dim, int head_dim_v) {
  return 2 * tile_keys(head_dim) * std::max(head_dim, head_dim_v);
}

// What the warps that compute have beside the stages: ConsumerStorage.
constexpr int consumer_bytes(int head_dim, int head_dim_v) {
  return 4 * kManyRows * head_dim_v + std::max(16, q_bytes(head_dim, head_dim_v)) + 8 * kConsumerWarps * kFewRows;
}

// Shared memory of so many stages, what the consumers have, and barriers and the like: a multiple of its alignment.
constexpr int smem_bytes_of(int stages, int head_dim, int head_dim_v) {
  constexpr int kAlignment = 1024, kSmall = 512;
  int const bytes = stages * stage_bytes(head_dim, head_dim_v) + consumer_bytes(head_dim, head_dim_v) + kSmall;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Of the portable kernels.
constexpr int kStages = 4;
constexpr int kLeastSmemOfChips = 99 * 1024;  // sm_86, sm_89 and sm_120 have no more for a CTA

constexpr int smem_bytes(int head_dim, int head_dim_v) { return smem_bytes_of(kStages, head_dim, head_dim_v); }

}  // namespace flash_cute::sm80::decode::split_keys
