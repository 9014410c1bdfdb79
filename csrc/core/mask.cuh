// The mask: a row sees a band of columns between two diagonals; no mask, a causal mask and a window are cases of it.
// Four functions define the band; tile ranges, which tiles need masking, and the masking itself follow from them.
#pragma once

#include <climits>

#include <cute/tensor.hpp>

#include "contract/params.h"

namespace flash_cute {

using namespace cute;

// Row i sees the columns [first_column, column_limit). The range may be empty, and the limit negative.
template <class Params>
CUTE_HOST_DEVICE int first_column(Params const& params, int row) {
  return max(0, row + params.band.lower);
}
template <class Params>
CUTE_HOST_DEVICE int column_limit(Params const& params, int row) {
  return min(params.len_k, row + params.band.upper + 1);
}

// The inverse: the rows [first_row, row_limit) see a column. The range may be empty, and the limit exceed len_q.
template <class Params>
CUTE_HOST_DEVICE int first_row(Params const& params, int column) {
  return max(0, column - params.band.upper);
}
template <class Params>
CUTE_HOST_DEVICE int row_limit(Params const& params, int column) {
  return column - params.band.lower + 1;
}

// Tells a row that sees no key (out 0) from one whose scores are all -inf (out NaN).
template <class Params>
CUTE_HOST_DEVICE bool row_sees_a_key(Params const& params, int row) {
  return first_column(params, row) < column_limit(params, row);
}

// Whether an edge of the band crosses a tile: some row of it does not see some column. `offset`: the tile's first row
// minus its first column. The end of the keys (len_k) is not checked here.
template <int kRows, int kColumns, class Params>
CUTE_HOST_DEVICE bool crosses_band(Params const& params, int offset) {
  return offset + params.band.upper < kColumns - 1 || offset + kRows - 1 + params.band.lower > 0;
}

// The tiles [begin, end). Those in [whole_begin, whole_end) need no mask: every row sees every column.
struct TileRange {
  int begin;
  int whole_begin;
  int whole_end;
  int end;

  // If no tile is whole, whole_begin == whole_end == begin, so that a loop from the last tile down masks all of them.
  CUTE_HOST_DEVICE static TileRange make(int begin, int whole_begin, int whole_end, int end) {
    end = max(begin, end);
    whole_begin = max(begin, whole_begin);
    whole_end = min(end, whole_end);
    bool const some = whole_begin < whole_end;
    return {begin, some ? whole_begin : begin, some ? whole_end : begin, end};
  }

  CUTE_HOST_DEVICE bool needs_mask(int tile) const {
    return unsigned(tile - whole_begin) >= unsigned(whole_end - whole_begin);
  }
};

// The key tiles that row tile `m_block` of `block_m` rows visits; none begins at or past len_k.
template <int kBlockN, class Params>
CUTE_HOST_DEVICE TileRange key_range(Params const& params, int m_block, int block_m) {
  int const first = m_block * block_m;
  int const last = min(first + block_m, params.len_q) - 1;
  return TileRange::make(first_column(params, first) / kBlockN, ceil_div(first_column(params, last), kBlockN),
                         max(0, column_limit(params, first)) / kBlockN,
                         ceil_div(max(0, column_limit(params, last)), kBlockN));
}

template <int kBlockM, int kBlockN, class Params>
CUTE_HOST_DEVICE TileRange key_range(Params const& params, int m_block) {
  return key_range<kBlockN>(params, m_block, kBlockM);
}

// Backward: the row tiles that a key tile visits. A key tile that reaches past len_k is masked at every row tile.
template <int kBlockM, int kBlockN, class Params>
CUTE_HOST_DEVICE TileRange row_range(Params const& params, int n_block) {
  int const first = n_block * kBlockN;
  int const last = min(first + kBlockN, params.len_k) - 1;
  int const rows = max(0, min(params.len_q, row_limit(params, last)));
  int const end = ceil_div(rows, kBlockM);
  bool const tail = first + kBlockN > params.len_k;
  // Rows past len_q need no mask: their lse_log2 is +inf, so that P = 0.
  int const whole_rows = row_limit(params, first) >= params.len_q ? end * kBlockM : max(0, row_limit(params, first));
  return TileRange::make(min(end, first_row(params, first) / kBlockM), ceil_div(first_row(params, last), kBlockM),
                         tail ? 0 : whole_rows / kBlockM, end);
}

// Backward: the key tiles [begin, end) whose row_range contains a row tile. Rows of the tile past len_q count too,
// since row_range works on whole row tiles.
struct KeyTiles {
  int begin;
  int end;
};
template <int kBlockM, int kBlockN, class Params>
CUTE_HOST_DEVICE KeyTiles visiting_key_tiles(Params const& params, int m_block) {
  int const first = first_column(params, m_block * kBlockM);
  int const limit = max(0, column_limit(params, (m_block + 1) * kBlockM - 1));
  int const end = first < params.len_k ? ceil_div(limit, kBlockN) : 0;
  return {min(end, first / kBlockN), end};
}

// A bit mask over a thread's elements of one row (transposed: one column) of scores. Their coordinates, relative to the
// thread's first, come in pairs kPeriod apart: 0, 1, kPeriod, kPeriod + 1, ...
template <int kSize, int kPeriod>
struct ElementBits {
  static_assert(kPeriod >= 8 && (kPeriod & (kPeriod - 1)) == 0);
  static constexpr int kWords = (kSize + 31) / 32;
  static constexpr int kShift = __builtin_ctz(kPeriod);

