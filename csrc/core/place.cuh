// Where the results of a forward's tile are. Lengths and mask of a dense batch are the parameters themselves; those of
// a sequence that is read at run time are a Sequence, which also says where its rows and keys begin.
#pragma once

#include "sequence.cuh"

namespace flash_cute {

// In the tensors' row dimension.
CUTE_HOST_DEVICE int first_row(FwdParams const&) { return 0; }
CUTE_HOST_DEVICE int first_row(Sequence const& sequence) { return sequence.first_row; }
CUTE_HOST_DEVICE int first_key(FwdParams const&) { return 0; }
CUTE_HOST_DEVICE int first_key(Sequence const& sequence) { return sequence.first_key; }

// Row i has the position i + shift among the keys.
CUTE_HOST_DEVICE int shift_of(FwdParams const& params) { return params.sequences.shift; }
CUTE_HOST_DEVICE int shift_of(Sequence const& sequence) { return sequence.shift; }

// Row 0 of a tile's head in the LSE. That of a packed batch is (heads_q, len_q).
template <class Tile>
CUTE_HOST_DEVICE int64_t lse_offset(FwdParams const& params, FwdParams const&, Tile const& tile) {
  return (int64_t{tile.batch} * params.heads_q + tile.head) * params.len_q;
}
template <class Tile>
CUTE_HOST_DEVICE int64_t lse_offset(FwdParams const& params, Sequence const& sequence, Tile const& tile) {
  int const batch = params.sequences.cu_q != nullptr ? 0 : tile.batch;
  return (int64_t{batch} * params.heads_q + tile.head) * params.len_q + sequence.first_row;
}

// A row of a tile's head in out.
template <class Lengths, class Tile>
CUTE_HOST_DEVICE int64_t out_offset(FwdParams const& params, Lengths const& lengths, Tile const& tile, int row) {
  Strides const& strides = params.out_strides;
  return tile.batch * strides.batch + tile.head * strides.head + (first_row(lengths) + row) * strides.row;
}

}  // namespace flash_cute
