// The tile table of the sm90 forward. Plain constants: the kernel traits, the plan and the build's resource test all
// read them here. docs/trials/sm90_forward.md has the measurements behind it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "contract/kernel_shape.h"
#include "contract/tile_split.h"
#include "contract/variant.h"
#include "sm90/forward/common/row_tile_order.h"

namespace flash_cute::sm90::forward::rows {

constexpr int kMaxHeadDim = 320;  // larger ones: pair_by_turns and pair_by_columns

// One kernel's tuning. A consumer warpgroup owns 64 query rows.
struct TileConfig {
  int block_m;     // 64 * consumer warpgroups
  int block_n;     // keys per mainloop step
  int stages;      // K/V buffers
  bool ping_pong;  // warpgroups take turns at the tensor cores: the softmax of one overlaps with GEMMs of the others
  bool late_wait;  // waits for the GEMM in flight after the vote on a new maximum, else before
};

// The tiles by their query rows; the keys of a step follow from the head dim. Each head dim has some of them, see
// has_entry.
enum Entry : int {
  kRows256 = 0,      // four warpgroups: the fastest step, where it is there
  kRows192 = 1,      // the fastest step of the others up to head dim 128, for many row tiles
  kRows192Late = 2,  // with the late wait
  kRows128 = 3,      // where the last wave or row tile of 192 leaves too much idle; above head dim 128 the fastest step
  kRows128Late = 4,
  kRows64 = 5,       // one warpgroup: few row tiles, many keys
  kNumEntries = 6,
};
constexpr char const* kEntryNames[kNumEntries] = {"rows256", "rows192",      "rows192_late",
                                                  "rows128", "rows128_late", "rows64"};

constexpr bool has_entry(int head_dim, int entry) {
  switch (entry) {
    case kRows256: return head_dim <= 64;
    case kRows192: return head_dim <= 128 && head_dim != 64;
    case kRows192Late: return head_dim <= 128;
    case kRows128: return head_dim > 32;
    case kRows128Late: return head_dim > 64 && head_dim <= 128;
    case kRows64: return true;
    default: return false;
  }
}

// The kernels of every kind: where sequences are read at run time, those of masked problems, and none of few rows. With
// a head dim of v's own (192 and 128) there is one: 128 x 128 is faster than 192 x 80 by 1 to 6 %, than 128 x 112 by 1
// to 4 %, and as fast with the late wait as without.
constexpr bool has_kernel(int head_dim, int head_dim_v, int entry, Variant variant) {
  if (head_dim_v != head_dim) return entry == kRows128;
  if (variant == Variant::kDense) return has_entry(head_dim, entry);
  return has_entry(head_dim, entry) &&
         (entry == kRows256 || entry == kRows128 || (entry == kRows192 && head_dim > 64));
}

constexpr TileConfig tile_config(int head_dim, int entry, int head_dim_v) {
  bool const late_wait = entry == kRows192Late || entry == kRows128Late;
  switch (entry) {
    case kRows256: return {.block_m = 256, .block_n = 64, .stages = 2, .ping_pong = true, .late_wait = false};
    case kRows128:
    case kRows128Late: {
      int const block_n = head_dim_v <= 128 ? 128 : head_dim_v <= 192 ? 112 : head_dim_v <= 256 ? 80 : 48;
      return {.block_m = 128, .block_n = block_n, .stages = 2, .ping_pong = true, .late_wait = late_wait};
    }
    case kRows64: {
      int const block_n = head_dim <= 128 ? 128 : head_dim <= 192 ? 96 : head_dim <= 256 ? 80 : 64;
      return {.block_m = 64, .block_n = block_n, .stages = 2, .ping_pong = false, .late_wait = false};
    }
    default: break;
  }
  // Three warpgroups with 160 registers per thread: as many keys as the accumulators and P leave room for. The late
  // wait gains 1 to 3 % without a mask from 4096 keys on, and loses as much with a mask, as it does in tiles of four
  // warpgroups.
  int const block_n = head_dim <= 64 ? 128 : head_dim <= 96 ? 112 : 80;
  return {.block_m = 192, .block_n = block_n, .stages = 2, .ping_pong = true, .late_wait = late_wait};
}
constexpr TileConfig tile_config(int head_dim, int entry) { return tile_config(head_dim, entry, head_dim); }

// Shared memory: Q, `stages` buffers each of K and V, 1 KB for barriers and tile coordinates; O, and a second buffer of
// Q, where there is room for them. `own`: what a kernel needs besides.
struct SmemBytes {
  static constexpr int kLimit = 227 * 1024;

  int total;
  bool has_o = false;
  int q_stages = 1;

  constexpr SmemBytes(TileConfig tile, int head_dim, int head_dim_v, int own = 0) {
    int const keys = tile.stages * tile.block_n, q = 2 * head_dim * tile.block_m, o = 2 * head_dim_v * tile.block_m;
    total = q + 2 * (head_dim + head_dim_v) * keys + own + 1024;
    if (total + o <= kLimit) {
      total += o;
      has_o = true;
    }
    if (total + q <= kLimit) {
      total += q;
      q_stages = 2;
    }
  }
};
constexpr int smem_bytes(TileConfig tile, int head_dim, int head_dim_v) {
  return SmemBytes(tile, head_dim, head_dim_v).total;
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

// The tiles that the plan chooses from. Of two that differ in the wait alone it is the faster one, which the head dim
// decides: on an H200 the late wait gains 1.7 % with 192 rows at head dim 96 and nothing at the others, with 128 rows
// 5 % at head dim 96 and costs 0.6 % at 128.
constexpr bool is_candidate(int head_dim, int head_dim_v, int entry, Variant variant) {
  if (!has_kernel(head_dim, head_dim_v, entry, variant)) return false;
  if (variant != Variant::kDense || head_dim_v != head_dim) return true;
  switch (entry) {
    case kRows192: return false;
    case kRows128: return head_dim != 96;
    case kRows128Late: return head_dim == 96;
    default: return true;
  }
}

// The speed of a tile's steps, relative to those of the head dim's tile for many rows, which has 192 up to head dim 128
// and 128 above (from times on an H200, see docs/tuning.md).
constexpr double speed(int head_dim_v, int entry) {
  switch (entry) {
    case kRows256: return head_dim_v <= 32 ? 1.05 : 1.02;
    case kRows128:
    case kRows128Late: return head_dim_v <= 64 ? 0.8 : head_dim_v <= 96 ? 0.86 : head_dim_v <= 128 ? 0.92 : 1;
    case kRows64: return 0.57;
    default: return 1;
  }
}

// A row tile of one head visits, with a window, the window's keys and about as many as it has rows, of which each of
// its warpgroups sees the window's and 64. So where heads share K and V, each warpgroup of 256 rows can have the same
// 64 rows of another head. (Tiles of two and three warpgroups gain less, and at head dim 256 the kernel would spill.)
constexpr int most_tile_heads(int block_m) { return block_m == 256 ? 4 : 1; }

// The heads of a row tile; `window`: it is narrow, most rows see the same number of keys.
constexpr int tile_heads(KernelShape const& shape, bool window, int heads_per_kv) {
  int const heads = most_tile_heads(shape.block_m);
  return window && heads_per_kv % heads == 0 ? heads : 1;
}

}  // namespace flash_cute::sm90::forward::rows
