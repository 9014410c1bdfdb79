// Normalizes O and stores it, through shared memory in 16-byte vectors, and the LSE.
#pragma once

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "mainloop.cuh"

namespace flash_cute::sm80::forward::streamed {

// `buffers`: address of kColumns / 64 tiles of 64 x 64 elements, which may be in use until the barrier in here.
template <class Traits, class Out>
CUTE_DEVICE void epilogue(FwdParams const& params, typename Traits::Storage& smem, Part const& part, uint32_t buffers,
                          Softmax<Traits>& softmax, typename Traits::Partner& pair,
                          Out& tOrO,  // (4, 4, kOutBlocks)
                          int thread) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  forward::SequenceTile const& tile = smem.tile;
  // A packed batch has one LSE, (heads_q, len_q).
  int const batch = params.sequences.cu_q != nullptr ? 0 : tile.coord.batch;
  int64_t const lse_row = (int64_t{batch} * params.heads_q + tile.coord.head) * params.len_q + tile.sequence.first_row;
  softmax.finish(smem, pair, part.first_column == 0 ? params.lse + lse_row : nullptr, thread);  // ends with a barrier

  auto acc = rowcol_view(tOrO);  // (rows, columns)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(acc); ++i) {
    float const factor = smem.factor[Softmax<Traits>::out_row(i, thread)];
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = factor < 0.f ? 0.f : acc(i, j) * factor;
  }
  auto rO = make_tensor_like<Element>(tOrO);  // (4, 4, kOutBlocks)
  convert(tOrO, rO);
  cp_async_wait<0>();  // nothing is in flight into the buffers; all have read them before softmax.finish's barriers
  streaming::store_out(rO, buffers, thread);
  __syncthreads();  // all threads have written O

  int const first_row = tile.coord.m_block * kBlockM, rows = tile.sequence.rows - first_row;
  Element* const out = static_cast<Element*>(params.out) + tile.coord.batch * params.out_strides.batch +
                       tile.coord.head * params.out_strides.head +
                       (tile.sequence.first_row + first_row) * params.out_strides.row + part.first_column;
  streaming::write_rows(out, params.out_strides.row, buffers, rows, part.columns, thread);
}

}  // namespace flash_cute::sm80::forward::streamed
