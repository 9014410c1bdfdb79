// What follows from the head dims: plain constants.
#pragma once

#include <algorithm>

#include "decode.h"

namespace flash_cute::split_keys {

constexpr int kConsumerWarps = 4;

constexpr int tile_keys(int head_dim) { return head_dim <= 64 ? 128 : 64; }

// Whether the fragments of Q lie in shared memory: beside those accumulators registers have no room for them. Of float8
// two CTAs share a multiprocessor's registers. `bytes`: of an element of the cache.
constexpr bool q_in_shared(int head_dim, int head_dim_v, int bytes) {
  return head_dim + head_dim_v > 320 || (bytes == 1 && head_dim == 128 && head_dim_v == 128);
}

// Of all warps' fragments of Q.
constexpr int q_bytes(int head_dim, int head_dim_v, int bytes) {
  return q_in_shared(head_dim, head_dim_v, bytes) ? 2 * 16 * kConsumerWarps * head_dim : 0;
}

// Columns of a row that lie side by side in shared memory: 128 bytes of them, or 64 if the head dim is no multiple of
// so many.
template <class Cache>
constexpr int chunk_of(int head_dim) {
  constexpr int kColumns = 128 / sizeof(Cache);
  return head_dim % kColumns == 0 ? kColumns : kColumns / 2;
}

// A stage has one tile of K or of V.
constexpr int stage_bytes(int head_dim, int head_dim_v, int bytes) {
  return bytes * tile_keys(head_dim) * std::max(head_dim, head_dim_v);
}

// What the warps that compute have beside the stages: ConsumerStorage.
constexpr int consumer_bytes(int head_dim, int head_dim_v, int bytes) {
  int const q = std::max(16, q_bytes(head_dim, head_dim_v, bytes));
  return 4 * kManyRows * head_dim_v + q + 8 * kConsumerWarps * kFewRows;
}

// Shared memory of so many stages, what the consumers have, and barriers and the like: a multiple of its alignment.
constexpr int smem_bytes_of(int stages, int head_dim, int head_dim_v, int bytes) {
  constexpr int kAlignment = 1024, kSmall = 512;
  int const all_stages = stages * stage_bytes(head_dim, head_dim_v, bytes);
  int const sum = all_stages + consumer_bytes(head_dim, head_dim_v, bytes) + kSmall;
  return (sum + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace flash_cute::split_keys
