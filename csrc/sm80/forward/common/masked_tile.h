// A row tile of a batch with a mask.
#pragma once

#include "contract/tile_mask.h"
#include "contract/tile_order.h"

namespace flash_cute::sm80::forward {

struct MaskedTile {
  RowTileCoord coord;
  uint32_t const* visited;       // the tile's lists, of key tiles
  uint32_t const* whole;
  // A column's intervals, or its bits of each block of 64 rows of the tile: one or two, 8 bytes each. (There may be no
  // second block below len_q.)
  RowBits const* columns;     // the first ones, of the head's first column
  int64_t per_column_stride;  // from a column's first one to its second
  int per_column;
  void const* k;                 // the head's first key in k, and in v
  void const* v;
  int zero;     // 0, see thread_again in rows/mainloop.cuh
  float slope;  // of the head, see head_slope
};

}  // namespace flash_cute::sm80::forward
