// Which row tile of a packed batch a CTA computes.
//
// A kernel before this one counts the row tiles of each sequence (row_tile_prefix_kernel); a warp finds the sequence of
// a tile's number in their prefix sums. There are as many CTAs as there can be row tiles; those left over end at once.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/score.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::fwd {

using namespace cute;

// The largest index with prefix[index] <= value, by all lanes of a warp; 0 <= value < prefix[count].
CUTE_DEVICE int find_sequence(int const* prefix, int count, int value) {
  int const lane = threadIdx.x % 32;
  int begin = 0, end = count;  // the index is in [begin, end)
  while (end - begin > 1) {
    int const step = ceil_div(end - begin, 32);
    int const index = begin + lane * step;
    bool const below = index < end && __ldg(prefix + index) <= value;
    int const last = 31 - __clz(__ballot_sync(0xffffffff, below));  // lane 0's always is
    begin += last * step;
    end = min(begin + step, end);
  }
  return begin;
}

// The tile with number `index`, in order of processing; m_block -1 if there is none. By all threads, which a barrier
// joins.
template <class Traits>
CUTE_DEVICE void place_tile(FwdParams const& params, SequenceTile& tile, int index = blockIdx.x) {
  if (threadIdx.x < 32) {
    int const* const prefix = params.sequences.tiles_before;
    RowTileCoord coord = {-1, 0, 0};
    if (prefix == nullptr) {
      coord = params.order.coord(index);
    } else {
      int const number = index / params.heads_q;  // of the row tile of a head
      int const sequences = sequence_count(params);
      if (number < __ldg(prefix + sequences)) {
        coord.batch = find_sequence(prefix, sequences, number);
        // In a sequence the last row tile of every head comes first: with a causal mask the longest.
        coord.m_block = __ldg(prefix + coord.batch + 1) - 1 - number;
        coord.head = index % params.heads_q;
      }
    }
    if (threadIdx.x == 0) {
      Sequence const sequence = read_sequence(params, coord.batch);
      // Bad offsets may overlap, so that the prefix sums overflow: no tile lies outside of its sequence all the same.
      int const m_blocks = ceil_div(sequence.rows, int{Traits::kBlockM});
      if (static_cast<unsigned>(coord.m_block) >= static_cast<unsigned>(m_blocks)) coord.m_block = -1;
      TileRange keys = key_range<Traits::kBlockM, Traits::kBlockN>(sequence, coord.m_block);
      if (coord.m_block * Traits::kBlockM >= sequence.len_q) keys.end = keys.begin;  // rows that are not used
      float slope = 0.f;
      if (Traits::kVariant == Variant::kModified && coord.batch < params.batch) {
        slope = head_slope(params.score, coord.batch, coord.head);
      }
      tile = {coord, sequence, keys, 0, slope};
    }
  }
  __syncthreads();
}

}  // namespace flash_cute::sm80::fwd
