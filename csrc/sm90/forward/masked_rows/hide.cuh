// A mask by intervals, applied to a tile's scores.
#pragma once

#include <cute/tensor.hpp>

#include "contract/tile_mask.h"

namespace flash_cute::sm90::forward::masked_rows {

using namespace cute;

CUTE_DEVICE bool contains(RowInterval const& rows, int row) {
  return unsigned(row - rows.first) < unsigned(rows.limit - rows.first);
}

// Two neighbouring columns'.
struct alignas(16) IntervalPair {
  RowInterval of[2];
};

template <int kIntervals, class Scores, class Coords0, int kColumns>
CUTE_DEVICE void hide_scores(Scores& scores,                // (rows, columns)
                             Coords0 const& /*tScS_0*/,     // (rows, columns) -> (row, column) of thread 0, static
                             RowInterval const (&intervals)[kMaxIntervals][kColumns], int thread_row,
                             int thread_column) {
  CUTE_UNROLL
  for (int j = 0; j < size<1>(scores); j += 2) {
    IntervalPair pairs[kIntervals];
    CUTE_UNROLL
    for (int n = 0; n < kIntervals; ++n) {
      pairs[n] = *reinterpret_cast<IntervalPair const*>(&intervals[n][thread_column + 4 * j]);
    }
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        bool sees = contains(pairs[0].of[c], thread_row + 8 * i);
        if constexpr (kIntervals == 2) sees |= contains(pairs[1].of[c], thread_row + 8 * i);
        if (!sees) scores(i, j + c) = -INFINITY;
      }
    }
  }
}

}  // namespace flash_cute::sm90::forward::masked_rows
