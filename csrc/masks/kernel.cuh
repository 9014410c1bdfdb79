// Makes a TileMask of a caller's mask, in one launch, by writes alone: same inputs, same bits, and nothing to be zeroed
// before.
//
// A CTA has 32 key tiles, a word of each row unit's list, and a range of row units. A warp has a key tile, and a lane
// up to four of its columns, of which it holds the units that the intervals touch and cover. Word by word of the key
// tile's list a warp ORs what its columns touch, and ANDs what they cover. The 32 warps' words are then transposed, by
// ballots.
#pragma once

#include <algorithm>

#include "dependents.cuh"
#include "intervals.cuh"

namespace flash_cute::masks {

constexpr int kWarps = 32;  // key tiles of a CTA
constexpr int kThreads = 32 * kWarps;
constexpr int kLaneColumns = 4;  // of a key tile, at most
constexpr int kMostWords = 32;   // of row units, that a CTA has

// What a CTA has: a word of key tiles, and `number` words of row units from `begin` on, of a head.
struct Share {
  int batch;
  int head;
  int key_word;
  int begin;
  int number;
};

// `words_per_cta`: of row units.
CUTE_HOST_DEVICE Share share_of(TileMaskPlan const& plan, int words_per_cta, int index) {
  int const key_words = plan.key_words(), row_words = plan.row_words();
  int const ranges = (row_words + words_per_cta - 1) / words_per_cta;
  int const key_word = index % key_words, range = index / key_words % ranges, pair = index / key_words / ranges;
  int const begin = range * words_per_cta;
  return {.batch = pair / plan.heads,
          .head = pair % plan.heads,
          .key_word = key_word,
          .begin = begin,
          .number = cute::min(words_per_cta, row_words - begin)};
}

// Words of row units per CTA, so that there is a CTA for each multiprocessor if there can be.
inline int words_per_cta(TileMaskPlan const& plan, int num_sms) {
  int64_t const all = int64_t{plan.key_words()} * plan.row_words() * plan.batches * plan.heads;
  return static_cast<int>(std::clamp<int64_t>(all / num_sms, 1, kMostWords));
}

inline int64_t ctas(TileMaskPlan const& plan, int words_per_cta) {
  int64_t const ranges = (plan.row_words() + words_per_cta - 1) / words_per_cta;
  return ranges * plan.key_words() * plan.batches * plan.heads;
}

// The columns that a lane has of a key tile, as the units that see them.
struct LaneColumns {
  UnitSpan touched[kMaxIntervals][kLaneColumns];
  UnitSpan covered[kMaxIntervals][kLaneColumns];

  // `store(n, column, rows)`: what becomes of a column's intervals.
  template <class Store>
  CUTE_DEVICE LaneColumns(Params const& params, Share const& share, int tile, int lane, Store const& store) {
    int const block_n = params.plan.block_n, unit_rows = params.plan.unit_rows;
    CUTE_UNROLL
    for (int i = 0; i < kLaneColumns; ++i) {
      int const in_tile = 32 * i + lane, column = tile * block_n + in_tile;
      bool const exists = in_tile < block_n && tile < params.plan.key_tiles;
      ColumnRows const rows = exists ? column_rows(params, share.batch, share.head, column) : ColumnRows{};
      if (exists) store(column, rows);
      CUTE_UNROLL
      for (int n = 0; n < kMaxIntervals; ++n) {
        touched[n][i] = touched_units(rows.of[n], unit_rows);
        covered[n][i] = covered_units(rows.of[n], unit_rows, params.len_q);
      }
      if (in_tile >= block_n) covered[0][i] = {0, params.plan.row_units};  // no column: nothing to see
    }
  }
};

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
__global__ void __launch_bounds__(kThreads) tile_mask_kernel(__grid_constant__ Params const params,
                                                             __grid_constant__ int const words_per_cta) {
  launch_dependents<kArch>();  // the kernel after waits for the end of this one
  TileMaskPlan const& plan = params.plan;
  Share const share = share_of(plan, words_per_cta, blockIdx.x);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const tile = 32 * share.key_word + warp;
  int64_t const pair = int64_t{share.batch} * plan.heads + share.head;
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < params.zeroed_words; i += kThreads) params.zeroed[i] = 0;
  }

  bool const two = params.given.first_row[1].data != nullptr;
  int64_t const columns = plan.columns(), pairs = int64_t{plan.batches} * plan.heads;
  LaneColumns const own(params, share, tile, lane, [&](int column, ColumnRows const& rows) {
    if (share.begin > 0) return;  // another CTA's
    params.intervals[pair * columns + column] = rows.of[0];
    if (two) params.intervals[(pairs + pair) * columns + column] = rows.of[1];
  });
  int first = plan.row_units, limit = 0;  // units that touch a column of the lane
  CUTE_UNROLL
  for (int i = 0; i < kLaneColumns; ++i) {
    CUTE_UNROLL
    for (int n = 0; n < kMaxIntervals; ++n) {
      UnitSpan const& span = own.touched[n][i];
      if (span.begin == span.end) continue;
      first = cute::min(first, span.begin);
      limit = cute::max(limit, span.end);
    }
  }
  first = __reduce_min_sync(0xffffffff, first);
  limit = __reduce_max_sync(0xffffffff, limit);

  // (visited or whole, row unit's word, key tile); padded against bank conflicts
  __shared__ uint32_t of_keys[2][kMostWords][kWarps + 1];
  uint32_t own_visited = 0, own_whole = 0;  // of the lane's word
  for (int i = cute::max(0, first / 32 - share.begin); i < share.number && 32 * (share.begin + i) < limit; ++i) {
    int const word = share.begin + i;
    uint32_t visited = 0, whole = ~0u;
    CUTE_UNROLL
    for (int c = 0; c < kLaneColumns; ++c) {
      uint32_t covered = own.covered[0][c].bits(word);
      visited |= own.touched[0][c].bits(word);
      if (two) {
        covered |= own.covered[1][c].bits(word);
        visited |= own.touched[1][c].bits(word);
      }
      whole &= covered;
    }
    visited = __reduce_or_sync(0xffffffff, visited);
    whole = __reduce_and_sync(0xffffffff, whole);
    if (lane == i) {
      own_visited = visited;
      own_whole = whole;
    }
  }
  of_keys[0][lane][warp] = own_visited;
  of_keys[1][lane][warp] = own_whole;
  if (params.keys_visited != nullptr && lane < share.number && tile < plan.key_tiles) {
    int64_t const at = (pair * plan.key_tiles + tile) * plan.row_words() + share.begin + lane;
    params.keys_visited[at] = own_visited;
    params.keys_whole[at] = own_whole;
  }
  __syncthreads();  // all warps have written their words

  for (int task = warp; task < 2 * share.number; task += kWarps) {
    int const list = task / share.number, i = task % share.number;
    uint32_t const of_tile = of_keys[list][i][lane];
    uint32_t of_unit = 0;
    CUTE_UNROLL
    for (int unit = 0; unit < 32; ++unit) {
      uint32_t const tiles = __ballot_sync(0xffffffff, of_tile >> unit & 1);
      if (lane == unit) of_unit = tiles;
    }
    int const unit = 32 * (share.begin + i) + lane;
    if (unit >= plan.row_units) continue;
    uint32_t* const lists = list == 0 ? params.rows_visited : params.rows_whole;
    lists[(pair * plan.row_units + unit) * plan.key_words() + share.key_word] = of_unit;
  }
}

}  // namespace flash_cute::masks
