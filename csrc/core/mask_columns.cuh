// Where a mask's intervals or bits are, see contract/tile_mask.h.
#pragma once

#include <cute/config.hpp>

#include "contract/tile_mask.h"

namespace flash_cute {

// What a mask says of a column is 8 bytes: an interval, or the bits of 64 rows.
static_assert(sizeof(RowBits) == sizeof(RowInterval));

// Of a head's first column: the first interval, or the bits of the first 64 rows.
CUTE_DEVICE RowBits const* columns_of_head(TileMask const& mask, int batch, int head_kv) {
  if (mask.bits != nullptr) return mask.bits + batch * mask.bits_batch_stride + head_kv * mask.bits_head_stride;
  return reinterpret_cast<RowBits const*>(mask.intervals + batch * mask.batch_stride + head_kv * mask.head_stride);
}

}  // namespace flash_cute
