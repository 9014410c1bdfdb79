// Which row tile of a packed batch a CTA computes.
//
// A warp finds the sequence of a tile's number in the prefix sums of the sequences' row tiles: its own, or, of many
// sequences, those of a kernel before this one (row_tile_prefix_kernel). There are as many CTAs as there can be row
// tiles; those left over end at once.
#pragma once

#include <cute/tensor.hpp>

#include "core/score.cuh"
#include "core/warp_sum.cuh"
#include "sequence_tile.h"
#include "tile_order.h"

namespace flash_cute::sm80::forward {

using namespace cute;

// A sequence of a packed batch, among the row tiles of one head.
struct SequencePlace {
  int index;     // -1: no sequence has the tile
  int end_tile;  // behind its last row tile
  Floors floors;
};

// The largest of the first offsets up to that of sequence `index`, by all lanes of a warp.
template <class Begin>
CUTE_DEVICE int largest_begin(int index, Begin const& begin) {
  int largest = 0;
  for (int i = threadIdx.x % 32; i <= index; i += 32) largest = max(largest, begin(i));
  return __reduce_max_sync(0xffffffff, largest);
}

// The sequence that has the row tile `number`, from the offsets, by all lanes of a warp.
template <int kBlockM>
CUTE_DEVICE SequencePlace find_in_offsets(FwdParams const& params, int number) {
  constexpr int kMostPerLane = kMostSearchedSequences / 32;
  int const sequences = sequence_count(params);
  int const per_lane = ceil_div(sequences, 32), first = threadIdx.x % 32 * per_lane;
  auto const exists = [&](int i) { return i < per_lane && first + i < sequences; };
  int tiles[kMostPerLane], all = 0, largest = 0;
  CUTE_UNROLL
  for (int i = 0; i < kMostPerLane; ++i) {  // the loads of all do not wait for one another
    if (exists(i)) largest = max(largest, row_begin(params, first + i));
  }
  int const up_to_lane = __shfl_up_sync(0xffffffff, inclusive_warp_max(largest), 1);
  int floor = threadIdx.x % 32 == 0 ? 0 : up_to_lane;
  CUTE_UNROLL
  for (int i = 0; i < kMostPerLane; ++i) {
    if (exists(i)) floor = max(floor, row_begin(params, first + i));
    tiles[i] = exists(i) ? ceil_div(row_extent(params, first + i, floor).length, kBlockM) : 0;
    all += tiles[i];
  }
  int end_tile = inclusive_warp_sum(all);
  unsigned const lanes = __ballot_sync(0xffffffff, end_tile - all <= number && number < end_tile);
  if (lanes == 0) return {.index = -1};
  end_tile -= all;
  int index = first - 1;
  CUTE_UNROLL
  for (int i = 0; i < kMostPerLane; ++i) {
    if (end_tile > number) break;
    end_tile += tiles[i];
    ++index;
  }
  int const owner = __ffs(lanes) - 1;
  index = __shfl_sync(0xffffffff, index, owner);
  return {.index = index,
          .end_tile = __shfl_sync(0xffffffff, end_tile, owner),
          .floors = {.rows = largest_begin(index, [&](int i) { return row_begin(params, i); }),
                     .keys = largest_begin(index, [&](int i) { return key_begin(params, i); })}};
}

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

// The sequence that has the row tile `number`, from prefix sums.
CUTE_DEVICE SequencePlace find_in_prefix(FwdParams const& params, int number) {
  int const* const prefix = params.sequences.tiles_before;
  int const sequences = sequence_count(params);
  if (number >= __ldg(prefix + sequences)) return {.index = -1};
  int const index = find_sequence(prefix, sequences, number);
  int const* const row_floors = prefix + sequences + 1;
  return {.index = index,
          .end_tile = __ldg(prefix + index + 1),
          .floors = {.rows = __ldg(row_floors + index), .keys = __ldg(row_floors + sequences + index)}};
}

// The tile with number `index`, in order of processing; m_block -1 if there is none. By all threads, which a barrier
// joins.
template <class Traits>
CUTE_DEVICE void place_tile(FwdParams const& params, SequenceTile& tile, int index = blockIdx.x) {
  if (threadIdx.x < 32) {
    RowTileCoord coord = {-1, 0, 0};
    Floors floors{0, 0};
    if (params.sequences.cu_q == nullptr) {
      coord = params.order.coord(index);
    } else {
      int const number = index / params.heads_q;  // of the row tile of a head
      bool const searches = Traits::kSearchesOffsets && params.sequences.tiles_before == nullptr;
      SequencePlace const place =
          searches ? find_in_offsets<Traits::kBlockM>(params, number) : find_in_prefix(params, number);
      if (place.index >= 0) {
        coord.batch = place.index;
        // In a sequence the last row tile of every head comes first: with a causal mask the longest.
        coord.m_block = place.end_tile - 1 - number;
        coord.head = index % params.heads_q;
        floors = place.floors;
      }
    }
    if (threadIdx.x == 0) {
      Sequence const sequence = read_sequence(params, coord.batch, floors);
      TileRange keys = key_range<Traits::kBlockM, Traits::kBlockN>(sequence, coord.m_block);
      if (coord.m_block * Traits::kBlockM >= sequence.len_q) keys.end = keys.begin;  // rows that are not used
      float slope = 0.f;
      if (Traits::kVariant.modifies_scores && coord.batch < params.batch) {
        slope = head_slope(params.score, coord.batch, coord.head);
      }
      int const head_kv = coord.head / (params.heads_q / params.heads_kv);
      auto const first_key = [&](void const* base, Strides const& strides) {
        return static_cast<typename Traits::Element const*>(base) + coord.batch * strides.batch +
               head_kv * strides.head + sequence.first_key * strides.row;
      };
      tile = {.coord = coord,
              .sequence = sequence,
              .keys = keys,
              .k = first_key(params.k, params.k_strides),
              .v = first_key(params.v, params.v_strides),
              .zero = 0,
              .slope = slope};
    }
  }
  __syncthreads();
}

}  // namespace flash_cute::sm80::forward
