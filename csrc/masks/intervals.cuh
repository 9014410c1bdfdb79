// The rows that see a column: the caller's intervals, clamped, ANDed with the band, sorted and merged; and the row
// units that these touch or cover.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "params.h"

namespace flash_cute::masks {

CUTE_HOST_DEVICE bool is_empty(RowInterval const& rows) { return rows.first >= rows.limit; }

CUTE_HOST_DEVICE RowInterval both(RowInterval const& a, RowInterval const& b) {
  RowInterval const rows{cute::max(a.first, b.first), cute::min(a.limit, b.limit)};
  return is_empty(rows) ? RowInterval{0, 0} : rows;
}

// [first, limit) of a length, of 64-bit ends.
CUTE_HOST_DEVICE RowInterval clamped(int64_t first, int64_t limit, int length) {
  auto const clamp = [&](int64_t row) {
    return static_cast<int>(cute::max(int64_t{0}, cute::min(row, int64_t{length})));
  };
  return {clamp(first), clamp(limit)};
}

// The rows of a dense batch whose band has a column.
CUTE_HOST_DEVICE RowInterval band_rows(Band const& band, int len_q, int column) {
  return clamped(band.has_upper() ? int64_t{column} - band.upper : 0,
                 band.has_lower() ? int64_t{column} - band.lower + 1 : len_q, len_q);
}

// The last of `count` + 1 ascending offsets, [0] at most `column`, that is not above it.
CUTE_HOST_DEVICE int sequence_of(int const* offsets, int count, int column) {
  int low = 0, high = count + 1;  // offsets[low] <= column < offsets[high], were there one more
  while (high - low > 1) {
    int const middle = low + (high - low) / 2;
    (offsets[middle] <= column ? low : high) = middle;
  }
  return low;
}

// The same rows of a packed call, whose sequences have a window each. Offsets that do not ascend give some rows of the
// tensor.
CUTE_HOST_DEVICE RowInterval sequence_rows(Params const& params, int column) {
  Sequences const& all = params.sequences;
  if (params.sequence_count == 0 || column < all.cu_k[0]) return {0, 0};
  int const index = sequence_of(all.cu_k, params.sequence_count, column);
  if (index == params.sequence_count) return {0, 0};  // behind the last sequence
  RowInterval const rows = clamped(all.cu_q[index], all.cu_q[index + 1], params.len_q);
  RowInterval const keys = clamped(all.cu_k[index], all.cu_k[index + 1], params.len_k);
  int64_t const shift = all.bottom_right ? int64_t{keys.limit - keys.first} - (rows.limit - rows.first) : 0;
  int64_t const diagonal = rows.first + int64_t{column} - keys.first - shift;  // the row whose position is the column's
  RowInterval const window = clamped(all.window_right < kNoLimit ? diagonal - all.window_right : 0,
                                     all.window_left < kNoLimit ? diagonal + all.window_left + 1 : params.len_q,
                                     params.len_q);
  return both(rows, window);
}

CUTE_HOST_DEVICE RowInterval given_rows(Params const& params, int n, int batch, int head, int column) {
  auto const read = [&](ColumnTensor const& tensor) {
    return tensor.data[batch * tensor.batch_stride + head * tensor.head_stride + column * tensor.column_stride];
  };
  return {read(params.given.first_row[n]), read(params.given.row_limit[n])};
}

struct ColumnRows {
  RowInterval of[kMaxIntervals];  // in order, apart; where there is only one, it is the first
};

CUTE_HOST_DEVICE ColumnRows column_rows(Params const& params, int batch, int head, int column) {
  ColumnRows rows{};
  if (column >= params.len_k) return rows;
  RowInterval const band = params.sequences.cu_q == nullptr ? band_rows(params.band, params.len_q, column)
                                                            : sequence_rows(params, column);
  RowInterval& first = rows.of[0];
  RowInterval& second = rows.of[1];
  first = both(band, given_rows(params, 0, batch, head, column));
  if (params.given.first_row[1].data == nullptr) return rows;
  second = both(band, given_rows(params, 1, batch, head, column));
  bool const swapped = is_empty(first) || (!is_empty(second) && second.first < first.first);
  if (swapped) rows = {{second, first}};
  if (!is_empty(second) && second.first <= first.limit) {
    first.limit = cute::max(first.limit, second.limit);
    second = {0, 0};
  }
  return rows;
}

// Row units [begin, end).
struct UnitSpan {
  int begin;
  int end;

  // As bits of word `word` of a list.
  CUTE_HOST_DEVICE uint32_t bits(int word) const {
    auto const low_bits = [&](int unit) {
      int const count = cute::max(0, cute::min(unit - 32 * word, 32));
      return static_cast<uint32_t>((uint64_t{1} << count) - 1);
    };
    return low_bits(end) & ~low_bits(begin);
  }
};

// The units that have a row of the interval.
CUTE_HOST_DEVICE UnitSpan touched_units(RowInterval const& rows, int unit_rows) {
  if (is_empty(rows)) return {0, 0};
  return {rows.first / unit_rows, (rows.limit - 1) / unit_rows + 1};
}

// The units all of whose rows below len_q are in the interval.
CUTE_HOST_DEVICE UnitSpan covered_units(RowInterval const& rows, int unit_rows, int len_q) {
  if (is_empty(rows)) return {0, 0};
  int const begin = (rows.first + unit_rows - 1) / unit_rows;
  int const end = rows.limit == len_q ? (len_q - 1) / unit_rows + 1 : rows.limit / unit_rows;
  return {begin, cute::max(begin, end)};
}

}  // namespace flash_cute::masks
