// Sorts the row tiles of a mask by the key tiles that they visit: those that take longest should start first. A CTA per
// head.
#pragma once

#include "dependents.cuh"
#include "params.h"

namespace flash_cute::masks {

constexpr int kSortThreads = 1024;

// kArch: the folder of csrc/ for whose chips the file is compiled.
template <int kArch>
__global__ void __launch_bounds__(kSortThreads) sort_row_tiles_kernel(__grid_constant__ Params const params) {
  launch_dependents<kArch>();
  wait_for_kernel_before<kArch>();  // which makes the lists
  TileMaskPlan const& plan = params.plan;
  int const tiles = plan.row_tiles(), words = plan.key_words();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ int visited[TileMaskPlan::kMostSorted];  // key tiles of each row tile
  uint32_t const* const lists = params.rows_visited + int64_t{blockIdx.x} * plan.row_units * words;
  for (int tile = warp; tile < tiles; tile += kSortThreads / 32) {
    int const first = tile * plan.tile_units, limit = cute::min(first + plan.tile_units, plan.row_units);
    int count = 0;
    for (int word = lane; word < words; word += 32) {
      uint32_t bits = 0;
      for (int unit = first; unit < limit; ++unit) bits |= lists[int64_t{unit} * words + word];
      count += __popc(bits);
    }
    count = __reduce_add_sync(0xffffffff, count);
    if (lane == 0) visited[tile] = count;
  }
  __syncthreads();
  int* const order = params.row_order + int64_t{blockIdx.x} * tiles;
  for (int tile = threadIdx.x; tile < tiles; tile += kSortThreads) {
    int const own = visited[tile];
    int rank = 0;  // of tiles that visit equally many the last comes first, as with a causal mask
    for (int other = 0; other < tiles; ++other) {
      rank += int(visited[other] > own || (visited[other] == own && other > tile));
    }
    order[rank] = tile;
  }
}

}  // namespace flash_cute::masks
