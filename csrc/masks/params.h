// What the kernels that make a TileMask read and write. Plain data: no torch, no CuTe.
#pragma once

#include "contract/params.h"
#include "contract/tile_mask.h"

namespace flash_cute::masks {

struct Params {
  GivenMask given;
  Band band;            // of a dense batch
  Sequences sequences;  // of a packed call: cu_q, cu_k, the window, bottom_right; cu_q null: a dense batch
  int sequence_count;
  int len_q;
  int len_k;
  TileMaskPlan plan;

  RowInterval* intervals;  // see TileMask; null where the mask has a matrix
  RowBits* bits;           // null where it has none
  TileRows* tile_rows;     // (batches, heads, blocks of 64 rows, key tiles); null where bits are
  uint32_t* rows_visited;
  uint32_t* rows_whole;
  uint32_t* keys_visited;  // null: no lists of key tiles
  uint32_t* keys_whole;

  int* row_order;  // null: row tiles are not sorted

  int* zeroed;  // counters of the kernel after, which begin as 0
  int zeroed_words;
};

}  // namespace flash_cute::masks
