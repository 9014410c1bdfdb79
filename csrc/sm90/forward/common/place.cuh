// Where the rows and keys of a row tile are. A TileCoord is of a dense batch, whose lengths and mask are the
// parameters'. A SequenceTile is of a sequence that is read at run time, and has it in shared memory. The kernels ask
// these functions, which are overloaded by the tile's type.
#pragma once

#include "core/place.cuh"
#include "core/softmax.cuh"
#include "sm90/common/warpgroup.cuh"
#include "scheduler.cuh"

namespace flash_cute::sm90::forward {

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

// The parts of a tile, see TileCoord. Sequences that are read at run time are not split.
CUTE_DEVICE int parts_of(TileCoord const volatile& tile) { return uniform(tile.parts); }
CUTE_DEVICE constexpr int parts_of(SequenceTile const&) { return 0; }

// A copy of the lengths, for what is done after the main loop.
CUTE_DEVICE FwdParams const& copy_of_lengths(FwdParams const& params, TileCoord const&) { return params; }
CUTE_DEVICE Sequence copy_of_lengths(FwdParams const&, SequenceTile const& tile) { return tile.sequence; }

// The softmax of a tile's rows, and what its values are multiplied by: a tile of float8 numbers has factors of its own,
// see sm90/decode/long_rows/float8.cuh.
CUTE_DEVICE OnlineSoftmax<2> softmax_of(FwdParams const& params, TileCoord const&) {
  return {params.scale_log2, params.power_scale};
}
template <class Accumulator>
CUTE_DEVICE void scale_values(TileCoord const&, Accumulator&) {}

}  // namespace flash_cute::sm90::forward
