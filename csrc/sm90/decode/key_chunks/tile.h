// The tiles of row-invariant attention: plain constants and integers, for host and device.
//
// The bits of a row depend on its query and on the keys that it sees alone, whether it is one of a training's batch, of
// a prefill, of a chunk of one, or of a decoding step. So every kernel computes a row by the same products (WGMMA,
// whose rows do not depend on each other), over the same key tiles; the softmax restarts at each chunk of keys; and
// the chunks are folded from the first to the last, see fold.cuh. Which CTA computes which chunk may then follow from
// the batch: of many rows a CTA has a row tile and all its chunks, of few rows a CTA has a chunk.
#pragma once

#include <algorithm>
#include <cstdint>

#include "contract/decode.h"
#include "sm90/decode/long_rows/tile.h"

namespace flash_cute::sm90::decode::key_chunks {

using forward::rows::TileConfig;

constexpr bool has_kernel(int head_dim, int head_dim_v) { return long_rows::has_kernel(head_dim, head_dim_v); }

// Short chunks are many CTAs' in decoding; long ones are folded less often. At head dim 256 folds are in global memory.
constexpr int least_chunk_keys(int head_dim) {
#ifdef FLASH_CUTE_TEST_CHUNK_KEYS
  return FLASH_CUTE_TEST_CHUNK_KEYS;  // an emulated machine has no time for so many
#else
  return head_dim <= 128 ? 1024 : 2048;
#endif
}

// Who has the chunks of a row tile.
enum class Chunks {
  kOfOneCta,   // it folds them
  kOfSeveral,  // a second kernel folds them
};

constexpr int kRows = 64;  // of a warpgroup, packed: of several heads

constexpr TileConfig tile_config(int head_dim, Chunks chunks) {
  TileConfig tile = long_rows::tile_config(head_dim);
  if (chunks == Chunks::kOfOneCta) {
    if (head_dim <= 64) tile.stages = 4;  // there is room
    return tile;
  }
  tile.block_m = kRows;
  tile.ping_pong = false;
  tile.stages = head_dim <= 64 ? 8 : head_dim <= 128 ? 4 : 2;  // 128 KB and more on their way
  return tile;
}

constexpr int chunk_tiles(int head_dim) {
  int const block_n = tile_config(head_dim, Chunks::kOfOneCta).block_n;
  return (least_chunk_keys(head_dim) + block_n - 1) / block_n;
}
constexpr int chunk_keys(int head_dim) {
  return chunk_tiles(head_dim) * tile_config(head_dim, Chunks::kOfOneCta).block_n;
}

// Shared memory: Q, the buffers of K and V, barriers and tiles, and each warpgroup's fold in float32, with the sums of
// its rows, where there is room for it. While there is no fold, O passes through a half of its memory, and the other
// one is a second buffer of Q. Without a fold both have memory of their own, where there is room.
struct SmemBytes {
  static constexpr int kLimit = forward::rows::SmemBytes::kLimit;
  static constexpr int kAlignment = 1024;

  int total;
  bool has_fold = false;
  bool has_o = false;
  int q_stages = 1;

  constexpr SmemBytes(int head_dim, Chunks chunks) {
    TileConfig const tile = tile_config(head_dim, chunks);
    int const q = 2 * head_dim * tile.block_m, fold = 4 * head_dim * tile.block_m, sums = 8 * tile.block_m;
    int const barriers = chunks == Chunks::kOfOneCta ? 1280 : 2048;
    int const least = q + 4 * head_dim * tile.stages * tile.block_n + barriers;
    has_fold = chunks == Chunks::kOfOneCta && round_up(least + fold + sums) <= kLimit;
    has_o = has_fold || round_up(least + q) <= kLimit;
    if (has_fold || round_up(least + 2 * q) <= kLimit) q_stages = 2;
    total = round_up(least + (has_fold ? fold + sums : q * (int{has_o} + q_stages - 1)));
  }

 private:
  static constexpr int round_up(int bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
};

constexpr KernelShape kernel_shape(int head_dim, Chunks chunks) {
  TileConfig const tile = tile_config(head_dim, chunks);
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .threads = 2 * tile.block_m + 128,
          .stages = tile.stages,
          .smem_bytes = SmemBytes(head_dim, chunks).total,
          .ctas_per_sm = 1};
}

// The rows of a warpgroup: `heads` query heads that share K and V, at each of `positions` positions.
struct PackedRows {
  int heads;
  int positions;

  // As many heads as fill it, nearly; `few`: positions, so that heads matter more.
  static constexpr PackedRows of(int group, bool few) {
    int heads = 1;
    for (int n = 2; n <= std::min(group, kRows); ++n) {
      if (group % n == 0 && (few || kRows % n == 0)) heads = n;
    }
    return {heads, kRows / heads};
  }

  // Row r of the 64 has the position r * inverse() >> 16.
  constexpr int inverse() const { return (1 << 16) / heads + 1; }
};
static_assert([] {
  for (int heads = 1; heads <= kRows; ++heads) {
    PackedRows const rows{heads, kRows / heads};
    for (int r = 0; r < kRows; ++r) {
      if (r * rows.inverse() >> 16 != r / heads) return false;
    }
  }
  return true;
}());

// Where the parts of the chunks of few rows are in the workspace: of each sequence, group of heads, row tile and chunk
// the accumulators of its rows, and for each row offset, sum and error of its softmax.
struct Slots {
  int head_tiles;
  int row_tiles;
  int chunks;
  int rows;

