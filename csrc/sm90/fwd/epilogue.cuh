// Accumulator to memory, each warpgroup its own 64 rows, straight from the registers: shared memory would have to wait
// for the last tile's O, or Q of the next tile for this one's.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/convert.cuh"
#include "../../core/fwd_normalize.cuh"
#include "../../core/layout.cuh"
#include "scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::fwd {

// Word t of four blocks, in thread t of a quad, to the four words of block t.
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

template <class Traits, class Accumulator>
CUTE_DEVICE void epilogue(FwdParams const& params, TileCoord const& tile, int warpgroup,
                              OnlineSoftmax<2> const& softmax,
                              Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kRows;
  // Read anew for each tile: the compiler would else keep the epilogue's addresses through the mainloop, and
  // spill at head dim 256.
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  thread %= 128;
  int const first_row = tile.m_block * Traits::kBlockM + warpgroup * kRows;

  typename Traits::MmaPV mma;
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  auto cO = make_identity_tensor(Shape<Int<kRows>, Int<Traits::kHeadDim>>{});
  auto tOcO = rowcol_view(mma.get_slice(thread).partition_C(cO));  // (rows, head dim) -> (row, column)
  float* const lse = params.lse + (int64_t{tile.batch} * params.heads_q + tile.head) * params.len_q;
  normalize(params, lse, first_row, softmax, acc, tOcO);
  auto rO = make_tensor_like<Element>(tOrO);  // (MMA, MMA_M, MMA_D)
  convert(tOrO, rO);

  // A thread's words of a row, one in every 8 columns, go round its quad until each thread has 8 whole columns.
  auto const words = rowcol_view(recast<uint32_t>(rO));  // (rows, blocks of 8 columns)
  CUTE_UNROLL
  for (int i = 0; i < size<0>(words); ++i) {
    int const row = first_row + get<0>(tOcO(i, _0{}));
    auto* const out = static_cast<Element*>(params.out) + tile.batch * params.out_strides.batch +
                      tile.head * params.out_strides.head + row * params.out_strides.row;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(words); j += 4) {
      uint4 const block =
          quad_transpose({words(i, j), words(i, j + 1), words(i, j + 2), words(i, j + 3)}, thread);
      int const column = 8 * (j + thread % 4);
      if (row < params.len_q && column < params.head_dim) *reinterpret_cast<uint4*>(out + column) = block;
    }
  }
}

}  // namespace flash_cute::sm90::fwd
