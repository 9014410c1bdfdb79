// Brings a warpgroup's results from registers to shared memory, from where TMA stores them.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/convert.cuh"

namespace flash_cute::sm90 {

using namespace cute;

// Writes acc * factor, in 16 bits, to `buffer`. `thread`: the thread's index in the warpgroup. A fence for the async
// proxy and a barrier of the warpgroup must follow before TMA reads the buffer.
template <class Mma, class SmemLayout, class Element, class Accumulator>
CUTE_DEVICE void stage_rows(Element* buffer, int thread,
                            Accumulator const& acc,  // (MMA, MMA_M, MMA_N)
                            float factor) {
  using Store = Copy_Atom<SM90_U32x4_STSM_N, Element>;
  auto const copy_out = make_tiled_copy_C(Store{}, Mma{}).get_slice(thread);
  auto sX = make_tensor(make_smem_ptr(buffer), SmemLayout{});  // (64, D)
  auto scaled = make_tensor_like<float>(acc);                  // (MMA, MMA_M, MMA_N)
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) scaled(i) = acc(i) * factor;
  auto rX = make_tensor_like<Element>(acc);  // (MMA, MMA_M, MMA_N)
  convert(scaled, rX);
  auto tXrX = copy_out.retile_S(rX);     // (CPY, CPY_M, CPY_N)
  auto tXsX = copy_out.partition_D(sX);  // (CPY, CPY_M, CPY_N)
  CUTE_STATIC_ASSERT_V(size(tXrX) == size(tXsX));
  copy(Store{}, tXrX, tXsX);
}

// Stores such a tile: rows [row, row + rows) of one head of a map (column, row, head, batch). What is outside the
// tensor is not written.
template <class Columns>
CUTE_DEVICE void store_tile(CUtensorMap const& map, typename Columns::Element const* smem, int rows, int row, int head,
                            int batch) {
  constexpr int kChunk = Columns::kChunk;
  CUTE_UNROLL
  for (int chunk = 0; chunk < Columns::kChunks; ++chunk) {
    SM90_TMA_STORE_4D::copy(&map, smem + chunk * rows * kChunk, chunk * kChunk, row, head, batch);
  }
}

}  // namespace flash_cute::sm90
