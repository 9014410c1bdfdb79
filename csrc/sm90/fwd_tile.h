// The tile table of the sm90 forward. Plain constants: the kernel traits, the dispatcher and the
// build's resource test all read them here. docs/sm90_forward.md has the measurements behind it.
#pragma once

#include <cstdint>

#include "../plan.h"

namespace flash_cute::sm90 {

// One kernel's tuning. A consumer warpgroup owns 64 whole query rows.
struct FwdTile {
  int block_m;     // 64 * consumer warpgroups
  int block_n;     // keys a mainloop step
  int stages;      // K/V buffers
  bool ping_pong;  // warpgroups take turns at the tensor cores: one's softmax under the other's products
  bool late_wait;  // for the product in flight: after the vote on a new maximum, else before
};

// Entries of the table for one (head dim, mask).
enum Config : int {
  kWide = 0,    // the fastest step, for problems with many row tiles
  kOther = 1,   // where the wide tile's last wave or last rows leave too much idle
  kNarrow = 2,  // 64 rows, one consumer warpgroup: few row tiles, many keys
  kNumConfigs = 3,
};

constexpr FwdTile fwd_tile(int head_dim, bool causal, int config) {
  FwdTile const four_warpgroups = {
      .block_m = 256, .block_n = 64, .stages = 2, .ping_pong = true, .late_wait = false};
  FwdTile const two_warpgroups = {
      .block_m = 128, .block_n = 128, .stages = 2, .ping_pong = true, .late_wait = !causal};
  if (config == kNarrow) {
    int const block_n = head_dim <= 128 ? 128 : head_dim <= 192 ? 96 : 80;
    return {.block_m = 64, .block_n = block_n, .stages = 2, .ping_pong = false, .late_wait = false};
  }
  if (head_dim > 192) return {.block_m = 128, .block_n = 80, .stages = 2, .ping_pong = true, .late_wait = false};
  if (head_dim > 128) return {.block_m = 128, .block_n = 112, .stages = 2, .ping_pong = true, .late_wait = false};
  // Causal, head dim 64, against 192 x 128: 1.17 at 1024 keys, 1.0 from 4096 on. Full: 1.06, then 0.93 and less.
  if (causal && head_dim == 64) return config == kWide ? four_warpgroups : two_warpgroups;
  if (config == kOther) return head_dim <= 64 ? four_warpgroups : two_warpgroups;
  // Three warpgroups of 160 registers: as many keys as the accumulators and P leave room for. The late wait gives 1 to
  // 3 % without a mask from 4096 keys on, and costs as much with one, as in tiles of four warpgroups.
  int const block_n = head_dim <= 64 ? 128 : head_dim <= 96 ? 112 : 80;
  return {.block_m = 192, .block_n = block_n, .stages = 2, .ping_pong = true, .late_wait = !causal};
}

// One row tile a warpgroup of Q, `stages` buffers of K and of V, 1 KB for the barriers.
constexpr int fwd_smem_bytes(FwdTile tile, int head_dim) {
  int const rows = tile.block_m + 2 * tile.stages * tile.block_n;
  return 2 * head_dim * rows + 1024;
}

constexpr KernelShape fwd_shape(int head_dim, bool causal, int config) {
  FwdTile const tile = fwd_tile(head_dim, causal, config);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 2 * tile.block_m + 128,
          .stages = tile.stages,
          .smem_bytes = fwd_smem_bytes(tile, head_dim),
          .ctas_per_sm = 1};
}

// How fast a tile's shape computes once the GPU is full, kWide being 100 (measured on an H100).
constexpr int tile_speed(int head_dim, bool causal, int config) {
  if (config == kWide) return 100;
  if (config == kNarrow) return head_dim <= 128 ? 60 : 75;
  return causal && head_dim == 64 ? 80 : head_dim <= 64 ? 92 : head_dim <= 128 ? 93 : 99;
}

// The tile whose waves take the least time: full tiles all alike, so whole waves; the tiles of a causal
// triangle even out over the waves, but the longest, of twice the mean, has to be done by one CTA.
constexpr Config choose_config(int head_dim, bool causal, int len_q, int len_k, int64_t heads, int num_sms) {
  bool const triangle = causal && len_k < 2 * int64_t{len_q};
  int best = kWide;
  int64_t best_time = 0;
  for (int config = kWide; config < kNumConfigs; ++config) {
    int const block_m = fwd_tile(head_dim, causal, config).block_m;
    int64_t const tiles = heads * ((int64_t{len_q} + block_m - 1) / block_m);
    int64_t const waves_x1000 = triangle ? (tiles > 2 * num_sms ? 1000 * tiles / num_sms : 2000)
                                         : 1000 * ((tiles + num_sms - 1) / num_sms);
    int64_t const time = waves_x1000 * block_m / tile_speed(head_dim, causal, config);
    if (config == kWide || time < best_time) {
      best = config;
      best_time = time;
    }
  }
  return Config(best);
}

}  // namespace flash_cute::sm90
