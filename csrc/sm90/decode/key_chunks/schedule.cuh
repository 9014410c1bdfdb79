// The work of a CTA: row tiles, each over one chunk of keys after the other, or single chunks.
#pragma once

#include <algorithm>

#include <cutlass/fast_math.h>

#include "contract/divisor.h"
#include "core/split_keys/work.cuh"
#include "core/warp_sum.cuh"
#include "sm90/decode/long_rows/sequences.cuh"
#include "sm90/forward/common/sequence_scheduler.cuh"
#include "tile.cuh"

namespace flash_cute::sm90::decode::key_chunks {

// `parts` is of the kernel.
struct Params : long_rows::Params {
  bool has_cache;  // else K and V are those of a forward, dense or packed
  PackedRows rows;
  Slots slots;  // of chunks of several CTAs
  // What follows from those, and what they divide by.
  Divisor group;       // query heads of a KV head
  Divisor heads;       // of a row tile
  Divisor head_tiles;  // row tiles of all heads
  Divisor positions;   // of a CTA's row tile
  int inverse;         // rows.inverse()

  void divide(int warpgroups) {
    group = std::max(1, heads_q / std::max(1, heads_kv));
    heads = rows.heads;
    head_tiles = heads_q / rows.heads;
    positions = warpgroups * rows.positions;
    inverse = rows.inverse();
  }
};

struct KernelArgs {
  CUtensorMap q;  // (column, head, row, batch)
  CUtensorMap k;  // (column, row, head, page)
  CUtensorMap v;
  Params params;
  cutlass::FastDivmod page_size;  // these four as in long_rows::KernelArgs
  int tile_pages;
  int tile_rows;
  int box_bits;

  CUTE_HOST_DEVICE int box_rows() const { return 1 << box_bits; }
};

// Sequences `batch` and `batch` + 1 of a packed batch are the rows of nobody, see core/sequence.cuh.
CUTE_DEVICE Sequence read_sequence(Params const& params, int index, Floors const& floors) {
  if (!params.has_cache) return flash_cute::read_sequence(params, index, floors);
  if (index < params.batch) return long_rows::read_sequence(params, index, floors.rows);
  Extent const rows = row_extent(params, index, floors.rows);
  return {.len_q = 0,
          .len_k = 0,
          .band = {},
          .shift = 0,
          .first_row = rows.first,
          .first_key = 0,
          .rows = rows.length};
}

// Whether a CTA has all chunks of a row tile.
CUTE_DEVICE bool is_long(Params const& params, Sequence const& sequence) { return sequence.rows >= params.long_rows; }

// The chunks of a sequence's keys that some row sees: at least one, perhaps without keys.
struct ChunkRange {
  int first;
  int count;
};
template <class Traits>
CUTE_DEVICE ChunkRange chunks_of(TileRange const& range) {
  int const tiles = Traits::kChunkTiles, first = range.begin / tiles;
  int const end = range.end > range.begin ? ceil_div(range.end, tiles) : 0;
  return {first, max(1, end - first)};
}
template <class Traits>
CUTE_DEVICE ChunkRange chunks_of(Sequence const& sequence) {
  if (sequence.len_q == 0) return {0, 1};
  return chunks_of<Traits>(key_range<Traits::kBlockN>(sequence, 0, sequence.len_q));
}

// The sequences that a warp looks at: 32 neighbouring ones, one per lane, in shared memory, since the warp has few
// registers. A sequence's row tiles, or their chunks, have numbers, those of one sequence side by side.
template <class Traits>
class Sequences32 {
 public:
  static constexpr bool kFolds = Traits::kChunks == Chunks::kOfOneCta;

  CUTE_DEVICE Sequences32(Params const& params, typename Traits::SharedStorage& smem) : params_(params), smem_(smem) {
    restart();
  }

  CUTE_DEVICE void restart() {
    smem_.floors[lane()].rows = 0;
    smem_.floors[lane()].keys = 0;
    first_ = -32;
    end_ = 0;
  }

