// What follows from the head dims: plain constants.
#pragma once

namespace flash_cute::sm80::decode::split_keys {

constexpr int kConsumerWarps = 4;

constexpr int tile_keys(int head_dim) { return head_dim <= 64 ? 128 : 64; }

// Whether the fragments of Q lie in shared memory: beside those accumulators registers have no room for them.
constexpr bool q_in_shared(int head_dim, int head_dim_v) { return head_dim + head_dim_v > 320; }

// Of all warps' fragments of Q.
constexpr int q_bytes(int head_dim, int head_dim_v) {
  return q_in_shared(head_dim, head_dim_v) ? 2 * 16 * kConsumerWarps * head_dim : 0;
}

}  // namespace flash_cute::sm80::decode::split_keys
