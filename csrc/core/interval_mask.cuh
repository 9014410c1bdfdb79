// The mask by intervals of rows per column, applied to the scores of a tile.
#pragma once

#include <cute/tensor.hpp>

#include "contract/tile_mask.h"
#include "mask.cuh"

namespace flash_cute {

CUTE_DEVICE bool contains(RowInterval const& interval, int row) {
  return unsigned(row - interval.first) < unsigned(interval.limit - interval.first);
}

// Two neighbouring columns' intervals, 16 bytes.
struct alignas(16) IntervalPair {
  RowInterval of[2];
};

template <int kIntervals, int kColumns, class Scores, class Coords0>
CUTE_DEVICE void hide_scores(Scores& scores,                          // (rows, columns)
                             Coords0 const& tScS_0, int first_row, RowInterval const* intervals) {
  CUTE_UNROLL
  for (int j = 0; j < size<1>(scores); j += 2) {
    IntervalPair pairs[kIntervals];
    CUTE_UNROLL
    for (int n = 0; n < kIntervals; ++n) {
      pairs[n] = *reinterpret_cast<IntervalPair const*>(intervals + n * kColumns + get<1>(tScS_0(_0{}, j)));
    }
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      int const row = first_row + get<0>(tScS_0(i, _0{}));
      CUTE_UNROLL
      for (int k = 0; k < 2; ++k) {
        bool seen = contains(pairs[0].of[k], row);
        if constexpr (kIntervals == 2) seen |= contains(pairs[1].of[k], row);
        if (!seen) scores(i, j + k) = -INFINITY;
      }
    }
  }
}

// Sets the scores that the mask hides to -inf. `intervals`: those of the tile's columns in shared memory, (interval,
// kColumns), of which a column has one or two. Three instructions per score and interval.
template <int kColumns, class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_interval_mask(Scores& scores,         // (rows, columns)
                                     Coords const& tScS,     // (rows, columns) -> (row, column)
                                     Coords0 const& tScS_0,  // the same for thread 0, static
                                     int tile_row, RowInterval const* intervals, int intervals_per_column) {
  static_assert(element_period<Coords0>() >= 8);  // a thread's columns come in pairs
  int const first_row = tile_row + get<0>(tScS(_0{}, _0{}));
  intervals += get<1>(tScS(_0{}, _0{}));
  if (intervals_per_column == 1) {
    hide_scores<1, kColumns>(scores, tScS_0, first_row, intervals);
  } else {
    hide_scores<2, kColumns>(scores, tScS_0, first_row, intervals);
  }
}

// As keep_range, with two ranges.
template <int kPeriod, class Scores>
CUTE_DEVICE void keep_ranges(Scores&& row, int begin, int end, int second_begin, int second_end) {  // (elements)
  using Bits = ElementBits<decltype(size(row))::value, kPeriod>;
  int const bits_begin = Bits::below(begin), bits_end = Bits::below(end);
  int const second_bits_begin = Bits::below(second_begin), second_bits_end = Bits::below(second_end);
  for_each(make_int_sequence<Bits::kWords>{}, [&](auto word) __attribute__((always_inline)) {
    keep_elements<word>(row, Bits::template word<word>(bits_begin, bits_end) |
                                 Bits::template word<word>(second_bits_begin, second_bits_end));
  });
}

CUTE_DEVICE RowInterval read_interval(RowInterval const* interval) {
  int2 const ends = __ldg(reinterpret_cast<int2 const*>(interval));
  return {ends.x, ends.y};
}

// The same for a transposed tile, whose scores are (columns, rows), by bits as in apply_mask_transposed. `intervals`:
// in global memory.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_interval_mask_transposed(Scores& scores,     // (columns, rows)
                                                Coords const& tScS,  // (columns, rows) -> (column, row)
                                                Coords0 const&,      // the same for thread 0, static
                                                int tile_row, RowInterval const* intervals, int intervals_per_column,
                                                int64_t interval_stride) {
  constexpr int kPeriod = element_period<Coords0>();
  int const thread_row = tile_row + get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const column = get<0>(tScS(i, _0{}));
    RowInterval const interval = read_interval(intervals + column);
    if (intervals_per_column == 1) {
      keep_range<kPeriod>(scores(i, _), interval.first - thread_row, interval.limit - thread_row);
    } else {
      RowInterval const second = read_interval(intervals + interval_stride + column);
      keep_ranges<kPeriod>(scores(i, _), interval.first - thread_row, interval.limit - thread_row,
                           second.first - thread_row, second.limit - thread_row);
    }
  }
}

}  // namespace flash_cute
