// The tile of a cluster: 64 keys, or 64 query rows, of a sequence. One thread finds it in the lists of tiles
// (SequenceTiles) and leaves it in shared memory.
#pragma once

#include "core/mask.cuh"
#include "core/sequence_tiles.cuh"
#include "sm90/backward/common/key_tile.cuh"
#include "sm90/common/sequence_map.cuh"
#include "tile.h"

namespace flash_cute::sm90::backward::dq_in_registers_large {

using backward::RowTile;

struct KeyTile {
  int n_block;  // -1: none
  int head_kv;
  int batch;            // the sequence's index
  RowTile first;        // of its row tiles, see RowTile
  int last_row_tile;    // the same
  int first_row_tile;   // of the sequence, among those of a head
  int keys;             // of the sequence in dK and dV
  TileRange row_tiles;  // of each query head of the group
  Sequence sequence;
};

struct RowTileTask {
  int m_block;  // -1: none
  int head;
  int batch;           // the sequence's index
  int first_row_tile;  // of the sequence, among those of a head
  TileRange key_tiles;
  Sequence sequence;
};

CUTE_DEVICE void find_key_tile(BwdParams const& params, int rank, KeyTile& tile) {
  tile.n_block = -1;
  int const index = sequence_of_rank(params, rank);
  if (index < 0) return;
  SequenceRecord const& record = params.tiles.records[index];
  Sequence const sequence = record.sequence;
  auto const one_head_after_the_other = [](int /*n_blocks*/) { return 1; };  // few heads' Q and dO are in L2 at a time
  ListedKeyTile const listed = listed_key_tile<kTileRows, kTileRows>(params, record, rank, one_head_after_the_other);
  TileRange range = row_range<kTileRows, kTileRows>(sequence, listed.n_block);
  if (listed.n_block * kTileRows >= sequence.len_k) range.end = range.begin;  // keys that are not used
  tile = {.n_block = listed.n_block,
          .head_kv = listed.head_kv,
          .batch = index,
          .first = {.m_block = range.end - 1},
          .last_row_tile = sequence.band.is_window(sequence.len_q) ? range.begin : -1,
          .first_row_tile = record.first_row_tile,
          .keys = record.keys,
          .row_tiles = range,
          .sequence = sequence};
}

// The last row tile of a head comes first: with a causal mask the longest.
CUTE_DEVICE void find_row_tile(BwdParams const& params, int number, RowTileTask& tile) {
  tile.m_block = -1;
  int const head = number / params.m_blocks, from_last = number - head * params.m_blocks;
  ListedRowTile const listed = listed_row_tile(params, head * params.m_blocks + params.m_blocks - 1 - from_last);
  if (!listed.exists) return;
  SequenceRecord const& record = params.tiles.records[listed.index];
  Sequence const sequence = record.sequence;
  TileRange range = key_range<kTileRows, kTileRows>(sequence, listed.m_block);
  if (listed.m_block * kTileRows >= sequence.len_q) range.end = range.begin;  // rows not used
  tile = {.m_block = listed.m_block,
          .head = head,
          .batch = listed.index,
          .first_row_tile = record.first_row_tile,
          .key_tiles = range,
          .sequence = sequence};
}

template <class Tile>
CUTE_DEVICE SequenceOrigin origin_of_rows(BwdParams const& params, Tile const& tile) {
  return sequence_origin(params, tile, tile.sequence.first_row, tile.sequence.len_q);
}
template <class Tile>
CUTE_DEVICE SequenceOrigin origin_of_keys(BwdParams const& params, Tile const& tile) {
  return sequence_origin(params, tile, tile.sequence.first_key, tile.sequence.len_k);
}

CUTE_DEVICE int row_steps(BwdParams const& params, KeyTile const volatile& tile) {
  return params.heads_per_kv * (uniform(tile.row_tiles.end) - uniform(tile.row_tiles.begin));
}

// The coordinates of dK's and dV's rows.
CUTE_DEVICE SequenceOrigin origin_of_gradients(BwdParams const& params, KeyTile const& tile) {
  return sequence_origin(params, tile, tile.sequence.first_key, tile.keys);
}

CUTE_DEVICE int key_steps(RowTileTask const volatile& tile) {
  return uniform(tile.key_tiles.end) - uniform(tile.key_tiles.begin);
}

// The index of a row tile's first row among the statistics of all rows.
CUTE_DEVICE int64_t first_statistic(BwdParams const& params, int head, int first_row_tile, int m_block) {
  return (int64_t{head} * params.m_blocks + first_row_tile + m_block) * kTileRows;
}

}  // namespace flash_cute::sm90::backward::dq_in_registers_large
