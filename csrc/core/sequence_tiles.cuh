// Reads the lists of a batch's tiles, see SequenceTiles.
#pragma once

#include <cute/tensor.hpp>

#include "sequence.cuh"

namespace flash_cute {

using namespace cute;

// What the backward needs to know of a sequence, gathered once per sequence. (Read from the offsets by each tile, it
// took some forty loads, each of which waits for another: 30 us per task of the sm90 backward.)
struct alignas(16) SequenceRecord {
  Sequence sequence;
  int keys;            // of k and v that the sequence has; those from len_k on are not used, and see no row
  int first_row_tile;  // among those of a head
  int first_key_tile;  // among those of a KV head, in the order of processing
  int blind_rows;      // rows before the sequence's first one that see no key, and whose dQ is 0
};
static_assert(sizeof(SequenceRecord) == kSequenceRecordBytes);

// Whether a sequence has key tiles, by which its dQ is written.
CUTE_DEVICE bool has_key_tiles(SequenceRecord const& record) { return record.keys > 0; }

// Whether a key tile visits a row tile of a sequence.
template <int kBlockM, int kBlockN>
CUTE_DEVICE bool is_visited(Sequence const& sequence, int m_block) {
  if (m_block * kBlockM >= sequence.len_q) return false;  // rows that are not used
  KeyTiles const visiting = visiting_key_tiles<kBlockM, kBlockN>(sequence, m_block);
  return visiting.begin < visiting.end;
}

// The numbers in BwdParams::counters where sequences are read at run time, see sm90/backward/dq_in_memory/dq_queue.cuh.
struct DqQueue {
  static constexpr int kTicket = 0;
  static constexpr int kExpected = 1;  // chunks of all sequences that have a key tile
  static constexpr int kTail = 2;      // chunks whose sums are complete
  static constexpr int kHead = 3;      // slots that CTAs have taken

  static constexpr int kMaxChunk = 8;  // row tiles

  // Row tiles per chunk, of the query heads that share a KV head: as many as come to a key tile, so that each task has
  // about one chunk. `row_tiles`, `key_tiles`: of a sequence.
  CUTE_DEVICE static int chunk(BwdParams const& params, int row_tiles, int key_tiles) {
    return min(int{kMaxChunk}, max(1, ceil_div(params.heads_per_kv * row_tiles, max(1, key_tiles))));
  }

  // Of a sequence and KV head.
  CUTE_DEVICE static int chunks(BwdParams const& params, int row_tiles, int key_tiles) {
    return ceil_div(params.heads_per_kv * row_tiles, chunk(params, row_tiles, key_tiles));
  }
};

// A row tile among those of all heads.
struct ListedRowTile {
  bool exists;
  int head;
  int index;    // of its sequence
  int m_block;  // in its sequence
};

// The tile of number head * m_blocks + i.
CUTE_DEVICE ListedRowTile listed_row_tile(BwdParams const& params, int number) {
  int const head = number / params.m_blocks, tile = number - head * params.m_blocks;
  SequenceTiles const& tiles = params.tiles;
  if (tile >= tiles.totals[0]) return {.exists = false};
  int const index = tiles.row_sequence[tile];
  return {.exists = true,
          .head = head,
          .index = index,
          .m_block = tile - tiles.records[index].first_row_tile};
}

// The sequence of the key tile of a rank in the order of processing; -1 if there is none.
CUTE_DEVICE int sequence_of_rank(BwdParams const& params, int rank) {
  int const position = rank / params.heads_kv;
  return position < params.tiles.totals[1] ? params.tiles.key_sequence[position] : -1;
}

// A key tile of a sequence.
struct ListedKeyTile {
  int head_kv;
  int n_block;
};

// The tile of a rank that belongs to the sequence. In a sequence the KV heads are in groups: tile 0 of each head, then
// tile 1 of each, and so on, so that a tile's ordered adds come `distance(key tiles of a head)` row tiles after those
// of the tile before it. The groups are equal: a smaller last one would leave long tiles to the end. With a window, few
// heads at a time keep Q, dO and dQ in L2.
template <int kBlockM, int kBlockN, class Record, class Distance>
CUTE_DEVICE ListedKeyTile listed_key_tile(BwdParams const& params, Record const& record, int rank,
                                          Distance const& distance) {
  int const n_blocks = ceil_div(int{record.keys}, kBlockN);
  int const heads_in_turn = record.sequence.band.lower > -kNoLimit ? params.heads_per_kv : 1;
  int const row_tiles = max(1, ceil_div(int{record.sequence.len_q}, kBlockM)) * heads_in_turn;
  int64_t const groups = int64_t{params.heads_kv} * row_tiles / max(1, distance(n_blocks));
  int const heads = ceil_div(params.heads_kv, static_cast<int>(max(int64_t{1}, min(groups, int64_t{params.heads_kv}))));
  int const in_sequence = rank - record.first_key_tile * params.heads_kv;
  int const first_head = in_sequence / (heads * n_blocks) * heads;
  int const heads_of_group = min(heads, params.heads_kv - first_head);
  int const in_group = in_sequence - first_head * n_blocks;
  return {.head_kv = first_head + in_group % heads_of_group, .n_block = in_group / heads_of_group};
}

// Of a row among the statistics that a call keeps per row, like the LSE: (batch, heads_q, lse_rows),
// packed (heads_q, lse_rows).
CUTE_DEVICE int64_t statistic_index(BwdParams const& params, int index, int head, Sequence const& sequence, int row) {
  int64_t const batch_head = params.sequences.cu_q == nullptr ? int64_t{index} * params.heads_q + head : head;
  return batch_head * params.lse_rows + sequence.first_row + row;
}

// The offset of a sequence's row 0, or key 0, in a head of a tensor.
CUTE_DEVICE int64_t sequence_offset(BwdParams const& params, Strides const& strides, int index, int first, int head) {
  int64_t const before = params.sequences.cu_q == nullptr ? index * strides.batch : first * strides.row;
  return before + head * strides.head;
}

}  // namespace flash_cute
