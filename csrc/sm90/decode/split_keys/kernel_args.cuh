// What the host tells a kernel.
#pragma once

#include <cuda.h>

#include "contract/decode.h"

namespace flash_cute::sm90::decode::split_keys {

struct KernelArgs {
  DecodeParams params;
  // Of BoxLoader alone:
  int box_rows;        // divides the page size and the tile
  Divisor boxes;       // of a tile's rows
  Divisor chunk_step;  // from a lane's chunk to its next
  CUtensorMap k;       // (column, row, head, page)
  CUtensorMap v;
};

}  // namespace flash_cute::sm90::decode::split_keys
