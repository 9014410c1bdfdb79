// Stores O and the LSE, each warpgroup its own 64 rows, from registers. Through shared memory, O would have to wait for
// the last tile's store, or the load of the next tile's Q for this tile's O.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/fwd_normalize.cuh"
#include "../../core/layout.cuh"
#include "scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::fwd {

// A 4 x 4 transpose within a quad: thread t has word t of four blocks, and gets the four words of block t.
CUTE_DEVICE uint4 quad_transpose(uint4 word, int thread) {
  bool const odd = thread & 1, upper = thread & 2;
  auto exchange = [](uint32_t& low, uint32_t& high, bool keep_high, int distance) {
    uint32_t const other = __shfl_xor_sync(0xffffffff, keep_high ? low : high, distance);
    (keep_high ? low : high) = other;
  };
  exchange(word.x, word.y, odd, 1);
  exchange(word.z, word.w, odd, 1);
  exchange(word.x, word.z, upper, 2);
  exchange(word.y, word.w, upper, 2);
  return word;
}

// Where a row of a tile's sequence and head is in out, and row 0 in the LSE. The LSE of a packed batch is (heads_q,
// len_q).
CUTE_DEVICE int64_t out_offset(FwdParams const& params, FwdParams const&, TileCoord const& tile, int row) {
  return tile.batch * params.out_strides.batch + tile.head * params.out_strides.head + row * params.out_strides.row;
}
CUTE_DEVICE int64_t out_offset(FwdParams const& params, Sequence const& sequence, TileCoord const& tile, int row) {
  return out_offset(params, params, tile, sequence.first_row + row);
}
CUTE_DEVICE int64_t lse_offset(FwdParams const& params, FwdParams const&, TileCoord const& tile) {
  return (int64_t{tile.batch} * params.heads_q + tile.head) * params.len_q;
}
CUTE_DEVICE int64_t lse_offset(FwdParams const& params, Sequence const& sequence, TileCoord const& tile) {
  int const batch = params.sequences.cu_q != nullptr ? 0 : tile.batch;
  return (int64_t{batch} * params.heads_q + tile.head) * params.len_q + sequence.first_row;
}

// `sequence`: a Sequence; for dense batches the parameters themselves.
template <class Traits, class Lengths, class Accumulator>
CUTE_DEVICE void epilogue(FwdParams const& params, Lengths const& sequence, TileCoord const& tile, int warpgroup,
                          OnlineSoftmax<2> const& softmax,
                          Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kRows;
  // Reread for each tile: else the compiler keeps the epilogue's addresses across the mainloop, and spills at head
  // dim 256.
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  thread %= 128;
  int const first_row = warpgroup_first_row<Traits>(params, tile.m_block, warpgroup);

  typename Traits::MmaPV mma;
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  auto cO = make_identity_tensor(Shape<Int<kRows>, Int<Traits::kHeadDimV>>{});
  auto tOcO = rowcol_view(mma.get_slice(thread).partition_C(cO));  // (rows, head dim) -> (row, column)
  float* const lse = params.lse + lse_offset(params, sequence, tile);
  normalize(sequence, lse, first_row, softmax, acc, tOcO, row_factors<Element>(params, softmax, tile.head));
  auto rO = make_tensor_like<Element>(tOrO);  // (MMA, MMA_M, MMA_D)
  convert(tOrO, rO);

  // A thread has one word of every 8 columns of a row. Exchanged within its quad, they become 8 whole columns per
  // thread, for 16-byte stores.
  auto const words = rowcol_view(recast<uint32_t>(rO));  // (rows, blocks of 8 columns)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(words); ++i) {
    int const row = first_row + get<0>(tOcO(i, _0{}));
    auto* const out = static_cast<Element*>(params.out) + out_offset(params, sequence, tile, row);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(words); j += 4) {
      uint4 const block =
          quad_transpose({words(i, j), words(i, j + 1), words(i, j + 2), words(i, j + 3)}, thread);
      int const column = 8 * (j + thread % 4);
      bool const inside = row < written_rows(sequence) && column < value_columns<Traits>(params);
      if (inside) *reinterpret_cast<uint4*>(out + column) = block;
    }
  }
}

}  // namespace flash_cute::sm90::fwd
