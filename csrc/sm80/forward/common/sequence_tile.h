// A tile of a sequence that is read at run time.
#pragma once

#include "contract/tile_order.h"
#include "core/sequence.cuh"

namespace flash_cute::sm80::forward {

struct SequenceTile {
  RowTileCoord coord;
  Sequence sequence;
  TileRange keys;
  void const* k;  // the sequence's first key in k, and in v
  void const* v;
  int zero;     // 0, see thread_again in rows/mainloop.cuh
  float slope;  // of the head, see head_slope
};

}  // namespace flash_cute::sm80::forward
