// The tile table of the sm90 forward. Plain constants: the kernel traits, the dispatcher and the
// build's resource test all read them here. docs/sm90_forward.md has the measurements behind it.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "../../core/tile_split.h"
#include "../../plan.h"

namespace flash_cute::sm90::fwd {

// One kernel's tuning. A consumer warpgroup owns 64 whole query rows.
struct TileConfig {
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

constexpr TileConfig tile_config(int head_dim, bool causal, int config) {
  TileConfig const four_warpgroups = {
      .block_m = 256, .block_n = 64, .stages = 2, .ping_pong = true, .late_wait = false};
  TileConfig const two_warpgroups = {
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
constexpr int smem_bytes(TileConfig tile, int head_dim) {
  int const rows = tile.block_m + 2 * tile.stages * tile.block_n;
  return 2 * head_dim * rows + 1024;
}

constexpr KernelShape kernel_shape(int head_dim, bool causal, int config) {
  TileConfig const tile = tile_config(head_dim, causal, config);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 2 * tile.block_m + 128,
          .stages = tile.stages,
          .smem_bytes = smem_bytes(tile, head_dim),
          .ctas_per_sm = 1};
}

// How fast a tile's shape computes once the GPU is full, kWide being 100 (measured on an H100).
constexpr int tile_speed(int head_dim, bool causal, int config) {
  if (config == kWide) return 100;
  if (config == kNarrow) return head_dim <= 128 ? 60 : 55;
  return causal && head_dim == 64 ? 80 : head_dim <= 64 ? 92 : head_dim <= 128 ? 93 : 99;
}

// A part in memory: of each thread the accumulator's registers, and for its two rows maximum, sum and error, padded.
constexpr int part_floats(int head_dim) { return head_dim / 2 + 8; }
constexpr int64_t parts_bytes(TileConfig tile, int head_dim, TileSplit split) {
  return int64_t{4} * split.ranges * 2 * tile.block_m * part_floats(head_dim);
}
constexpr int part_flags(TileConfig tile, TileSplit split) { return split.ranges * tile.block_m / 16; }

struct Choice {
  Config config;
  TileSplit split;
};

// The tile whose waves take the least time, and whether its last wave is split. Row tiles without a mask are all alike,
// so whole waves. The tiles of a causal triangle even out over the waves, but the longest, of twice the mean, has to be
// done by one CTA. Where memory takes longer to bring K and V than the waves take, nothing is gained by a split, and it
// reads memory a little slower. `keys`: how many the last row sees.
constexpr Choice choose(int head_dim, bool causal, int len_q, int keys, int64_t heads_q, int64_t heads_kv,
                               int num_sms) {
  bool const triangle = causal && keys < 2 * int64_t{len_q};
  // As much time as 240 rows of each key head take: what a full GPU computes while a key arrives.
  int64_t const memory_time = 10 * 240 * heads_kv / num_sms;
  Choice best{.config = kWide, .split = {}};
  int64_t best_time = INT64_MAX;
  for (int config = kWide; config < kNumConfigs; ++config) {
    TileConfig const tile = tile_config(head_dim, causal, config);
    int64_t const row_tiles = heads_q * ((int64_t{len_q} + tile.block_m - 1) / tile.block_m);
    int64_t const key_tiles = (int64_t{keys} + tile.block_n - 1) / tile.block_n;
    int64_t const whole_waves = row_tiles / num_sms;
    auto const consider = [&](int64_t waves_x1000, int64_t least_time, TileSplit split) {
      int64_t const time = std::max(least_time, waves_x1000 * tile.block_m / tile_speed(head_dim, causal, config));
      if (time < best_time) {
        best = {.config = Config(config), .split = split};
        best_time = time;
      }
    };
    consider(!triangle                  ? 1000 * ((row_tiles + num_sms - 1) / num_sms)
             : row_tiles > 2 * num_sms ? 1000 * row_tiles / num_sms
                                        : 2000,
             memory_time, {});
    if (causal && (triangle || whole_waves > 0)) continue;
    TileSplit const split = split_last_wave(row_tiles, key_tiles, num_sms, row_tiles > num_sms);
    if (split.tiles == 0) continue;
    int64_t const length = split.length + split.ranges / split.tiles + kPartCost;
    consider(1000 * whole_waves + 1000 * length / key_tiles, memory_time * 105 / 100, split);
  }
  return best;
}

}  // namespace flash_cute::sm90::fwd
