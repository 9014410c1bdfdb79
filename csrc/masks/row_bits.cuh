// RowBits, see contract/tile_mask.h: of intervals, and of the bytes of a matrix of booleans.
#pragma once

#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "params.h"

namespace flash_cute::masks {

CUTE_HOST_DEVICE int row_blocks(int len_q) { return (len_q + kBitRows - 1) / kBitRows; }

// Of the 64 rows from `first` on those that an interval has. Compares before it clamps: of a number clamped to [0, 64],
// ptxas 13.0 takes that it is not above 64 (a predicate of VIMNMX.RELU) for that it equals 64.
CUTE_HOST_DEVICE RowBits row_bits(RowInterval const& rows, int first) {
  auto const below = [&](int row) {
    int const count = row - first;
    if (count <= 0) return RowBits{0};
    return count >= kBitRows ? ~RowBits{0} : (RowBits{1} << count) - 1;
  };
  return below(rows.limit) & ~below(rows.first);
}

// Of each byte that is not 0 bit 7.
CUTE_HOST_DEVICE uint32_t true_bytes(uint32_t bytes) {
  return (((bytes & 0x7f7f7f7f) + 0x7f7f7f7f) | bytes) & 0x80808080;
}

// Byte i of `columns[j]` becomes byte j of `rows[i]`.
CUTE_DEVICE void transpose_bytes(uint32_t const (&rows)[4], uint32_t (&columns)[4]) {
  uint32_t const low01 = __byte_perm(rows[0], rows[1], 0x5140), high01 = __byte_perm(rows[0], rows[1], 0x7362);
  uint32_t const low23 = __byte_perm(rows[2], rows[3], 0x5140), high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace flash_cute::masks
