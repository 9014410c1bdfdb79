// The row tiles that see a key tile, by the lists of a mask, see contract/tile_mask.h.
#pragma once

#include <cute/tensor.hpp>

#include "contract/params.h"
#include "core/mask_columns.cuh"
#include "core/tile_bits.cuh"

namespace flash_cute::sm90::backward {

// The last bit below `end` that is set; -1: there is none in the words from `first_word` on. `read(i)`: word i.
template <class ReadWord>
CUTE_DEVICE int last_bit_below(ReadWord const& read, int first_word, int end) {
  uint32_t below = ~0u >> (-end & 31);  // of the last word
#pragma unroll 1
  for (int word = (end - 1) >> 5; word >= first_word; --word, below = ~0u) {
    uint32_t const bits = read(word) & below;
    if (bits != 0) return 32 * word + 31 - __clz(bits);
  }
  return -1;
}

// How many of the bits below `end` are set.
CUTE_DEVICE int bits_below(uint32_t const* words, int end) {
  int number = 0;
#pragma unroll 1
  for (int word = 0; word < end >> 5; ++word) number += __popc(words[word]);
  return (end & 31) == 0 ? number : number + __popc(words[end >> 5] << (-end & 31));
}

// Of a key tile, in shared memory beside it. Its row tiles are visited from the last to the first, all query heads of
// the group at each of them.
struct MaskedRows {
  uint32_t const* visited;            // a bit for each row tile: it has a row that sees one of the keys
  uint32_t const* whole;              // every row sees every key
  RowBits const* columns;             // the first intervals of the keys, or the bits of the first 64 rows
  RowBits const* second_columns;      // the second ones, or where columns have one the same; of bits as columns
  int first_word;                     // of `visited` that is not 0

  // The last row tile below number `end` that visits the key tile; -1: there is none.
  template <class Tile>
  CUTE_DEVICE static int last_row_tile_below(Tile& tile, int end) {
    uint32_t const* const visited = tile.visited;
    return last_bit_below([&](int word) { return visited[word]; }, tile.first_word, end);
  }

  // Of the key tile whose number, head, batch and `begin` are set. Sets its first row tile and its end.
  template <class Traits, class Tile>
  CUTE_DEVICE static void find(BwdParams const& params, Tile volatile& tile) {
    TileMask const& mask = params.mask;
    int64_t const list = tile.batch * mask.key_list_batch_stride + tile.head_kv * mask.key_list_head_stride +
                         int64_t{tile.n_block} * mask.of_keys.words;
    uint32_t const* const visited = mask.of_keys.visited + list;
    tile.visited = visited;
    tile.whole = mask.of_keys.whole + list;
    RowBits const* const columns = columns_of_head(mask, tile.batch, tile.head_kv) + tile.n_block * Traits::kBlockN;
    tile.columns = columns;
    tile.second_columns = columns + (mask.intervals_per_column > 1 ? mask.interval_stride : 0);
    int number = 0, first_word = 0;
#pragma unroll 1
    for (int word = mask.of_keys.words - 1; word >= 0; --word) {
      uint32_t const bits = visited[word];
      number += __popc(bits);
      if (bits != 0) first_word = word;
    }
    tile.first_word = first_word;
    tile.first.m_block = last_row_tile_below(tile, 32 * mask.of_keys.words);
    tile.first.head = 0;
    tile.last_row_tile = -1;
    tile.end = tile.begin + params.heads_per_kv * number;
  }
};

// A step's row tile, as the producer, which alone follows the lists, tells the other threads.
struct alignas(16) RowVisit {
  int m_block;
  int head;     // of the group
  bool masked;  // some row does not see some key
  bool stores;  // the adding thread's: its dQ is the first of the row tile's sums

  template <class Tile, class RowTile>
  CUTE_DEVICE static void make(Tile const volatile& tile, RowTile const& row_tile, RowVisit volatile& visit) {
    visit.m_block = row_tile.m_block;
    visit.head = row_tile.head;
    visit.masked = !is_set(tile.whole, row_tile.m_block);
  }
};

// The last steps' row tiles. The producer writes that of step i once all consumers have done step i - 2. They have
// stored dQ of step i - 4 by then, after the adding threads had read that of step i - 6 from shared memory.
struct RowVisits {
  static constexpr int kSteps = 8;
  RowVisit visits[kSteps];

  CUTE_DEVICE RowVisit volatile& at(int step) { return visits[step % kSteps]; }
};

}  // namespace flash_cute::sm90::backward