  // The number of elements below a coordinate, were the pattern to continue in both directions (so it may be negative).
  CUTE_DEVICE static int below(int coordinate) {
    return (coordinate >> kShift) * 2 + min(coordinate & (kPeriod - 1), 2);
  }

  // The elements [begin, end) as bits of word kWord, which holds elements 32 * kWord to 32 * kWord + 31.
  template <int kWord>
  CUTE_DEVICE static uint32_t word(int begin, int end) {
    auto const low_bits = [](int count) { return __funnelshift_lc(~0u, 0u, unsigned(max(0, count - 32 * kWord))); };
    return low_bits(end) & ~low_bits(begin);
  }
};

// Sets the scores of one row to -inf whose bit in word kWord of ElementBits, `kept`, is 0. The compiler moves the bits
// to predicates eight at a time (R2P).
template <int kWord, class Scores>
CUTE_DEVICE void keep_elements(Scores&& row, uint32_t kept) {  // (elements)
  constexpr int kSize = decltype(size(row))::value;
  CUTE_UNROLL
  for (int j = 32 * kWord; j < cute::min(kSize, 32 * kWord + 32); ++j) {
    if (!(kept & (1u << (j % 32)))) row(j) = -INFINITY;
  }
}

// Sets the scores of one row outside [begin, end), relative to the thread's first element, to -inf. It costs one
// comparison per edge and row, and one bit per element.
template <int kPeriod, class Scores>
CUTE_DEVICE void keep_range(Scores&& row, int begin, int end) {  // (elements)
  constexpr int kSize = decltype(size(row))::value;
  using Bits = ElementBits<kSize, kPeriod>;
  int const bits_begin = Bits::below(begin), bits_end = Bits::below(end);
  for_each(make_int_sequence<Bits::kWords>{}, [&](auto word) __attribute__((always_inline)) {
    keep_elements<word>(row, Bits::template word<word>(bits_begin, bits_end));
  });
}

// The coordinate of element j along the second mode, for thread 0, whose coordinates are static.
template <class Coords0, int j>
constexpr int kCoordinate = decltype(get<1>(std::declval<Coords0>()(_0{}, Int<j>{})))::value;

// The distance between a thread's pairs of elements, see ElementBits.
template <class Coords0>
constexpr int element_period() {
  constexpr int kSize = decltype(size<1>(std::declval<Coords0>()))::value;
  constexpr int kPeriod = kCoordinate<Coords0, 2>;
  static_assert(kSize >= 4 && kSize % 2 == 0);
  static_assert(kCoordinate<Coords0, 0> == 0 && kCoordinate<Coords0, 1> == 1);
  static_assert(kCoordinate<Coords0, kSize - 1> == kPeriod * (kSize / 2 - 1) + 1);
  return kPeriod;
}

// Sets the scores of one tile outside the band to -inf. `offset`: the tile's first row minus its first column;
// `columns`: the tile's columns below len_k.
template <class Scores, class Coords, class Coords0, class Params>
CUTE_DEVICE void apply_mask(Scores& scores,             // (rows, columns)
                            Coords const& tScS,         // (rows, columns) -> (row, column)
                            Coords0 const& /*tScS_0*/,  // the same for thread 0, static
                            Params const& params, int offset, int columns) {
  constexpr int kPeriod = element_period<Coords0>();
  int const thread_column = get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const row = offset + get<0>(tScS(i, _0{}));
    keep_range<kPeriod>(scores(i, _), row + params.band.lower - thread_column,
                        min(columns, row + params.band.upper + 1) - thread_column);
  }
}

// The same for a transposed tile: tScS holds (column, row).
template <class Scores, class Coords, class Coords0, class Params>
CUTE_DEVICE void apply_mask_transposed(Scores& scores,         // (columns, rows)
                                       Coords const& tScS,     // (columns, rows) -> (column, row)
                                       Coords0 const& /*tScS_0*/,  // the same for thread 0, static
                                       Params const& params, int tile_row, int tile_column) {
  constexpr int kPeriod = element_period<Coords0>();
  int const thread_row = tile_row + get<1>(tScS(_0{}, _0{}));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int const column = tile_column + get<0>(tScS(i, _0{}));
    int const limit = column < params.len_k ? row_limit(params, column) : 0;
    keep_range<kPeriod>(scores(i, _), first_row(params, column) - thread_row, limit - thread_row);
  }
}

}  // namespace flash_cute
