// Reads the lists of a batch's tiles, see SequenceTiles.
#pragma once

#include <cute/tensor.hpp>

#include "sequence.cuh"

namespace flash_cute {

using namespace cute;

// Whether all tiles of a sequence have a place. They do unless bad offsets make sequences overlap: then the gradients
// of a sequence without one are 0.
template <int kBlockM, int kBlockN>
CUTE_DEVICE bool sequence_fits(BwdParams const& params, int index) {
  SequenceTiles const& tiles = params.tiles;
  int const rows = ceil_div(row_extent(params, index).length, kBlockM);
  int const keys = ceil_div(key_extent(params, index).length, kBlockN);
  return tiles.rows_before[index] + rows <= params.m_blocks && tiles.keys_before[index] + keys <= params.n_blocks;
}

// Whether a sequence has key tiles, by which its dQ is written.
template <int kBlockM, int kBlockN>
CUTE_DEVICE bool has_tiles(BwdParams const& params, int index) {
  return key_extent(params, index).length > 0 && sequence_fits<kBlockM, kBlockN>(params, index);
}

// Whether a key tile visits a row tile of a sequence.
template <int kBlockM, int kBlockN>
CUTE_DEVICE bool is_visited(Sequence const& sequence, int m_block) {
  if (m_block * kBlockM >= sequence.len_q) return false;  // rows that are not used
  KeyTiles const visiting = visiting_key_tiles<kBlockM, kBlockN>(sequence, m_block);
  return visiting.begin < visiting.end;
}

// The numbers in BwdParams::counters where sequences are read at run time, see sm90/bwd/dq_queue.cuh.
struct DqQueue {
  static constexpr int kTicket = 0;
  static constexpr int kTail = 1;      // chunks whose sums are complete
  static constexpr int kHead = 2;      // of them, those that a CTA has taken
  static constexpr int kExpected = 3;  // chunks of all sequences that have a key tile

  static constexpr int kChunk = 8;  // row tiles of a query head, at most
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
  if (tile >= tiles.rows_before[sequence_count(params)]) return {.exists = false};
  int const index = tiles.row_sequence[tile];
  return {.exists = true, .head = head, .index = index, .m_block = tile - tiles.rows_before[index]};
}

// A key tile among those of all KV heads.
struct ListedKeyTile {
  bool exists;
  int head_kv;
  int index;    // of its sequence
  int n_block;  // in its sequence
};

// The tile of a rank in the order of processing. In a sequence the KV heads are in groups: tile 0 of each head, then
// tile 1 of each, and so on, so that a tile's ordered adds come `distance(key tiles of a head)` row tiles after those
// of the tile before it.
template <int kBlockM, int kBlockN, class Distance>
CUTE_DEVICE ListedKeyTile listed_key_tile(BwdParams const& params, int rank, Distance const& distance) {
  SequenceTiles const& tiles = params.tiles;
  int const position = rank / params.heads_kv;
  if (position >= tiles.keys_before[sequence_count(params)]) return {.exists = false};
  int const index = tiles.key_sequence[position];
  int const n_blocks = ceil_div(key_extent(params, index).length, kBlockN);
  int const row_tiles = max(1, ceil_div(row_extent(params, index).used, kBlockM)) * params.group;
  int const heads = min(params.heads_kv, ceil_div(distance(n_blocks), row_tiles));
  int const in_sequence = rank - tiles.keys_before[index] * params.heads_kv;
  int const first_head = in_sequence / (heads * n_blocks) * heads;
  int const heads_of_group = min(heads, params.heads_kv - first_head);
  int const in_group = in_sequence - first_head * n_blocks;
  return {.exists = true,
          .head_kv = first_head + in_group % heads_of_group,
          .index = index,
          .n_block = in_group / heads_of_group};
}

// Of a row among the statistics that a call keeps per row, like the LSE: (batch, heads_q, len_q), packed (heads_q, all
// rows).
CUTE_DEVICE int64_t statistic_index(BwdParams const& params, int index, int head, Sequence const& sequence, int row) {
  int64_t const batch_head = params.sequences.cu_q == nullptr ? int64_t{index} * params.heads_q + head : head;
  return batch_head * params.len_q + sequence.first_row + row;
}

// The offset of a sequence's row 0, or key 0, in a head of a tensor.
CUTE_DEVICE int64_t sequence_offset(BwdParams const& params, Strides const& strides, int index, int first, int head) {
  int64_t const before = params.sequences.cu_q == nullptr ? index * strides.batch : first * strides.row;
  return before + head * strides.head;
}

}  // namespace flash_cute
