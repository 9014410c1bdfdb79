// Where the rows and keys of a row tile are. A TileCoord is of a dense batch, whose lengths and mask are the parameters'.
// A SequenceTile is of a sequence that is read at run time, and has it in shared memory. The kernels ask these functions,
// which are overloaded by the tile's type.
#pragma once

#include "../../core/sequence.cuh"
#include "../warpgroup.cuh"
#include "scheduler.cuh"

namespace flash_cute::sm90::fwd {

// Lengths and mask.
CUTE_DEVICE FwdParams const& lengths_of(FwdParams const& params, TileCoord const&) { return params; }
CUTE_DEVICE Sequence const& lengths_of(FwdParams const&, SequenceTile const& tile) { return tile.sequence; }

// The same, uniform: for branches.
CUTE_DEVICE FwdParams const& uniform_lengths_of(FwdParams const& params, TileCoord const&) { return params; }
CUTE_DEVICE Sequence uniform_lengths_of(FwdParams const&, SequenceTile const& tile) {
  Sequence const& sequence = tile.sequence;
  return Sequence{.len_q = uniform(sequence.len_q),
                  .len_k = uniform(sequence.len_k),
                  .band = {.lower = uniform(sequence.band.lower), .upper = uniform(sequence.band.upper)}};
}

// A copy of the lengths, for what is done after the main loop.
CUTE_DEVICE FwdParams const& copy_of_lengths(FwdParams const& params, TileCoord const&) { return params; }
CUTE_DEVICE Sequence copy_of_lengths(FwdParams const&, SequenceTile const& tile) { return tile.sequence; }

// Where a row of a tile's head is in out, and row 0 in the LSE. The LSE of a packed batch is (heads_q, len_q). `lengths`:
// as above.
CUTE_DEVICE int64_t out_offset(FwdParams const& params, FwdParams const&, TileCoord const& tile, int row) {
  return tile.batch * params.out_strides.batch + tile.head * params.out_strides.head + row * params.out_strides.row;
}
CUTE_DEVICE int64_t out_offset(FwdParams const& params, Sequence const& sequence, TileCoord const& tile, int row) {
  return out_offset(params, params, tile, sequence.first_row + row);
}
CUTE_DEVICE int64_t lse_offset(FwdParams const& params, FwdParams const&, TileCoord const& tile) {
  return (int64_t{tile.batch} * params.heads_q + tile.head) * params.len_q;
}
CUTE_DEVICE int64_t lse_offset(FwdParams const& params, Sequence const& sequence, TileCoord const& tile) {
  int const batch = params.sequences.cu_q != nullptr ? 0 : tile.batch;
  return (int64_t{batch} * params.heads_q + tile.head) * params.len_q + sequence.first_row;
}

}  // namespace flash_cute::sm90::fwd