  // Goes on to the next 32; false if there are none.
  CUTE_DEVICE bool next() {
    if (first_ + 32 >= sequence_count(params_)) return false;
    first_ += 32;
    int const index = first_ + lane();
    forward::advance_floors(params_, index, smem_.floors[lane()]);
    int units = 0;
    if (index < sequence_count(params_)) {
      Sequence const sequence = read(lane());
      if (is_long(params_, sequence) == kFolds) {
        units = row_tiles(sequence) * params_.head_tiles;
        if constexpr (!kFolds) units *= chunks_of<Traits>(sequence).count;
      }
    }
    int const end = end_ + inclusive_warp_sum(units);
    auto volatile& own = smem_.own_tiles[lane()];
    own.begin = end - units;
    own.end = end;
    end_ = __shfl_sync(forward::kAllLanes, end, 31);
    __syncwarp();  // all lanes may read the others'
    return true;
  }

  // Goes to the sequences that have the number; false if there are none.
  CUTE_DEVICE bool seek(int number) {
    if (first_ >= 0 && number < const_cast<int const volatile&>(smem_.own_tiles[0].begin)) restart();
#pragma unroll 1
    while (number >= end_) {
      if (!next()) return false;
    }
    return true;
  }

  CUTE_DEVICE int end() const { return end_; }
  CUTE_DEVICE int index(int which) const { return first_ + which; }
  CUTE_DEVICE bool has(int which, int number) const {
    auto const volatile& tiles = smem_.own_tiles[which];
    return tiles.begin <= number && number < tiles.end;
  }
  CUTE_DEVICE int begin(int which) const { return const_cast<int const volatile&>(smem_.own_tiles[which].begin); }
  CUTE_DEVICE Sequence read(int which) const {
    Floors const volatile& floors = smem_.floors[which];
    return read_sequence(params_, first_ + which, {floors.rows, floors.keys});
  }

  CUTE_DEVICE int positions() const { return params_.positions; }  // of a row tile
  CUTE_DEVICE int row_tiles(Sequence const& sequence) const {
    return (sequence.rows + positions() - 1) / params_.positions;
  }

  // kFolds: the row tile of a number of a sequence; and the key tiles that it visits.
  CUTE_DEVICE RowTileCoord coord(Sequence const& sequence, int number) const {
    TileOrder order = forward::sequence_order(params_, sequence, row_tiles(sequence));
    order.heads_q = order.num_heads = params_.head_tiles;
    order.group = max(1, order.group / params_.heads);
    order.last_group = (params_.head_tiles - 1) / order.group;
    return order.coord(number);
  }
  CUTE_DEVICE TileRange range(Sequence const& sequence, int m_block) const {
    if (m_block * positions() >= sequence.len_q) return {};
    return key_range<Traits::kBlockN>(sequence, m_block, positions());
  }

 private:
  CUTE_DEVICE static int lane() { return fresh_thread_index() % 32; }

