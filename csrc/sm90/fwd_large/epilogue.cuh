// Stores a warpgroup's half of O from registers, and that of column 0 the LSE, see fwd/epilogue.cuh.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/fwd_normalize.cuh"
#include "../../core/layout.cuh"
#include "../../core/registers.cuh"
#include "../fwd/epilogue.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::fwd_large {

template <class Traits, class Accumulator>
CUTE_DEVICE void epilogue(FwdParams const& params, Sequence const& sequence, fwd::TileCoord const& tile, int half,
                          OnlineSoftmax<2> const& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  int const thread = fresh_thread_index() % 128;
  int const first_row = tile.m_block * kBlockM, first_column = cta_rank<Traits>() * kColumns + half * Traits::kHalf;

  typename Traits::MmaPV mma;
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  auto cO = domain_offset(make_coord(0, first_column),
                          make_identity_tensor(Shape<Int<kBlockM>, Int<Traits::kHeadDim>>{}));
  auto cO_half = make_tensor(cO.data(), Shape<Int<kBlockM>, Int<Traits::kHalf>>{}, cO.stride());  // (64, D / 2)
  auto tOcO = rowcol_view(mma.get_slice(thread).partition_C(cO_half));  // (rows, head dim) -> (row, column)
  float* const lse = params.lse + fwd::lse_offset(params, sequence, tile);
  normalize(sequence, lse, first_row, softmax, acc, tOcO, row_factors<Element>(params, softmax, tile.head));
  auto rO = make_tensor_like<Element>(tOrO);  // (MMA, MMA_M, MMA_D)
  convert(tOrO, rO);

  auto const words = rowcol_view(recast<uint32_t>(rO));  // (rows, blocks of 8 columns)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(words); ++i) {
    int const row = first_row + get<0>(tOcO(i, _0{}));
    auto* const out = static_cast<Element*>(params.out) + fwd::out_offset(params, sequence, tile, row);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(words); j += 4) {
      uint4 const block =
          fwd::quad_transpose({words(i, j), words(i, j + 1), words(i, j + 2), words(i, j + 3)}, thread);
      int const column = first_column + 8 * (j + thread % 4);
      bool const inside = row < written_rows(sequence) && column < params.head_dim_v;
      if (inside) *reinterpret_cast<uint4*>(out + column) = block;
    }
  }
}

}  // namespace flash_cute::sm90::fwd_large
