// Counts the tiles of a packed batch: prefix sums and maxima over its sequences.
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

// The largest x, at least 0, of the threads before this one; of the first one 0. By the whole CTA.
CUTE_DEVICE int exclusive_max(int x) {
  __shared__ int warp_maxima[kThreads / 32];
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const own = inclusive_warp_max(x);
  if (lane == 31) warp_maxima[warp] = own;
  __syncthreads();
  if (warp == 0) warp_maxima[lane] = inclusive_warp_max(warp_maxima[lane]);
  __syncthreads();
  int const before = __shfl_up_sync(0xffffffff, own, 1);
  int const result = max(lane == 0 ? 0 : before, warp == 0 ? 0 : warp_maxima[warp - 1]);
  __syncthreads();  // all have read: the next call may write
  return result;
}

// The largest offsets of the sequences of the threads before this one, each of which has [begin, end). By the whole
// CTA.
template <class Params>
CUTE_DEVICE Floors floors_before(Params const& params, int begin, int end) {
  Floors own{0, 0};
  for (int index = begin; index < end; ++index) {
    own.rows = max(own.rows, row_begin(params, index));
    own.keys = max(own.keys, key_begin(params, index));
  }
  return {.rows = exclusive_max(own.rows), .keys = exclusive_max(own.keys)};
}

// From the floors of the sequence before.
template <class Params>
CUTE_DEVICE Floors floors_of(Params const& params, int index, Floors const& before) {
  return {.rows = max(before.rows, row_begin(params, index)), .keys = max(before.keys, key_begin(params, index))};
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
  int* const row_floors = prefix + sequences + 1;
  int* const key_floors = row_floors + sequences;
  Floors floors = sequence_prefix::floors_before(params, begin, end);
  int own = 0;
  for (int index = begin; index < end; ++index) {
    floors = sequence_prefix::floors_of(params, index, floors);
    row_floors[index] = floors.rows;
    key_floors[index] = floors.keys;
    own += ceil_div(row_extent(params, index, floors.rows).length, kBlock);
  }
  int all;
  int before = sequence_prefix::exclusive_sum(own, all);
  for (int index = begin; index < end; ++index) {
    prefix[index] = before;
    before += ceil_div(row_extent(params, index, row_floors[index]).length, kBlock);
  }
  if (threadIdx.x == 0) prefix[sequences] = all;
}

}  // namespace flash_cute
