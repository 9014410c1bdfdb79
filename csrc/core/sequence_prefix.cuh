// Counts the tiles of a packed batch: prefix sums over its sequences.
#pragma once

#include <cuda_runtime.h>

#include <cute/tensor.hpp>

#include "sequence.cuh"
#include "warp_sum.cuh"

namespace flash_cute {

using namespace cute;

namespace sequence_prefix {

constexpr int kThreads = 1024;

// The sum of x over the threads before this one; `total` is that over all. By the whole CTA.
template <class T>
CUTE_DEVICE T exclusive_sum(T x, T& total) {
  __shared__ T warp_sums[kThreads / 32];
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T const own = inclusive_warp_sum(x);
  if (lane == 31) warp_sums[warp] = own;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = inclusive_warp_sum(warp_sums[lane]);
  __syncthreads();
  total = warp_sums[kThreads / 32 - 1];
  return own - x + (warp == 0 ? 0 : warp_sums[warp - 1]);
}

}  // namespace sequence_prefix

// Fills Sequences::tiles_before, for tiles of kBlock rows. One CTA.
template <int kBlock>
__global__ void __launch_bounds__(sequence_prefix::kThreads)
    row_tile_prefix_kernel(__grid_constant__ FwdParams const params) {
  int* const prefix = params.sequences.tiles_before;
  int const sequences = sequence_count(params);
  int const per_thread = ceil_div(sequences, int{sequence_prefix::kThreads});
  int const begin = min(static_cast<int>(threadIdx.x) * per_thread, sequences);
  int const end = min(begin + per_thread, sequences);
  auto const tiles = [&](int index) { return ceil_div(row_extent(params, index).length, kBlock); };
  int own = 0;
  for (int index = begin; index < end; ++index) own += tiles(index);
  int all;
  int before = sequence_prefix::exclusive_sum(own, all);
  for (int index = begin; index < end; ++index) {
    prefix[index] = before;
    before += tiles(index);
  }
  if (threadIdx.x == 0) prefix[sequences] = all;
}

}  // namespace flash_cute
