// Lists the tiles of a batch whose sequences are read at run time, for the backward: see SequenceTiles.
#pragma once

#include <cuda_runtime.h>

#include <cute/tensor.hpp>

#include "sequence.cuh"
#include "sequence_prefix.cuh"
#include "sequence_tiles.cuh"

namespace flash_cute {

using namespace cute;

// The order in which the key tiles of sequences are processed: first those of the sequences with more than half of the
// most rows, last those with at most a quarter. The tiles that take longest must not be left to the end.
struct LengthClass {
  static constexpr int kNumber = 3;

  CUTE_HOST_DEVICE static int of(int rows, int most_rows) {
    return rows > most_rows / 2 ? 0 : rows > most_rows / 4 ? 1 : 2;
  }
};

// Gathers the sequences' records and numbers their tiles. One CTA.
template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(sequence_prefix::kThreads, 1)
    number_sequence_tiles_kernel(__grid_constant__ BwdParams const params) {
  constexpr int kThreads = sequence_prefix::kThreads;
  SequenceTiles const& tiles = params.tiles;
  int const sequences = sequence_count(params);
  int const per_thread = ceil_div(sequences, int{kThreads});
  int const begin = min(static_cast<int>(threadIdx.x) * per_thread, sequences);
  int const end = min(begin + per_thread, sequences);
  auto const row_tiles = [&](SequenceRecord const& record) { return ceil_div(record.sequence.rows, kBlockM); };
  auto const key_tiles = [&](SequenceRecord const& record) { return ceil_div(record.keys, kBlockN); };
  // Sequences that bad offsets make overlap may have more tiles than there is room for.
  auto const limited = [](int64_t number) { return static_cast<int>(min(number, int64_t{kNoLimit})); };

  __shared__ int most_rows;
  if (threadIdx.x == 0) most_rows = 0;
  if (threadIdx.x < 4 && params.counters != nullptr) params.counters[threadIdx.x] = 0;
  __syncthreads();
  int64_t own_rows = 0;
  int own_most = 0;
  for (int index = begin; index < end; ++index) {
    SequenceRecord& record = tiles.records[index];
    record.sequence = read_sequence(params, index);
    record.keys = key_extent(params, index).length;
    own_most = max(own_most, record.sequence.len_q);
    own_rows += row_tiles(record);
  }
  atomicMax(&most_rows, own_most);
  __syncthreads();

  int64_t all_rows;
  int64_t rows_before = sequence_prefix::exclusive_sum(own_rows, all_rows);
  for (int index = begin; index < end; ++index) {
    tiles.records[index].first_row_tile = limited(rows_before);
    rows_before += row_tiles(tiles.records[index]);
  }
  int64_t all_keys = 0;
  int chunks = 0;
#pragma unroll 1
  for (int part = 0; part < LengthClass::kNumber; ++part) {
    auto const contains = [&](SequenceRecord const& record) {
      return LengthClass::of(record.sequence.len_q, most_rows) == part;
    };
    int64_t own_keys = 0, all_of_part;
    for (int index = begin; index < end; ++index) {
      own_keys += contains(tiles.records[index]) ? key_tiles(tiles.records[index]) : 0;
    }
    __syncthreads();  // all threads have read the sums before
    int64_t keys_before = all_keys + sequence_prefix::exclusive_sum(own_keys, all_of_part);
    all_keys += all_of_part;
    for (int index = begin; index < end; ++index) {
      SequenceRecord& record = tiles.records[index];
      if (!contains(record)) continue;
      int const rows = row_tiles(record), keys = key_tiles(record);
      record.first_key_tile = limited(keys_before);
      record.fits = int64_t{record.first_row_tile} + rows <= params.m_blocks && keys_before + keys <= params.n_blocks;
      keys_before += keys;
      if (has_key_tiles(record)) chunks += DqQueue::chunks(params, rows, keys) * params.heads_kv;
    }
  }
  if (params.counters != nullptr && chunks > 0) atomicAdd(params.counters + DqQueue::kExpected, chunks);
  if (threadIdx.x == 0) {
    tiles.totals[0] = static_cast<int>(min(all_rows, int64_t{params.m_blocks}));
    tiles.totals[1] = static_cast<int>(min(all_keys, int64_t{params.n_blocks}));
  }
}

// Fills `row_sequence` and `key_sequence`. A warp per sequence.
template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(256) list_sequence_tiles_kernel(__grid_constant__ BwdParams const params) {
  SequenceTiles const& tiles = params.tiles;
  int const index = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= sequence_count(params)) return;
  SequenceRecord const& record = tiles.records[index];
  int const first_row = record.first_row_tile, rows = ceil_div(record.sequence.rows, kBlockM);
  int const first_key = record.first_key_tile, keys = ceil_div(record.keys, kBlockN);
  int const row_end = min(first_row + rows, params.m_blocks), key_end = min(first_key + keys, params.n_blocks);
  for (int i = first_row + lane; i < row_end; i += 32) tiles.row_sequence[i] = index;
  for (int i = first_key + lane; i < key_end; i += 32) tiles.key_sequence[i] = index;
}

template <int kBlockM, int kBlockN>
cudaError_t launch_sequence_tiles(BwdParams const& params, cudaStream_t stream) {
  number_sequence_tiles_kernel<kBlockM, kBlockN><<<1, sequence_prefix::kThreads, 0, stream>>>(params);
  cudaError_t const error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  unsigned const sequences = params.batch + 2;  // at most, see sequence_count
  list_sequence_tiles_kernel<kBlockM, kBlockN><<<(sequences + 7) / 8, 256, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_cute
