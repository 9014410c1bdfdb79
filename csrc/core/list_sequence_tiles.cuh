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

// Leaves out the rows at both ends of a packed sequence that see no key, so that whatever their q and dO hold stays out
// of the products. Returns how many the sequence now begins later; those behind it are like rows that are not used.
CUTE_DEVICE int drop_blind_rows(Sequence& sequence) {
  Band& band = sequence.band;
  int const before = band.has_upper() ? max(0, -band.upper) : 0;
  int const limit = band.has_lower() ? max(0, min(sequence.len_q, sequence.len_k - band.lower)) : sequence.len_q;
  if (sequence.len_k == 0 || before >= limit) {
    sequence.len_q = 0;
    return 0;
  }
  sequence.len_q = limit - before;
  sequence.first_row += before;
  sequence.rows -= before;
  sequence.shift += before;
  if (band.has_lower()) band.lower += before;
  if (band.has_upper()) band.upper += before;
  return before;
}

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

  __shared__ int most_rows;
  Floors floors{0, 0};  // of the sequences before this thread's
  if (params.sequences.has_before) floors = {.rows = tiles.totals[2], .keys = tiles.totals[3]};
  if (threadIdx.x == 0) most_rows = 0;
  if (threadIdx.x < 4 && params.counters != nullptr) params.counters[threadIdx.x] = 0;
  Floors const own_floors = sequence_prefix::floors_before(params, begin, end);
  floors = {.rows = max(floors.rows, own_floors.rows), .keys = max(floors.keys, own_floors.keys)};
  int own_rows = 0, own_most = 0;
  for (int index = begin; index < end; ++index) {
    SequenceRecord& record = tiles.records[index];
    floors = sequence_prefix::floors_of(params, index, floors);
    record.sequence = read_sequence(params, index, floors);
    record.keys = key_extent(params, index, floors.keys).length;
    record.blind_rows = params.sequences.cu_q == nullptr ? 0 : drop_blind_rows(record.sequence);
    own_most = max(own_most, record.sequence.len_q);
    own_rows += row_tiles(record);
  }
  atomicMax(&most_rows, own_most);
  __syncthreads();

  int all_rows;
  int rows_before = sequence_prefix::exclusive_sum(own_rows, all_rows);
  for (int index = begin; index < end; ++index) {
    tiles.records[index].first_row_tile = rows_before;
    rows_before += row_tiles(tiles.records[index]);
  }
  int all_keys = 0, chunks = 0;
#pragma unroll 1
  for (int part = 0; part < LengthClass::kNumber; ++part) {
    auto const contains = [&](SequenceRecord const& record) {
      return LengthClass::of(record.sequence.len_q, most_rows) == part;
    };
    int own_keys = 0, all_of_part;
    for (int index = begin; index < end; ++index) {
      own_keys += contains(tiles.records[index]) ? key_tiles(tiles.records[index]) : 0;
    }
    __syncthreads();  // all threads have read the sums before
    int keys_before = all_keys + sequence_prefix::exclusive_sum(own_keys, all_of_part);
    all_keys += all_of_part;
    for (int index = begin; index < end; ++index) {
      SequenceRecord& record = tiles.records[index];
      if (!contains(record)) continue;
      int const rows = row_tiles(record), keys = key_tiles(record);
      record.first_key_tile = keys_before;
      keys_before += keys;
      if (has_key_tiles(record)) chunks += DqQueue::chunks(params, rows, keys) * params.heads_kv;
    }
  }
  if (params.counters != nullptr && chunks > 0) atomicAdd(params.counters + DqQueue::kExpected, chunks);
  if (threadIdx.x == 0) {
    tiles.totals[0] = all_rows;
    tiles.totals[1] = all_keys;
  }
  if (end == sequences && begin < end) {  // the thread of the last sequence, whose floors are the largest
    tiles.totals[2] = floors.rows;
    tiles.totals[3] = floors.keys;
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
  for (int i = lane; i < rows; i += 32) tiles.row_sequence[first_row + i] = index;
  for (int i = lane; i < keys; i += 32) tiles.key_sequence[first_key + i] = index;
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
