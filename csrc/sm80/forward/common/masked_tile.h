// A row tile of a batch with a mask by intervals.
#pragma once

#include "contract/tile_mask.h"
#include "contract/tile_order.h"

namespace flash_cute::sm80::forward {

struct MaskedTile {
  RowTileCoord coord;
  uint32_t const* visited;       // the tile's lists, of key tiles
  uint32_t const* whole;
  RowInterval const* intervals;  // of the head's first column
  void const* k;                 // the head's first key in k, and in v
  void const* v;
  int zero;     // 0, see thread_again in rows/mainloop.cuh
  float slope;  // of the head, see head_slope
};

}  // namespace flash_cute::sm80::forward
