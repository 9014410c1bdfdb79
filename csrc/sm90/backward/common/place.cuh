// Where the rows and keys of a key tile are. A KeyTile is of a dense batch, whose lengths and mask are the parameters'.
// A SequenceKeyTile is of a sequence that is read at run time, and has it in shared memory. The kernels ask these
// functions, which are overloaded by the tile's type, at each use. `volatile` makes each call read shared memory again:
// values that were kept spilled.
#pragma once

#include "core/sequence.cuh"
#include "sm90/common/warpgroup.cuh"
#include "key_tile.cuh"

namespace flash_cute::sm90::backward {

// The fields of a sequence that mask and score need.
CUTE_DEVICE Sequence read_band(Sequence const volatile& sequence) {
  return {.len_q = sequence.len_q,
          .len_k = sequence.len_k,
          .band = {.lower = sequence.band.lower, .upper = sequence.band.upper},
          .shift = sequence.shift};
}
// The same without the shift, uniform: for branches.
CUTE_DEVICE Sequence read_uniform(Sequence const volatile& sequence) {
  return {.len_q = uniform(sequence.len_q),
          .len_k = uniform(sequence.len_k),
          .band = {.lower = uniform(sequence.band.lower), .upper = uniform(sequence.band.upper)}};
}

// Lengths and mask.
CUTE_DEVICE BwdParams const& lengths_of(BwdParams const& params, KeyTile const volatile&) { return params; }
CUTE_DEVICE Sequence lengths_of(BwdParams const&, SequenceKeyTile const volatile& tile) {
  return read_band(tile.sequence);
}
CUTE_DEVICE BwdParams const& uniform_lengths_of(BwdParams const& params, KeyTile const volatile&) { return params; }
CUTE_DEVICE Sequence uniform_lengths_of(BwdParams const&, SequenceKeyTile const volatile& tile) {
  return read_uniform(tile.sequence);
}

// Row i has the position i + shift.
CUTE_DEVICE int shift_of(BwdParams const& params, KeyTile const volatile&) {
  return params.sequences.shift;
}
CUTE_DEVICE int shift_of(BwdParams const&, SequenceKeyTile const volatile& tile) { return tile.sequence.shift; }

// Where TMA finds row 0 and key 0: the batch, or the coordinates of the sequence. Loads end behind the rows and keys
// that are used; the stores of dK and dV (origin_of_results) cover all keys.
CUTE_DEVICE int origin_of_rows(BwdParams const&, KeyTile const volatile& tile) { return tile.batch; }
CUTE_DEVICE int origin_of_keys(BwdParams const&, KeyTile const volatile& tile) { return tile.batch; }
CUTE_DEVICE int origin_of_results(BwdParams const&, KeyTile const volatile& tile) { return tile.batch; }
CUTE_DEVICE SequenceOrigin origin_of_rows(BwdParams const& params, SequenceKeyTile const volatile& tile) {
  return sequence_origin(params, tile, tile.sequence.first_row, tile.sequence.len_q);
}
CUTE_DEVICE SequenceOrigin origin_of_keys(BwdParams const& params, SequenceKeyTile const volatile& tile) {
  return sequence_origin(params, tile, tile.sequence.first_key, tile.sequence.len_k);
}
CUTE_DEVICE SequenceOrigin origin_of_results(BwdParams const& params, SequenceKeyTile const volatile& tile) {
  return sequence_origin(params, tile, tile.sequence.first_key, tile.keys);
}

// The number of a row tile among those of all heads: the index of its statistics, its sums and its semaphore.
template <class Traits>
CUTE_DEVICE int row_tile_index(BwdParams const& params, KeyTile const volatile& tile, RowTile const& row_tile) {
  int const head = tile.head_kv * params.heads_per_kv + row_tile.head;
  return (tile.batch * params.heads_q + head) * params.m_blocks + row_tile.m_block;
}
// Of a sequence. The list of sequences counts in tiles of kListedRows rows, of which a kernel may make several.
template <class Traits>
CUTE_DEVICE int sequence_row_tile_index(BwdParams const& params, int head_kv, int first_row_tile,
                                        RowTile const& row_tile) {
  constexpr int kPerListed = Traits::kListedRows / Traits::kBlockM;
  int const head = head_kv * params.heads_per_kv + row_tile.head;
  return (head * params.m_blocks + first_row_tile) * kPerListed + row_tile.m_block;
}
template <class Traits>
CUTE_DEVICE int row_tile_index(BwdParams const& params, SequenceKeyTile const volatile& tile, RowTile const& row_tile) {
  return sequence_row_tile_index<Traits>(params, tile.head_kv, tile.first_row_tile, row_tile);
}
}  // namespace flash_cute::sm90::backward
