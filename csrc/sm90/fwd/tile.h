// The tile table of the sm90 forward. Plain constants: the kernel traits, the plan and the build's resource test all
// read them here. docs/sm90_forward.md has the measurements behind it.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "../../core/kernel_shape.h"
#include "../../core/tile_order.h"
#include "../../core/tile_split.h"
#include "../../core/variant.h"

namespace flash_cute::sm90::fwd {

constexpr int kMaxHeadDim = 320;  // larger ones: fwd_large

// One kernel's tuning. A consumer warpgroup owns 64 query rows.
struct TileConfig {
  int block_m;     // 64 * consumer warpgroups
  int block_n;     // keys per mainloop step
  int stages;      // K/V buffers
  bool ping_pong;  // warpgroups take turns at the tensor cores: the softmax of one overlaps with GEMMs of the others
  bool late_wait;  // waits for the GEMM in flight after the vote on a new maximum, else before
};

// The tiles by name. Each head dim has some of them, see has_entry.
enum Entry : int {
  kTall = 0,      // 256 rows, four warpgroups
  kWide = 1,      // 192 rows (above head dim 128: 128): the fastest step, for problems with many row tiles
  kWideLate = 2,  // with the late wait
  kPair = 3,      // 128 x 128: where the wide tile's last wave or last row tile leaves too much idle
  kPairLate = 4,
  kNarrow = 5,    // 64 rows, one warpgroup: few row tiles, many keys
  kNumEntries = 6,
};
constexpr char const* kEntryNames[kNumEntries] = {"tall", "wide", "wide_late", "pair", "pair_late", "narrow"};

constexpr bool has_entry(int head_dim, int entry) {
  switch (entry) {
    case kTall: return head_dim <= 64;
    case kWide: return head_dim != 64;
    case kWideLate: return head_dim <= 128;
    case kPair: return head_dim > 32 && head_dim <= 128;
    case kPairLate: return head_dim > 64 && head_dim <= 128;
    case kNarrow: return true;
    default: return false;
  }
}

// The kernels of every kind: where sequences are read at run time, those of masked problems, and none of few rows; of
// dense batches with modified scores, the fastest ones of the head dims of models that have such scores. With
// a head dim of v's own (192 and 128) there is one: 128 x 128 is faster than 192 x 80 by 1 to 6 %, than 128 x 112 by 1
// to 4 %, and as fast with the late wait as without.
constexpr bool has_kernel(int head_dim, int head_dim_v, int entry, Variant variant) {
  if (head_dim_v != head_dim) return entry == kPair && variant != Variant::kDenseModified;
  if (variant == Variant::kDense) return has_entry(head_dim, entry);
  if (variant == Variant::kDenseModified) {
    bool const fastest = entry == kWideLate || entry == (head_dim == 64 ? kTall : kWide);
    return has_entry(head_dim, entry) && fastest && (head_dim == 64 || head_dim == 128 || head_dim == 256);
  }
  return has_entry(head_dim, entry) && (entry == kTall || entry == kPair || (entry == kWide && head_dim > 64));
}

constexpr TileConfig tile_config(int head_dim, int entry, int head_dim_v) {
  bool const late_wait = entry == kWideLate || entry == kPairLate;
  switch (entry) {
    case kTall: return {.block_m = 256, .block_n = 64, .stages = 2, .ping_pong = true, .late_wait = false};
    case kPair:
    case kPairLate:
      return {.block_m = 128, .block_n = 128, .stages = 2, .ping_pong = true, .late_wait = late_wait};
    case kNarrow: {
      int const block_n = head_dim <= 128 ? 128 : head_dim <= 192 ? 96 : head_dim <= 256 ? 80 : 64;
      return {.block_m = 64, .block_n = block_n, .stages = 2, .ping_pong = false, .late_wait = false};
    }
    default: break;
  }
  if (head_dim_v > 256) return {.block_m = 128, .block_n = 48, .stages = 2, .ping_pong = true, .late_wait = false};
  if (head_dim_v > 192) return {.block_m = 128, .block_n = 80, .stages = 2, .ping_pong = true, .late_wait = false};
  if (head_dim_v > 128) return {.block_m = 128, .block_n = 112, .stages = 2, .ping_pong = true, .late_wait = false};
  // Three warpgroups with 160 registers per thread: as many keys as the accumulators and P leave room for. The late
  // wait gains 1 to 3 % without a mask from 4096 keys on, and loses as much with a mask, as it does in tiles of four
  // warpgroups.
  int const block_n = head_dim <= 64 ? 128 : head_dim <= 96 ? 112 : 80;
  return {.block_m = 192, .block_n = block_n, .stages = 2, .ping_pong = true, .late_wait = late_wait};
}
constexpr TileConfig tile_config(int head_dim, int entry) { return tile_config(head_dim, entry, head_dim); }

// Q, `stages` buffers each of K and V, and 1 KB for barriers and tile coordinates.
constexpr int smem_bytes(TileConfig tile, int head_dim, int head_dim_v) {
  int const keys = tile.stages * tile.block_n;
  return 2 * (head_dim * (tile.block_m + keys) + head_dim_v * keys) + 1024;
}

constexpr KernelShape kernel_shape(int head_dim, int entry, int head_dim_v) {
  TileConfig const tile = tile_config(head_dim, entry, head_dim_v);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 2 * tile.block_m + 128,
          .stages = tile.stages,
          .smem_bytes = smem_bytes(tile, head_dim, head_dim_v),
          .ctas_per_sm = 1};
}
constexpr KernelShape kernel_shape(int head_dim, int entry) { return kernel_shape(head_dim, entry, head_dim); }

