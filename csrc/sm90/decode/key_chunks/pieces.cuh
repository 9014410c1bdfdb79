// The row tiles that would fill no whole wave are cut: their chunks, one tile after the other, are dealt to the CTAs in
// equal ranges. A tile that crosses from one range to the next is folded by one CTA after the other, from the first
// chunk to the last, so that no bit depends on where it is cut. A CTA begins with the tile that its range ends in, and
// ends with the one that its range begins in, which the CTA before it has begun long ago. A tile that is longer than a
// range crosses several CTAs: each has its piece a whole tile later than the one before.
#pragma once

#include "schedule.cuh"

namespace flash_cute::sm90::decode::key_chunks {

// The number of chunks of a tile of the first 32 sequences.
template <class Traits>
CUTE_DEVICE int chunks_of_number(Sequences32<Traits> const& sequences, int number) {
  int which = 0;  // the sequence that has it: the last one that begins at or before it, since those of none are empty
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) {
    if (sequences.begin(which + step) <= number) which += step;
  }
  Sequence const sequence = sequences.read(which);
  RowTileCoord const coord = sequences.coord(sequence, number - sequences.begin(which));
  return chunks_of<Traits>(sequences.range(sequence, coord.m_block)).count;
}

// By a warp, before any warp gives registers away.
template <class Traits>
CUTE_DEVICE void find_pieces(Params const& params, typename Traits::SharedStorage& smem) {
  constexpr unsigned kAll = forward::kAllLanes;
  int const lane = threadIdx.x % 32, ctas = gridDim.x;
  Pieces volatile& pieces = smem.pieces;
  if (lane == 0) {
    pieces.cut = 0;
    pieces.first = 0;
    pieces.last = -1;  // none
  }
  __syncwarp();
  Sequences32<Traits> sequences(params, smem);
  sequences.next();
  int const of_first = sequences.end();
#pragma unroll 1
  while (sequences.next()) continue;
  int const waves = sequences.end() / ctas, cut = min(sequences.end() % ctas, of_first);
  if (waves == 0 || cut == 0) return;
  sequences.restart();
  sequences.next();
  int sum = 0, most = 0;
#pragma unroll 1
  for (int number = lane; number < cut; number += 32) {
    int const chunks = chunks_of_number<Traits>(sequences, number);
    sum += chunks;
    most = max(most, chunks);
  }
  sum = __reduce_add_sync(kAll, sum);
  most = __reduce_max_sync(kAll, most);
  int const size = max(ceil_div(sum, ctas), ceil_div(most, waves + 1));  // of a range
  int const begin = int(blockIdx.x) * size, end = min(sum, begin + size);
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < cut; first += 32) {
    int const number = first + lane, chunks = number < cut ? chunks_of_number<Traits>(sequences, number) : 0;
    int const tile_end = before + inclusive_warp_sum(chunks), tile_begin = tile_end - chunks;
    if (begin < end && tile_begin <= begin && begin < tile_end) {
      pieces.first = number;
      pieces.begin = begin - tile_begin;
      pieces.slot = int(blockIdx.x) - tile_begin / size;
    }
    if (begin < end && tile_begin < end && end <= tile_end) {
      pieces.last = number;
      pieces.end = end - tile_begin;
    }
    before = __shfl_sync(kAll, tile_end, 31);
  }
  if (lane == 0) pieces.cut = cut;
}

}  // namespace flash_cute::sm90::decode::key_chunks
