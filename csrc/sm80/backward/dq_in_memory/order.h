// The order in which the CTAs of the sm80 backward take key tiles, a function of the shapes and the number of SMs.
// Plain constants and data. docs/trials/sm80_backward.md has the measurements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "contract/orders.h"
#include "tile.h"

namespace flash_cute::sm80::backward::dq_in_memory {

// `masked`: key tiles differ in their number of row tiles; `rows`: query rows that the longest key tile of a KV head
// visits, over all its query heads; `heads`: KV heads of all batches; `may_reverse`: the kernel knows last_first.
constexpr LaunchOrder launch_order(int head_dim, KernelShape const& shape, bool masked, bool deterministic,
                                   int64_t rows, int heads_per_kv, int n_blocks, int heads, int num_sms,
                                   bool may_reverse = true) {
  constexpr int64_t kMiB = 1 << 20;
  auto const ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int64_t const bytes = 8 * head_dim * rows;  // Q, dO (16-bit) and the sums of dQ (float32) per KV head
  if (!deterministic) {
    // One head after the other. With a mask the last group has two tiles per SM, or its longest tile would start when
    // other SMs run out of work; and up to two more heads, as long as L2 holds most of what they read.
    int64_t const two_tiles = ceil_div(2 * num_sms, n_blocks);
    int64_t const last_heads = std::max(two_tiles, std::min(two_tiles + 2, 64 * kMiB / bytes));
    int64_t const before = heads - (masked ? last_heads : 1);
    return {.interleaved_heads = 1, .last_group = int(std::max<int64_t>(0, before)), .last_first = false};
  }
  // Few rows and several waves of key tiles: start with the last key tile, each key tile with the row tile on its
  // diagonal, and interleave as many heads as have 16,384 rows together.
  int64_t const waves = int64_t{heads} * n_blocks / (num_sms * shape.ctas_per_sm);
  bool const last_first = may_reverse && masked && head_dim > 64 && heads_per_kv == 1 && rows <= 3072 && waves >= 8;
  // Else start consecutive key tiles of a head far enough apart that the ordered dQ adds never wait: interleave as many
  // heads as keep Q, dO and the sums of dQ in L2, or more where those are few and there is a mask.
  int64_t interleaved = std::max<int64_t>(2, 24 * kMiB / bytes);
  if (last_first) {
    interleaved = ceil_div(16384, rows);
  } else if (masked) {
    int64_t const few = head_dim % 128 == 0 ? std::min<int64_t>(32, ceil_div(2048, n_blocks)) : 32;
    interleaved = std::max(few, 48 * kMiB / bytes);
  }
  // Groups of about equal size: in a last group of few heads every key tile would wait for the one before it.
  int64_t const groups = ceil_div(heads, std::min<int64_t>(heads, interleaved));
  int const per_group = int(ceil_div(heads, groups));
  return {.interleaved_heads = per_group, .last_group = (heads - 1) / per_group, .last_first = last_first};
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