// Floats of a part per thread: the accumulator, and maximum, sum and error of the thread's two rows, padded to float4.
constexpr int part_floats(int head_dim_v) { return head_dim_v / 2 + 8; }
constexpr int64_t parts_bytes(KernelShape const& shape, int head_dim_v, TileSplit const& split) {
  return int64_t{4} * split.ranges * 2 * shape.block_m * part_floats(head_dim_v);
}
constexpr int part_flags(KernelShape const& shape, TileSplit const& split) { return split.ranges * shape.block_m / 16; }

// A tile that may serve a problem, and its speed on a full GPU in per cent of the fastest one's (measured on an H100).
struct Candidate {
  Entry entry;
  int speed;
};
constexpr int kNumCandidates = 3;
constexpr Candidate candidate(int head_dim, int head_dim_v, bool masked, int index) {
  if (head_dim_v != head_dim) return {kPair, 100};
  if (index == 0) return {head_dim > 128 ? kWide : !masked ? kWideLate : head_dim == 64 ? kTall : kWide, 100};
  if (index == 2 || head_dim > 128) return {kNarrow, head_dim <= 128 ? 60 : 55};
  if (head_dim > 64) return {masked ? kPair : kPairLate, 93};
  // Head dim 64, speed of the tall tile over that of 192 x 128: causal 1.17 at 1024 keys and 1.0 from 4096 on; without
  // a mask 1.06, then 0.93 and less.
  return masked && head_dim == 64 ? Candidate{kPair, 80} : Candidate{kTall, 92};
}

// The properties of a problem on which the choice of a tile depends.
struct Work {
  int len_q;
  int keys;        // that the longest row tile visits
  bool masked;     // some row does not see some key
  bool triangle;   // row tiles differ much in length: the mean is about half of the longest
  bool can_split;  // row tiles may be split by keys: all of them begin with key 0
  int64_t heads_q;   // of all batches
  int64_t heads_kv;
};

struct Choice {
  Entry entry;
  TileSplit split;
};

// Chooses the tile with the least estimated time, and whether its last wave is split. Without a mask all row tiles are
// equal, so that the time is that of whole waves. The tiles of a causal triangle even out over the waves, but the
// longest, twice the mean, is computed by one CTA. Where loading K and V from memory takes longer than the waves, a
// split gains nothing, and reads memory a little slower. `variant`: of the dense ones. `forced`: the only tile that may
// be chosen, if the head dim has it. `forced_split`: 0 never to split, 1 to split wherever that is possible.
constexpr Choice choose(int head_dim, int head_dim_v, Variant variant, Work const& work, int num_sms, int forced,
                        int forced_split) {
  constexpr int64_t kTimePerRow = 10;  // the unit of time: a full GPU takes 10 for one row per SM
  // The cost of memory bandwidth, per key: while one row of K and V of one KV head is loaded, the GPU computes 240 rows
  // against one key.
  constexpr int64_t kRowsWhileAKeyArrives = 240;
  int64_t const memory_time = kTimePerRow * kRowsWhileAKeyArrives * work.heads_kv / num_sms;
  auto const exists = [&](int entry) { return has_kernel(head_dim, head_dim_v, entry, variant); };
  Entry const last = candidate(head_dim, head_dim_v, work.masked, kNumCandidates - 1).entry;
  Choice best{.entry = exists(last) ? last : candidate(head_dim, head_dim_v, work.masked, 0).entry, .split = {}};
  int64_t best_time = INT64_MAX;
  auto const consider = [&](Candidate const& tile) {
    KernelShape const shape = kernel_shape(head_dim, tile.entry, head_dim_v);
    int64_t const row_tiles = work.heads_q * ((int64_t{work.len_q} + shape.block_m - 1) / shape.block_m);
    int64_t const key_tiles = (int64_t{work.keys} + shape.block_n - 1) / shape.block_n;
    int64_t const whole_waves = row_tiles / num_sms;
    auto const take_if_less = [&](int64_t waves_x1000, int64_t least_time, TileSplit split) {
      if (forced_split == 1 && (split.tiles > 0) != (best.split.tiles > 0)) {
        if (split.tiles == 0) return;
        best_time = INT64_MAX;
      }
      int64_t const time = std::max(least_time, waves_x1000 * shape.block_m / tile.speed);
      if (time < best_time) {
        best = {.entry = tile.entry, .split = split};
        best_time = time;
      }
    };
    int64_t const even = 1000 * row_tiles / num_sms, longest_alone = 2000;
    int64_t const whole = 1000 * ((row_tiles + num_sms - 1) / num_sms);
    take_if_less(!work.triangle ? whole : row_tiles > 2 * num_sms ? even : longest_alone, memory_time, {});
    if (forced_split == 0 || !work.can_split || (work.masked && (work.triangle || whole_waves > 0))) return;
    TileSplit const split = split_last_wave(row_tiles, key_tiles, num_sms, row_tiles > num_sms);
    if (split.tiles == 0) return;
    int64_t const length = split.length + split.ranges / split.tiles + kPartCost;
    take_if_less(1000 * whole_waves + 1000 * length / key_tiles, memory_time * 105 / 100, split);
  };
  if (exists(forced)) {
    consider({Entry(forced), 100});
  } else {
    for (int index = 0; index < kNumCandidates; ++index) {
      Candidate const tile = candidate(head_dim, head_dim_v, work.masked, index);
      if (exists(tile.entry)) consider(tile);
    }
  }
  return best;
}

