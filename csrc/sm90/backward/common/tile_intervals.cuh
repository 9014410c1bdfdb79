// A mask by intervals: of each column the rows that see it, see contract/tile_mask.h.
#pragma once

#include <cute/tensor.hpp>

#include "contract/tile_mask.h"
#include "core/interval_mask.cuh"

namespace flash_cute::sm90::backward {

using namespace cute;

// The intervals of a tile's columns.
struct TileIntervals {
  RowInterval const* first;   // of the tile's first column
  RowInterval const* second;  // the same where columns have one: a branch would cost more registers than it saves loads

  CUTE_DEVICE RowInterval at(int column) const { return read(first + column); }
  CUTE_DEVICE RowInterval second_at(int column) const { return read(second + column); }

  // Of two neighbouring columns, of which the first one's number is even.
  CUTE_DEVICE static IntervalPair read_pair(RowInterval const* address) {
    int4 const four = __ldg(reinterpret_cast<int4 const*>(address));
    return {.of = {{.first = four.x, .limit = four.y}, {.first = four.z, .limit = four.w}}};
  }

 private:
  CUTE_DEVICE static RowInterval read(RowInterval const* address) {
    int2 const both = __ldg(reinterpret_cast<int2 const*>(address));
    return {.first = both.x, .limit = both.y};
  }
};

// Sets the scores of a transposed tile that its columns' intervals do not have to -inf: tScS holds (column, row).
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_intervals_transposed(Scores& scores,             // (columns, rows)
                                            Coords const& tScS,         // (columns, rows) -> (column, row)
                                            Coords0 const& /*tScS_0*/,  // the same for thread 0, static
                                            TileIntervals const& tile, int tile_row) {
  constexpr int kPeriod = element_period<Coords0>();
  int const thread_row = tile_row + get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const column = get<0>(tScS(i, _0{}));
    RowInterval const first = tile.at(column), second = tile.second_at(column);
    keep_ranges<kPeriod>(scores(i, _), first.first - thread_row, first.limit - thread_row, second.first - thread_row,
                         second.limit - thread_row);
  }
}

// The same of a tile whose threads have few rows, and columns in pairs.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_intervals(Scores& scores,           // (rows, columns)
                                 Coords const& tScS,       // (rows, columns) -> (row, column)
                                 Coords0 const& tScS_0,    // the same for thread 0, static
                                 TileIntervals const& tile, int tile_row) {
  static_assert(element_period<Coords0>() >= 8);
  int const first_row = tile_row + get<0>(tScS(_0{}, _0{}));
  int const first_column = get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int j = 0; j < size<1>(scores); j += 2) {
    int const column = first_column + get<1>(tScS_0(_0{}, j));
    IntervalPair const pair = TileIntervals::read_pair(tile.first + column);
    IntervalPair const second = TileIntervals::read_pair(tile.second + column);
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      int const row = first_row + get<0>(tScS_0(i, _0{}));
      CUTE_UNROLL
      for (int k = 0; k < 2; ++k) {
        if (!contains(pair.of[k], row) && !contains(second.of[k], row)) scores(i, j + k) = -INFINITY;
      }
    }
  }
}

}  // namespace flash_cute::sm90::backward