  // `most_rows`: of a head, of a sequence whose chunks several CTAs have.
  static constexpr Slots of(PackedRows const& packed, int heads_q, int most_rows, int capacity, int keys) {
    int const tiles = (most_rows + packed.positions - 1) / packed.positions;
    return {.head_tiles = heads_q / packed.heads,
            .row_tiles = tiles,
            .chunks = (capacity + keys - 1) / keys,
            .rows = std::min(most_rows, packed.positions) * packed.heads};
  }

  static constexpr int kStatistics = 3;
  // In floats: a multiple of 4, so that each part begins at 16 bytes.
  constexpr int64_t part(int head_dim) const { return (int64_t{rows} * (head_dim + kStatistics) + 3) / 4 * 4; }
  constexpr int64_t parts() const { return int64_t{head_tiles} * row_tiles * chunks; }  // of a sequence
};

// A call, as far as the work depends on it.
struct Rows {
  int batch;
  int heads_q;
  int heads_kv;
  int len_q;  // of each sequence, or of all packed ones
  bool packed;
  int capacity;  // keys of a sequence, at most

  constexpr int group() const { return heads_q / heads_kv; }
};

// Which kernels run, and their workspace.
struct Work {
  int long_rows;           // a sequence of so many rows and more has row tiles, of which a CTA has all chunks
  PackedRows tile_rows;
  PackedRows single_rows;  // of the other sequences
  int64_t tiles = 0;    // at most
  int64_t singles = 0;  // row tiles of the other sequences, at most
  int64_t tile_ctas = 0;
  int64_t single_ctas = 0;
  Slots slots = {};
  int64_t part_floats = 0;  // of the workspace, before the flags and the folds
  int64_t flag_bytes = 0;
  bool may_cut = false;  // row tiles, see pieces.cuh: else no flag is read
  int64_t bytes = 0;

  static constexpr Work of(int head_dim, Rows const& call, int long_rows, int num_sms) {
    Work work{.long_rows = long_rows,
              .tile_rows = PackedRows::of(call.group(), /*few=*/false),
              .single_rows = PackedRows::of(call.group(), /*few=*/true)};
    auto const tiles = [&](PackedRows const& rows, int block_m) {
      int const positions = block_m / kRows * rows.positions;
      // Of packed sequences each has one that is cut, and so have the rows of nobody.
      int64_t const of_head = call.packed ? call.len_q / positions + int64_t{call.batch} + 2
                                          : int64_t{call.batch} * ((call.len_q + positions - 1) / positions);
      return of_head * (call.heads_q / rows.heads);
    };
    KernelShape const shape = kernel_shape(head_dim, Chunks::kOfOneCta);
    if (call.len_q >= long_rows) {
      work.tiles = tiles(work.tile_rows, shape.block_m);
      work.tile_ctas = std::min<int64_t>(num_sms, work.tiles);
      work.may_cut = work.tiles > num_sms;
    }
    int const most_rows = std::min(call.len_q, long_rows - 1);
    if (most_rows > 0 && (call.packed || call.len_q < long_rows)) {
      work.slots = Slots::of(work.single_rows, call.heads_q, most_rows, call.capacity, chunk_keys(head_dim));
      work.singles = tiles(work.single_rows, kRows);
      work.single_ctas = std::min<int64_t>(num_sms, work.singles * std::max(1, work.slots.chunks));
      if (work.slots.chunks > 1) work.part_floats = call.batch * work.slots.parts() * work.slots.part(head_dim);
    }
    int const warpgroups = shape.block_m / kRows;
    work.flag_bytes = 4 * work.tile_ctas * 4 * warpgroups;
    int64_t const folds = 2 * work.tile_ctas * warpgroups * forward::rows::part_floats(head_dim) * 128;
    work.bytes = 4 * (work.part_floats + folds) + work.flag_bytes;
    return work;
  }

  // The host's choice, on which no bit depends. Of packed sequences those have their chunks computed by several CTAs
  // that have one row tile of few rows.
  static constexpr int choose_long_rows(int head_dim, Rows const& call, int num_sms) {
    constexpr int64_t kMostBytes = int64_t{256} << 20;
    PackedRows const few = PackedRows::of(call.group(), /*few=*/true);
    if (call.packed || call.len_q <= few.positions) return few.positions + 1;
    Work const single = of(head_dim, call, call.len_q + 1, num_sms), tiled = of(head_dim, call, 1, num_sms);
    if (single.bytes > kMostBytes) return 1;
    // In the time of a chunk of 64 rows, which alone is stored and read again. Row tiles of a whole wave are not cut.
    constexpr double kStored = 1.15;
    double const of_tile = head_dim <= 64 ? 1.7 : head_dim <= 128 ? 1.8 : 1.45;
    int64_t const chunks = std::max(1, single.slots.chunks), tiles = tiled.tiles;
    int64_t const waves = (single.singles * chunks + num_sms - 1) / num_sms;
    double const single_time = kStored * double(waves);
    double const tiled_time = of_tile * double(chunks) * std::max(1., double(tiles) / num_sms);
    return single_time < tiled_time ? call.len_q + 1 : 1;
  }
};

}  // namespace flash_cute::sm90::decode::key_chunks
