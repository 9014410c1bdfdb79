// Stores O, through shared memory in 16-byte vectors, and the LSE, from registers.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/fwd_normalize.cuh"
#include "core/layout.cuh"
#include "core/place.cuh"
#include "contract/tile_order.h"
#include "sm80/forward/common/place_masked_tile.cuh"
#include "traits.cuh"
#include "sm80/common/load_cp_async.cuh"

namespace flash_cute::sm80::forward::rows {

template <class Traits, class Lengths, class Softmax, class Accumulator>
CUTE_DEVICE void epilogue(FwdParams const& params, Lengths const& sequence, RowTileCoord const& tile,
                          typename Traits::Storage& smem, Softmax const& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kHeadDim = Traits::kHeadDim;
  int const thread = threadIdx.x;
  int const first_row = tile.m_block * kBlockM;
  typename Traits::Mma mma;

  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  auto cO = make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{});
  auto tOcO = rowcol_view(mma.get_slice(thread).partition_C(cO));  // (rows, head dim) -> (row, column)
  float* const lse = params.lse + lse_offset(params, sequence, tile);
  auto const factors = row_factors<Element>(params, softmax, tile.head);
  if constexpr (Traits::kVariant.reads_mask) {
    normalize(find_seeing_rows<Traits>(params, smem.tile, softmax, tOcO), lse, first_row, softmax, acc, tOcO, factors);
  } else {
    normalize(sequence, lse, first_row, softmax, acc, tOcO, factors);
  }

  // O overwrites Q. A warp writes only rows that it alone has read, so that no barrier is needed before.
  auto rO = make_tensor_like<Element>(tOrO);  // (MMA, MMA_M, MMA_D)
  convert(tOrO, rO);
  auto sO = make_tensor(make_smem_ptr(smem.q), typename Traits::SmemLayoutQ{});  // (BLK_M, D)
  auto const copy_o = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma).get_slice(thread);
  copy(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, copy_o.retile_S(rO), copy_o.partition_D(sO));
  __syncthreads();  // all threads have written sO

  auto* const out = static_cast<Element*>(params.out) + ::flash_cute::first_row(sequence) * params.out_strides.row;
  int const columns = value_columns<Traits>(params);
  auto mO = make_head_tensor(out, params.out_strides, tile.batch, tile.head, written_rows(sequence), columns);
  auto gO = local_tile(mO, Shape<Int<kBlockM>, Int<kHeadDim>>{}, make_coord(tile.m_block, _0{}));  // (BLK_M, D)
  typename Traits::GmemStore gmem_store;
  auto const gmem_thread = gmem_store.get_slice(thread);
  store_tile(gmem_store, gmem_thread.partition_S(sO), gmem_thread.partition_D(gO), gmem_thread.partition_S(cO),
             written_rows(sequence) - first_row, columns);
}

}  // namespace flash_cute::sm80::forward::rows
