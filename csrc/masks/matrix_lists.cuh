// The lists of a mask that has a matrix or blocks, of the rows that matrix_bits.cuh has found for each key tile.
//
// A CTA has a square of 32 row units, one for each warp, and 32 key tiles, one for each lane.
#pragma once

#include "dependents.cuh"
#include "row_bits.cuh"

namespace flash_cute::masks {

constexpr int kListThreads = 1024;

inline int64_t list_ctas(TileMaskPlan const& plan) {
  return int64_t{plan.batches} * plan.heads * plan.key_words() * plan.row_words();
}

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
__global__ void __launch_bounds__(kListThreads) matrix_lists_kernel(__grid_constant__ Params const params) {
  launch_dependents<kArch>();
  wait_for_kernel_before<kArch>();  // which finds the rows
  for (int i = threadIdx.x; blockIdx.x == 0 && i < params.zeroed_words; i += kListThreads) params.zeroed[i] = 0;

  TileMaskPlan const& plan = params.plan;
  int const key_words = plan.key_words(), row_words = plan.row_words();
  int const key_word = blockIdx.x % key_words, row_word = blockIdx.x / key_words % row_words;
  int64_t const pair = blockIdx.x / key_words / row_words;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const unit = 32 * row_word + warp;
  RowBits seen = 0, unseen = 0;  // rows of the unit that see a column of the tile, and that do not see one
  if (unit < plan.row_units && 32 * key_word + lane < plan.key_tiles) {
    int const first = unit * plan.unit_rows, limit = cute::min(first + plan.unit_rows, params.len_q);
    CUTE_NO_UNROLL  // of a unit one to four; unrolled, sm80 spills
    for (int block = first / kBitRows; block * kBitRows < limit; ++block) {
      RowBits const rows = row_bits({first, limit}, block * kBitRows);
      TileRows const& of_tile = params.tile_rows[(pair * row_blocks(params.len_q) + block) * plan.key_tiles +
                                                 32 * key_word + lane];
      seen |= rows & of_tile.some;
      unseen |= rows & ~of_tile.all;
    }
  }
  uint32_t const visited = __ballot_sync(0xffffffff, seen != 0);
  uint32_t const whole = __ballot_sync(0xffffffff, seen != 0 && unseen == 0);
  __shared__ uint32_t of_units[2][32];
  if (lane == 0) {
    of_units[0][warp] = visited;
    of_units[1][warp] = whole;
    if (unit < plan.row_units) {
      int64_t const at = (pair * plan.row_units + unit) * key_words + key_word;
      params.rows_visited[at] = visited;
      params.rows_whole[at] = whole;
    }
  }
  if (params.keys_visited == nullptr) return;
  __syncthreads();  // the words of all units
  int const tile = 32 * key_word + warp;
  uint32_t const units_visited = __ballot_sync(0xffffffff, of_units[0][lane] >> warp & 1);
  uint32_t const units_whole = __ballot_sync(0xffffffff, of_units[1][lane] >> warp & 1);
  if (lane > 0 || tile >= plan.key_tiles) return;
  int64_t const at = (pair * plan.key_tiles + tile) * row_words + row_word;
  params.keys_visited[at] = units_visited;
  params.keys_whole[at] = units_whole;
}

}  // namespace flash_cute::masks
