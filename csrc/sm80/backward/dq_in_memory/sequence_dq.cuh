// dQ where sequences are read at run time: its sums, the turns of the deterministic mode, and the conversion. What
// dq.cuh says of the dense kernel holds; the key tiles of a row tile add from the first to the last.
#pragma once

#include <cute/tensor.hpp>

#include "dq.cuh"
#include "sequence_traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

template <class Task>
CUTE_DEVICE int* semaphore(BwdParams const& params, Task const& task, RowTile const& row_tile) {
  return params.semaphores + task.number(params, row_tile);
}

// Waits until the key tiles before this one have added to a row tile.
template <class Traits>
__device__ inline void wait_turn(BwdParams const& params, SequenceTask const& task, RowTile const& row_tile) {
  KeyTiles const visiting = visiting_key_tiles<Traits::kBlockM, Traits::kBlockN>(task.sequence, row_tile.m_block);
  int const turn = task.n_block - visiting.begin;
  while (turns_ended(semaphore(params, task, row_tile)) < turn) continue;
}

CUTE_DEVICE void end_turn(int* semaphore, SequenceTask const&) { end_turn(semaphore); }

// Ends this CTA's turn at the row tile before `row_tile`, unless that is the first one.
template <class Task>
__device__ inline void end_turn_before(BwdParams const& params, Task const& task, RowTile const& row_tile) {
  RowTile const before = task.previous(row_tile);
  if (task.contains(params, before)) end_turn(semaphore(params, task, before), task);
}

// Points to the sums of register 0 of this thread.
template <class Traits>
CUTE_DEVICE float* dq_sums(BwdParams const& params, typename Traits::Task const& task, RowTile const& row_tile) {
  return params.dq_acc + task.number(params, row_tile) * (Traits::kBlockM * Traits::kHeadDim) + fresh_thread_index();
}

// Sets the rows of a tile from `used` on to 0, of kRows rows by the head dim: they may be NaN, where those of another
// tensor are infinite.
template <class Mma, int kRows, class Accumulator>
CUTE_DEVICE void clear_rows(Accumulator& acc, int used) {  // (MMA, MMA_ROWS, MMA_D)
  constexpr int kColumns = decltype(size(acc))::value * decltype(size(Mma{}))::value / kRows;
  auto rows = rowcol_view(acc);  // (rows, columns)
  auto cX = make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{});
  auto tXcX = rowcol_view(Mma{}.get_slice(threadIdx.x).partition_C(cX));  // (rows, columns) -> (row, column)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(rows); ++i) {
    if (get<0>(tXcX(i, _0{})) < used) continue;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(rows); ++j) rows(i, j) = 0.f;
  }
}

// Converts dQ of one row tile, see bwd_convert_kernel. Rows that are not used get 0.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    bwd_convert_sequences_kernel(__grid_constant__ BwdParams const params) {
  ListedRowTile const tile = listed_row_tile(params, blockIdx.x);
  if (!tile.exists) return;
  Sequence const sequence = params.tiles.records[tile.index].sequence;
  auto* const dq = static_cast<typename Traits::Element*>(params.dq) +
                   sequence_offset(params, params.dq_strides, tile.index, sequence.first_row, tile.head);
  auto mdQ = make_tensor(make_gmem_ptr(dq), make_shape(sequence.rows, params.head_dim),
                         make_stride(params.dq_strides.row, _1{}));  // (rows, head dim)
  auto tdQrdQ = scaled_dq<Traits>(params);                           // (MMA, MMA_M, MMA_D)
  clear_rows<typename Traits::MmaQueries, Traits::kBlockM>(tdQrdQ, sequence.len_q - tile.m_block * Traits::kBlockM);
  store_row_tile<Traits>(tdQrdQ, mdQ, tile.m_block);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
