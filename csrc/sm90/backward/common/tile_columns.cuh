// What a mask says of a tile's columns, see contract/tile_mask.h.
#pragma once

#include <cute/tensor.hpp>

#include "contract/params.h"
#include "core/bits_mask.cuh"
#include "core/interval_mask.cuh"

namespace flash_cute::sm90::backward {

using namespace cute;

// Of the tile's first column. One of intervals has the same as the second: a branch would cost more registers than it
// saves loads.
struct TileColumns {
  RowBits const* first;   // the first intervals, or the bits of the tile's first 64 rows
  RowBits const* second;  // the second ones, or those of the next 64
  bool are_bits;

  // Of a row tile. `first` and `second`: of row tile 0; those of bits are the same.
  template <int kBlockM>
  CUTE_DEVICE static TileColumns of_rows(BwdParams const& params, RowBits const* first, RowBits const* second,
                                         int m_block) {
    TileMask const& mask = params.mask;
    bool const are_bits = mask.bits != nullptr;
    if (are_bits) {
      constexpr int kBlocks = kBlockM / kBitRows;  // of rows
      static_assert(kBlockM == kBitRows || kBlockM == 2 * kBitRows);
      first += kBlocks * m_block * mask.bits_block_stride;
      second = first;
      if constexpr (kBlocks == 2) {  // past the last block there is no memory, and no row that matters
        if ((2 * m_block + 1) * kBitRows < params.len_q) second += mask.bits_block_stride;
      }
    }
    return {first, second, are_bits};
  }

  CUTE_DEVICE static RowInterval as_interval(uint2 const& words) {
    return {.first = static_cast<int>(words.x), .limit = static_cast<int>(words.y)};
  }
  CUTE_DEVICE static uint2 read(RowBits const* address) { return __ldg(reinterpret_cast<uint2 const*>(address)); }

  // Of two neighbouring columns, of which the first one's number is even.
  CUTE_DEVICE static IntervalPair read_pair(RowBits const* address) {
    int4 const four = __ldg(reinterpret_cast<int4 const*>(address));
    return {.of = {{.first = four.x, .limit = four.y}, {.first = four.z, .limit = four.w}}};
  }
};

// Sets the scores of a transposed tile that the mask hides to -inf: tScS holds (column, row).
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_columns_transposed(Scores& scores,             // (columns, rows)
                                          Coords const& tScS,         // (columns, rows) -> (column, row)
                                          Coords0 const& /*tScS_0*/,  // the same for thread 0, static
                                          TileColumns const& tile, int tile_row) {
  constexpr int kSize = decltype(size<1>(scores))::value, kPeriod = element_period<Coords0>();
  using Range = ElementBits<kSize, kPeriod>;
  using Shown = ShownElements<kSize, kPeriod>;
  static_assert(Range::kWords == 1);
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const column = get<0>(tScS(i, _0{}));
    uint2 const first = TileColumns::read(tile.first + column), second = TileColumns::read(tile.second + column);
    int const thread_row = get<1>(tScS(_0{}, _0{}));
    uint32_t kept;
    if (tile.are_bits) {
      if constexpr (Shown::kRowWords == 2) {
        kept = Shown::template word<0>({first.x, first.y}, thread_row);
      } else {
        kept = Shown::template word<0>({first.x, first.y, second.x, second.y}, thread_row);
      }
    } else {
      auto const range = [&](RowInterval const& rows) {
        return Range::template word<0>(Range::below(rows.first - tile_row - thread_row),
                                       Range::below(rows.limit - tile_row - thread_row));
      };
      kept = range(TileColumns::as_interval(first)) | range(TileColumns::as_interval(second));
    }
    keep_elements<0>(scores(i, _), kept);
  }
}

// The same of a tile whose threads have few rows, and columns in pairs; of intervals.
template <class Scores, class Coords, class Coords0>
CUTE_DEVICE void apply_intervals(Scores& scores,         // (rows, columns)
                                 Coords const& tScS,     // (rows, columns) -> (row, column)
                                 Coords0 const& tScS_0,  // the same for thread 0, static
                                 TileColumns const& tile, int tile_row) {
  static_assert(element_period<Coords0>() >= 8);
  int const first_row = tile_row + get<0>(tScS(_0{}, _0{}));
  int const first_column = get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int j = 0; j < size<1>(scores); j += 2) {
    int const column = first_column + get<1>(tScS_0(_0{}, j));
    IntervalPair const pair = TileColumns::read_pair(tile.first + column);
    IntervalPair const second = TileColumns::read_pair(tile.second + column);
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
