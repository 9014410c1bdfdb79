// A head's mask, see contract/tile_mask.h, read from global memory element by element: for kernels whose products take
// so much longer that this costs nothing.
#pragma once

#include <cute/tensor.hpp>

#include "contract/params.h"
#include "interval_mask.cuh"
#include "mask.cuh"
#include "tile_bits.cuh"

namespace flash_cute {

CUTE_DEVICE bool has_mask(TileMask const& mask) { return mask.of_rows.visited != nullptr; }

class HeadMask {
 public:
  CUTE_DEVICE HeadMask(TileMask const& mask, int batch, int head_kv, int len_q, int len_k)
      : mask_(mask),
        intervals_(batch * mask.batch_stride + head_kv * mask.head_stride),
        bits_(batch * mask.bits_batch_stride + head_kv * mask.bits_head_stride),
        row_lists_(batch * mask.row_list_batch_stride + head_kv * mask.row_list_head_stride),
        key_lists_(batch * mask.key_list_batch_stride + head_kv * mask.key_list_head_stride),
        len_q_(len_q),
        len_k_(len_k) {}

  // Rows from len_q on see nothing, and nothing sees columns from len_k on.
  CUTE_DEVICE bool sees(int row, int column) const {
    if (row >= len_q_ || column >= len_k_) return false;
    if (mask_.bits != nullptr) {
      RowBits const bits = __ldg(mask_.bits + bits_ + row / kBitRows * mask_.bits_block_stride + column);
      return bits >> row % kBitRows & 1;
    }
    for (int n = 0; n < mask_.intervals_per_column; ++n) {
      if (contains(read_interval(mask_.intervals + intervals_ + n * mask_.interval_stride + column), row)) return true;
    }
    return false;
  }

  // The list of a row unit, whose bits are key tiles; of a key tile, whose bits are row units.
  CUTE_DEVICE uint32_t const* key_tiles_of(int row_unit) const {
    return mask_.of_rows.visited + row_lists_ + int64_t{row_unit} * mask_.of_rows.words;
  }
  CUTE_DEVICE uint32_t const* row_units_of(int key_tile) const {
    return mask_.of_keys.visited + key_lists_ + int64_t{key_tile} * mask_.of_keys.words;
  }

 private:
  TileMask const& mask_;
  int64_t intervals_, bits_, row_lists_, key_lists_;  // where the head's begin
  int len_q_;
  int len_k_;
};

// From the first number of a list to the last one, in tiles of `numbers` of them, all of which need the mask.
CUTE_DEVICE TileRange listed_range(uint32_t const* list, int words, int numbers) {
  int const last = last_set_before(list, 32 * words);
  if (last < 0) return {0, 0, 0, 0};
  int const begin = first_set_from(list, 0) / numbers;
  return {begin, begin, begin, last / numbers + 1};
}

// Which of a thread's scores the mask lets through, as bits. Found before the scores, it needs one register beside
// them. `column_mode`: of the coordinates, 1, or of a transposed tile 0.
template <int column_mode, class Coords>
CUTE_DEVICE uint32_t seen_bits(Coords const& tScS,  // (rows, columns) -> (row, column), or transposed
                               HeadMask const& mask, int tile_row, int tile_column) {
  constexpr int kSize = decltype(size(tScS))::value;
  static_assert(kSize <= 32);
  uint32_t seen = 0;
#pragma unroll 1  // unrolled, it would need more registers than there are
  for (int i = 0; i < kSize; ++i) {
    auto const at = tScS(i);
    seen |= uint32_t{mask.sees(tile_row + get<1 - column_mode>(at), tile_column + get<column_mode>(at))} << i;
  }
  return seen;
}

// Sets the others to `hidden`: scores to -inf, weights to 0.
template <class Scores>
CUTE_DEVICE void keep_seen(Scores& scores, uint32_t seen, float hidden) {
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) {
    if (!(seen >> i & 1)) scores(i) = hidden;
  }
}

}  // namespace flash_cute
