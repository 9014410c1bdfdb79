// Stores O and the LSE, each warpgroup its own 64 rows. A thread's accumulator has one word of every 8 columns of a
// row, and is stored in pieces of 8 columns: they pass through a buffer in shared memory, which no other warp uses, so
// that nothing waits for it; where there is no room for that (Traits::kOutThroughSmem), through shuffles.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/fwd_normalize.cuh"
#include "core/layout.cuh"
#include "core/registers.cuh"
#include "sm90/forward/common/quad_transpose.cuh"
#include "traits.cuh"
#include "sm90/forward/common/place.cuh"
#include "sm90/common/warpgroup.cuh"

namespace flash_cute::sm90::forward::rows {

// The pieces of 8 columns of a thread: piece(i, j) has the columns from 8 (thread % 4 + j) on of its row i; j: a
// multiple of 4.
template <class Words>
CUTE_DEVICE auto pieces_by_shuffles(Words const& words, unsigned thread) {  // (rows, blocks of 8 columns)
  return [&words, thread](int i, int j) {
    return quad_transpose({words(i, j), words(i, j + 1), words(i, j + 2), words(i, j + 3)}, thread);
  };
}
// `rows`: 16 rows in shared memory, of this warp alone. Their pieces are swizzled against bank conflicts: eight lanes
// store the same piece of eight rows at a time, and load four pieces of rows 2 i and 2 i + 1.
template <class Words>
CUTE_DEVICE auto pieces_through_smem(uint4* rows, Words const& words, unsigned thread) {  // (rows, blocks of 8 columns)
  constexpr int kPieces = decltype(size<1>(words))::value;
  auto const address = [rows](unsigned row, unsigned piece, int j) {  // of piece + j; piece is less than j's step
    unsigned const swizzle = row / 2 % 4 + (kPieces % 8 == 0 ? row % 2 * 4 : 0);
    return rows + row * kPieces + j / 8 * 8 + ((piece ^ swizzle) ^ (j % 8));
  };
  unsigned const lane = thread % 32;
  __syncwarp();  // all lanes have read the last tile's
  CUTE_UNROLL
  for (int j = 0; j < kPieces; j += 2) {  // stmatrix: lane l has the address of row l % 8 of matrix l / 8
    SM90_U32x4_STSM_N::copy(words(0, j), words(1, j), words(0, j + 1), words(1, j + 1),
                            reinterpret_cast<uint128_t&>(*address(lane % 16, lane / 16, j)));
  }
  __syncwarp();  // all lanes have written
  return [address, lane](int i, int j) { return *address(lane / 4 + 8 * i, lane % 4, j); };
}

// `sequence`: a Sequence; for dense batches the parameters themselves.
template <class Traits, class Lengths, class Accumulator>
CUTE_DEVICE void epilogue(FwdParams const& params, Lengths const& sequence, TileCoord const& tile, int warpgroup,
                          typename Traits::SharedStorage& smem, OnlineSoftmax<2> const& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Result;
  // Reread for each tile: else the compiler keeps the epilogue's addresses across the mainloop, and spills at head
  // dim 256.
  unsigned const thread = unsigned(fresh_thread_index()) % 128;
  int const first_row = warpgroup_first_row<Traits>(params, tile.m_block, warpgroup) + first_row_of_thread(thread);
  auto const coords = [&](int i, auto) { return make_coord(8 * i, thread % 4); };  // a row from first_row on, a column

  float* const lse = params.lse + lse_offset(params, sequence, tile);
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  normalize(sequence, lse, first_row, softmax, acc, coords, row_factors<Element>(params, softmax, tile.head));
  auto rO = make_tensor_like<Element>(tOrO);  // (MMA, MMA_M, MMA_D)
  convert(tOrO, rO);
  auto const words = rowcol_view(recast<uint32_t>(rO));  // (rows, blocks of 8 columns)
  auto const piece = [&] {
    if constexpr (Traits::kOutThroughSmem) {
      return pieces_through_smem(smem.out.rows[warpgroup][thread / 32], words, thread);
    } else {
      return pieces_by_shuffles(words, thread);
    }
  }();
  int const column = 8 * (thread % 4);
  auto* const out = static_cast<Element*>(params.out) + out_offset(params, sequence, tile, first_row) + column;
  int const rows = written_rows(sequence) - first_row, columns = value_columns<Traits>(params) - column;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(words); ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<1>(words); j += 4) {
      uint4 const block = piece(i, j);
      auto* const destination = out + 8 * i * params.out_strides.row + 8 * j;
      if (8 * i < rows && 8 * j < columns) *reinterpret_cast<uint4*>(destination) = block;
    }
  }
}

}  // namespace flash_cute::sm90::forward::rows