// The tile where sequences are read at run time: the one that computes the fewest rows past the ends of sequences of
// `mean_rows` rows, weighted by its speed.
constexpr Entry choose_for_sequences(int head_dim, int head_dim_v, Variant variant, int64_t mean_rows, int forced) {
  if (has_kernel(head_dim, head_dim_v, forced, variant)) return Entry(forced);
  if (head_dim_v != head_dim) return kPair;
  Entry const fastest = head_dim <= 64 ? kTall : kWide;  // of head dim 32 the wide modified one spills
  if (!has_kernel(head_dim, head_dim_v, kPair, variant)) return fastest;
  auto const time = [&](Entry entry, int64_t speed) {
    int64_t const block_m = kernel_shape(head_dim, entry, head_dim_v).block_m;
    return (mean_rows + block_m - 1) / block_m * block_m * 100 / speed;
  };
  return time(kPair, head_dim == 64 ? 80 : 93) < time(fastest, 100) ? kPair : fastest;
}

// Whether modified scores of a dense batch have a dense kernel: of the tile that sequences of `rows` rows would get.
constexpr bool has_dense_modified(int head_dim, int head_dim_v, int64_t rows, int forced) {
  if (has_kernel(head_dim, head_dim_v, forced, Variant::kDenseModified)) return true;
  Entry const entry = choose_for_sequences(head_dim, head_dim_v, Variant::kModified, rows, forced);
  return has_kernel(head_dim, head_dim_v, entry, Variant::kDenseModified);
}

// A row tile of one head visits, with a window, the window's keys and about as many as it has rows, of which each of
// its warpgroups sees the window's and 64. So where heads share K and V, each warpgroup of a tall tile can have the
// same 64 rows of another head. (Tiles of two and three warpgroups gain less, and at head dim 256 the kernel would
// spill.)
constexpr int most_tile_heads(int block_m) { return block_m == 256 ? 4 : 1; }

// The heads of a row tile; `window`: it is narrow, most rows see the same number of keys.
constexpr int tile_heads(KernelShape const& shape, bool window, int heads_per_kv) {
  int const heads = most_tile_heads(shape.block_m);
  return window && heads_per_kv % heads == 0 ? heads : 1;
}

// With a mask, row tiles differ in length and heads are grouped, longest tiles first. The fewer bytes of K and V per
// group, the surer they stay in L2; but where a head has many keys, a group of few heads has too few tiles to overlap
// with its longest ones. The last group has at least one tile per SM, or its longest tile would start when other SMs
// run out of work.
constexpr TileOrder tile_order(KernelShape const& shape, bool masked, int batch, int heads_q, int heads_kv, int len_q,
                               int len_k, int head_dim, int num_sms, int tile_heads = 1) {
  int const rows = shape.block_m / tile_heads;
  heads_q /= tile_heads;
  int const m_blocks = (len_q + rows - 1) / rows;
  int const num_heads = batch * heads_q, heads_per_kv = heads_q / heads_kv;
  int64_t const l2_bytes = int64_t{len_k <= 1024 ? 4 : 32} << 20;
  int const group = masked ? heads_in_l2(l2_bytes, len_k, head_dim, heads_per_kv, num_heads) : num_heads;
  int const last_heads = std::max(group, (num_sms + m_blocks - 1) / m_blocks);
  return {.m_blocks = m_blocks,
          .heads_q = heads_q,
          .heads_per_kv = heads_per_kv,
          .num_heads = num_heads,
          .group = group,
          .last_group = std::max(0, num_heads - last_heads) / group,
          .longest_first = masked};
}

}  // namespace flash_cute::sm90::fwd