  Params const& params_;
  typename Traits::SharedStorage& smem_;
  int first_;  // sequence
  int end_;    // of the numbers of these sequences
};

// Publishes the CTA's tiles.
template <class Traits>
CUTE_DEVICE void schedule(Params const& params, typename Traits::SharedStorage& smem) {
  constexpr bool kFolds = Traits::kChunks == Chunks::kOfOneCta;
  constexpr unsigned kAll = forward::kAllLanes;
  int const lane = fresh_thread_index() % 32;
  Sequences32<Traits> sequences(params, smem);
  Pieces const volatile& pieces = smem.pieces;
  int left = 0;  // pieces that come first: the tiles down from the last one that this CTA begins
  bool delayed = false;
  if constexpr (kFolds) {
    delayed = pieces.first <= pieces.last && pieces.begin > 0;
    left = pieces.last - pieces.first + 1 - int(delayed);
  }
  int turn = 0;
  int q_stage = 0, q_phases = 0;  // the last buffer of Q, and the phase of each
  bool had_fold = false;          // the last row tile
  int count = 0;                  // key tiles of the tiles published so far
  int published = 0;
#pragma unroll 1
  while (true) {
    int number;
    bool is_piece = false, exists;
    if (kFolds && left > 0) {
      is_piece = true;
      number = pieces.last - (pieces.last - pieces.first + 1 - int(delayed) - left);
      --left;
    } else if (kFolds && delayed && turn == pieces.slot) {
      is_piece = true;
      delayed = false;
      number = pieces.first;
    } else {
      number = forward::dealt_number(blockIdx.x, gridDim.x, turn++);
      if constexpr (kFolds) number += pieces.cut;
    }
    exists = sequences.seek(number);
    if (kFolds && !exists && delayed) {
      is_piece = exists = true;
      delayed = false;
      number = pieces.first;
      sequences.seek(number);
    }
    bool const mine = exists ? sequences.has(lane, number) : lane == 0;
    TileRange range{};
    ChunkRange chunks{0, 1};
    RowTileCoord coord{.m_block = -1};
    Sequence sequence{};
    int part = 0;
    if (mine && exists) {
      sequence = sequences.read(lane);
      int const index = number - sequences.begin(lane);
      if constexpr (kFolds) {
        coord = sequences.coord(sequence, index);
      } else {
        chunks = chunks_of<Traits>(sequence);
        int const tile = flash_cute::split_keys::divide(index, chunks.count), chunk = index - tile * chunks.count;
        coord = {.m_block = tile / params.head_tiles, .head = tile % params.head_tiles};
        part = ((coord.head * params.slots.row_tiles) + coord.m_block) * params.slots.chunks + chunk;
        chunks = {chunks.first + chunk, chunks.count};
      }
      range = sequences.range(sequence, coord.m_block);
      if constexpr (kFolds) chunks = chunks_of<Traits>(range);
    }
    int begin = 0, end = 1;
    if constexpr (kFolds) {
      end = __reduce_add_sync(kAll, mine ? chunks.count : 0);
      if (is_piece) {
        if (number == pieces.first) begin = pieces.begin;
        if (number == pieces.last) end = pieces.end;
      }
    }
    // The second buffer of Q is where a fold is: so that of a row tile of several chunks, or of one that another CTA
    // has begun, is the first one, and that of the row tile behind it too.
    bool const has_fold = end - begin > 1 || begin > 0;
    q_stage = Traits::kSmem.q_stages == 1 || has_fold || had_fold ? 0 : q_stage ^ 1;
    had_fold = has_fold;
    int const q_phase = q_phases >> q_stage & 1;
    q_phases ^= 1 << q_stage;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      smem.tile_pipeline.wait_empty(at_step(published));  // the tile before the last is not read any more
      int key_tiles = 0;
      if (mine) {
        Tile& tile = smem.tile[opaque(published) & 1];
        tile.m_block = coord.m_block;
        if (exists) {
          int const chunk = chunks.first + i;
          int const key_begin = max(range.begin, chunk * Traits::kChunkTiles);
          int const key_end = max(key_begin, min(range.end, (chunk + 1) * Traits::kChunkTiles));
          key_tiles = key_end - key_begin;
          tile.head = coord.head * params.rows.heads;
          tile.head_kv = tile.head / params.group;
          tile.batch = sequences.index(lane);
          tile.keys = {key_begin, key_end, count};
          tile.sequence = sequence;
          tile.rows = params.rows;
          tile.q_stage = q_stage;
          tile.q_phase = q_phase;
          tile.inverse = params.inverse;
          tile.page = params.has_cache || params.sequences.cu_k == nullptr ? tile.batch : 0;
          if constexpr (kFolds) {
            int const before = i == 0 ? 0 : i > begin ? kContinues : kContinues | kFromOther;
            int const behind = i + 1 == chunks.count ? 0 : i + 1 < end ? kGoesOn : kGoesOn | kToOther;
            tile.fold = before | behind;
          } else {
            tile.fold = chunks.count > 1 ? kIsPart : 0;
            tile.part = tile.batch * params.slots.parts() + part;
          }
        }
        smem.tile_pipeline.publish(at_step(published));
      }
      ++published;
      count += __reduce_add_sync(kAll, key_tiles);
    }
    if (!exists) break;
  }
}

}  // namespace flash_cute::sm90::decode::key_chunks
