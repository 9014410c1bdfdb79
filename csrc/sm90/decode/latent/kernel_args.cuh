// What the host tells a kernel.
#pragma once

#include <cuda.h>

#include "contract/decode.h"

namespace flash_cute::sm90::decode::latent {

struct KernelArgs {
  DecodeParams params;  // a KV head is one of `shares`, see head_shares
  Divisor shares;
  // Of BoxLoader alone:
  int box_rows;   // divides the page size and the tile
  Divisor boxes;  // of a tile's rows
  CUtensorMap k;  // (column, row, head, page)
};

}  // namespace flash_cute::sm90::decode::latent
