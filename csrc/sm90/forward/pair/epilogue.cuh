// Stores a warpgroup's columns of O from registers, and that of column 0 the LSE, see rows/epilogue.cuh.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/fwd_normalize.cuh"
#include "core/layout.cuh"
#include "core/registers.cuh"
#include "core/place.cuh"
#include "sm90/forward/common/quad_transpose.cuh"
#include "sm90/forward/common/scheduler.cuh"

namespace flash_cute::sm90::forward::pair {

using namespace cute;

// kRows x kColumns, from `first_row` of the sequence and `first_column` on.
template <class Element, int kRows, int kColumns, class Mma, class Accumulator>
CUTE_DEVICE void store_columns(FwdParams const& params, Sequence const& sequence, forward::TileCoord const& tile,
                               int first_row, int first_column, OnlineSoftmax<2> const& softmax, Mma const& mma,
                               Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  int const thread = fresh_thread_index() % 128;

  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  auto cO = domain_offset(make_coord(0, first_column), make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{}));
  auto tOcO = rowcol_view(mma.get_slice(thread).partition_C(cO));  // (rows, head dim) -> (row, column)
  float* const lse = params.lse + lse_offset(params, sequence, tile);
  normalize(sequence, lse, first_row, softmax, acc, tOcO, row_factors<Element>(params, softmax, tile.head));
  auto rO = make_tensor_like<Element>(tOrO);  // (MMA, MMA_M, MMA_D)
  convert(tOrO, rO);

  auto const words = rowcol_view(recast<uint32_t>(rO));  // (rows, blocks of 8 columns)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(words); ++i) {
    int const row = first_row + get<0>(tOcO(i, _0{}));
    auto* const out = static_cast<Element*>(params.out) + out_offset(params, sequence, tile, row);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(words); j += 4) {
      uint4 const block =
          forward::quad_transpose({words(i, j), words(i, j + 1), words(i, j + 2), words(i, j + 3)}, thread);
      int const column = first_column + 8 * (j + thread % 4);
      bool const inside = row < written_rows(sequence) && column < params.head_dim_v;
      if (inside) *reinterpret_cast<uint4*>(out + column) = block;
    }
  }
}

}  // namespace flash_cute::sm90::forward::pair
