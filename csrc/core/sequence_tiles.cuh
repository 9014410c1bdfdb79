// Lists the tiles of a batch whose sequences are read at run time, for the backward: see SequenceTiles.
#pragma once

#include <cuda_runtime.h>

#include <cute/tensor.hpp>

#include "sequence.cuh"
#include "sequence_prefix.cuh"

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

// Numbers the tiles: `rows_before` and `keys_before`. One CTA.
template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(sequence_prefix::kThreads)
    number_sequence_tiles_kernel(__grid_constant__ BwdParams const params) {
  constexpr int kThreads = sequence_prefix::kThreads;
  SequenceTiles const& tiles = params.tiles;
  int const sequences = sequence_count(params);
  int const per_thread = ceil_div(sequences, int{kThreads});
  int const begin = min(static_cast<int>(threadIdx.x) * per_thread, sequences);
  int const end = min(begin + per_thread, sequences);
  auto const row_tiles = [&](int index) { return ceil_div(row_extent(params, index).length, kBlockM); };
  auto const key_tiles = [&](int index) { return ceil_div(key_extent(params, index).length, kBlockN); };

  __shared__ int most_rows;
  if (threadIdx.x == 0) most_rows = 0;
  __syncthreads();
  int own_rows = 0, own_most = 0;
  for (int index = begin; index < end; ++index) {
    own_most = max(own_most, row_extent(params, index).used);
    own_rows += row_tiles(index);
  }
  atomicMax(&most_rows, own_most);
  __syncthreads();

  int own_keys[LengthClass::kNumber] = {};
  for (int index = begin; index < end; ++index) {
    int const of = LengthClass::of(row_extent(params, index).used, most_rows);
    CUTE_UNROLL
    for (int i = 0; i < LengthClass::kNumber; ++i) own_keys[i] += of == i ? key_tiles(index) : 0;
  }
  int all_rows, all_keys = 0, keys_before[LengthClass::kNumber];
  int rows_before = sequence_prefix::exclusive_sum(own_rows, all_rows);
  CUTE_UNROLL
  for (int i = 0; i < LengthClass::kNumber; ++i) {
    __syncthreads();  // all threads have read the sums before
    int all_of_class;
    keys_before[i] = all_keys + sequence_prefix::exclusive_sum(own_keys[i], all_of_class);
    all_keys += all_of_class;
  }
  for (int index = begin; index < end; ++index) {
    tiles.rows_before[index] = rows_before;
    rows_before += row_tiles(index);
    int const of = LengthClass::of(row_extent(params, index).used, most_rows);
    CUTE_UNROLL
    for (int i = 0; i < LengthClass::kNumber; ++i) {
      if (of != i) continue;
      tiles.keys_before[index] = keys_before[i];
      keys_before[i] += key_tiles(index);
    }
  }
  if (threadIdx.x == 0) {
    tiles.rows_before[sequences] = all_rows;
    tiles.keys_before[sequences] = all_keys;
  }
}

// Fills `row_sequence` and `key_sequence`. A warp per sequence.
template <int kBlockM, int kBlockN>
__global__ void __launch_bounds__(256) list_sequence_tiles_kernel(__grid_constant__ BwdParams const params) {
  SequenceTiles const& tiles = params.tiles;
  int const index = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= sequence_count(params)) return;
  int const rows = ceil_div(row_extent(params, index).length, kBlockM);
  int const keys = ceil_div(key_extent(params, index).length, kBlockN);
  int const first_row = tiles.rows_before[index], first_key = tiles.keys_before[index];
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

// A row tile among those of all heads.
struct ListedRowTile {
  bool exists;
  int head;
  int index;    // of its sequence
  int m_block;  // in its sequence
};

// The tile of number head * m_blocks + i.
CUTE_DEVICE ListedRowTile listed_row_tile(BwdParams const& params, int number) {
  int const head = number / params.m_blocks, tile = number - head * params.m_blocks;
  SequenceTiles const& tiles = params.tiles;
  if (tile >= tiles.rows_before[sequence_count(params)]) return {.exists = false};
  int const index = tiles.row_sequence[tile];
  return {.exists = true, .head = head, .index = index, .m_block = tile - tiles.rows_before[index]};
}

// A key tile among those of all KV heads.
struct ListedKeyTile {
  bool exists;
  int head_kv;
  int index;    // of its sequence
  int n_block;  // in its sequence
};

// The tile of a rank in the order of processing. In a sequence the KV heads are in groups: tile 0 of each head, then
// tile 1 of each, and so on, so that a tile's ordered adds come `distance(key tiles of a head)` row tiles after those of
// the tile before it.
template <int kBlockM, int kBlockN, class Distance>
CUTE_DEVICE ListedKeyTile listed_key_tile(BwdParams const& params, int rank, Distance const& distance) {
  SequenceTiles const& tiles = params.tiles;
  int const position = rank / params.heads_kv;
  if (position >= tiles.keys_before[sequence_count(params)]) return {.exists = false};
  int const index = tiles.key_sequence[position];
  int const n_blocks = ceil_div(key_extent(params, index).length, kBlockN);
  int const row_tiles = max(1, ceil_div(row_extent(params, index).used, kBlockM)) * params.group;
  int const heads = min(params.heads_kv, ceil_div(distance(n_blocks), row_tiles));
  int const in_sequence = rank - tiles.keys_before[index] * params.heads_kv;
  int const first_head = in_sequence / (heads * n_blocks) * heads;
  int const heads_of_group = min(heads, params.heads_kv - first_head);
  int const in_group = in_sequence - first_head * n_blocks;
  return {.exists = true,
          .head_kv = first_head + in_group % heads_of_group,
          .index = index,
          .n_block = in_group / heads_of_group};
}

// Of a row among the statistics that a call keeps per row, like the LSE: (batch, heads_q, len_q), packed (heads_q, all
// rows).
CUTE_DEVICE int64_t statistic_index(BwdParams const& params, int index, int head, Sequence const& sequence, int row) {
  int64_t const batch_head = params.sequences.cu_q == nullptr ? int64_t{index} * params.heads_q + head : head;
  return batch_head * params.len_q + sequence.first_row + row;
}

// The offset of a sequence's row 0, or key 0, in a head of a tensor.
CUTE_DEVICE int64_t sequence_offset(BwdParams const& params, Strides const& strides, int index, int first, int head) {
  int64_t const before = params.sequences.cu_q == nullptr ? index * strides.batch : first * strides.row;
  return before + head * strides.head;
}

}  // namespace flash_cute
