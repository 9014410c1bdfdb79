// The long sequences of a batch over a cache, as the scheduler of sequences that are read at run time asks for them.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include "contract/decode.h"
#include "core/sequence.cuh"
#include "core/split_keys/work.cuh"
#include "sm90/forward/common/sequence_scheduler.cuh"

namespace flash_cute::sm90::decode::long_rows {

// The forward's, where k and v are caches: len_k is their capacity, and their strides are in the maps.
struct Params : FwdParams {
  static constexpr bool draws_tiles = false;  // no counter: the workspace stays that of short sequences
  PageTable table;
  int const* cache_seqlens;  // see DecodeParams
  int new_keys;
  int long_rows;
};

struct KernelArgs {
  CUtensorMap q;  // as the forward's of packed batches
  CUtensorMap k;  // (column, row, head, page)
  CUtensorMap v;
  Params params;
  cutlass::FastDivmod page_size;
  int box_bits;  // a TMA box of keys has 2^box_bits rows: a number that divides the page size and the key tile

  CUTE_HOST_DEVICE int box_rows() const { return 1 << box_bits; }
};

// Rows of no sequence are those of the merge kernel.
CUTE_DEVICE int sequence_count(Params const& params) { return params.batch; }

// A sequence that is not long has no rows here.
CUTE_DEVICE Sequence read_sequence(Params const& params, int index, Floors const& floors) {
  flash_cute::Sequences const& all = params.sequences;
  Extent const rows = row_extent(params, index, floors.rows);
  if (rows.length < params.long_rows) return {};
  int const len_k = flash_cute::split_keys::keys_of(params, index, rows.length);
  int const shift = all.bottom_right ? len_k - rows.length : 0;
  return {.len_q = rows.length,
          .len_k = len_k,
          .band = window_band(all.window_left, all.window_right, shift, rows.length, len_k),
          .shift = shift,
          .first_row = rows.first,
          .first_key = 0,
          .rows = rows.length};
}

// Read again for each tile: kept in registers, the scheduler spilled.
struct Tickets : forward::CtaTickets {
  CUTE_DEVICE static int first() {
    int number;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
    return number;
  }
  CUTE_DEVICE static int number() {
    int ctas;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
    return ctas;
  }
};

}  // namespace flash_cute::sm90::decode::long_rows
