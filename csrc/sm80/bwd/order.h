// The order in which the CTAs of the sm80 backward take key tiles. Plain constants and data, a function of the shapes and of
// the number of SMs. docs/sm80_backward.md has the measurements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tile.h"

namespace flash_cute::sm80::bwd {

struct LaunchOrder {
  int interleaved_heads;  // KV heads per group: their key tiles of one number are neighbours in launch order, so that CTAs
                          // running together share Q and dO in L2
  int last_group;         // its number; it has all the heads that remain
  bool last_first;        // deterministic: key tiles from the last to the first, row tiles from the first to the last
};

// `masked`: key tiles have different numbers of row tiles; `rows`: query rows that a key head's longest key tile visits, of
// all its query heads; `heads`: KV heads of all batches.
constexpr LaunchOrder launch_order(int head_dim, KernelShape const& shape, bool masked, bool deterministic, int64_t rows,
                                   int group, int n_blocks, int heads, int num_sms) {
  constexpr int64_t kMiB = 1 << 20;
  auto const ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int64_t const bytes = 8 * head_dim * rows;  // of Q, dO (16-bit) and sums of dQ (float32) per KV head
  if (!deterministic) {
    // One head after the other. With a mask the last group has two tiles for every SM, or its longest would start when
    // others have no more to do; and up to two heads more as long as L2 holds most of what they read.
    int64_t const two_tiles = ceil_div(2 * num_sms, n_blocks);
    int64_t const last_heads = std::max(two_tiles, std::min(two_tiles + 2, 64 * kMiB / bytes));
    int64_t const before = heads - (masked ? last_heads : 1);
    return {.interleaved_heads = 1, .last_group = int(std::max<int64_t>(0, before)), .last_first = false};
  }
  // Few rows and several waves of key tiles: from the last key tile on, each from its diagonal, as many heads interleaved
  // as have 16,384 rows together.
  int64_t const waves = int64_t{heads} * n_blocks / (num_sms * shape.ctas_per_sm);
  bool const last_first = masked && head_dim > 64 && group == 1 && rows <= 3072 && waves >= 8;
  // Else consecutive key tiles of a head start far enough apart that the ordered dQ adds never wait: as many heads are
  // interleaved as keep Q, dO and the sums of dQ in L2, or, with a mask and where those are few, more.
  int64_t interleaved = std::max<int64_t>(2, 24 * kMiB / bytes);
  if (last_first) {
    interleaved = ceil_div(16384, rows);
  } else if (masked) {
    int64_t const few = head_dim % 128 == 0 ? std::min<int64_t>(32, ceil_div(2048, n_blocks)) : 32;
    interleaved = std::max(few, 48 * kMiB / bytes);
  }
  // Groups of equal size: in a last group of few heads every key tile would wait for the one before it.
  int64_t const groups = ceil_div(heads, std::min<int64_t>(heads, interleaved));
  int const per_group = int(ceil_div(heads, groups));
  return {.interleaved_heads = per_group, .last_group = (heads - 1) / per_group, .last_first = last_first};
}

}  // namespace flash_cute::sm80::bwd
