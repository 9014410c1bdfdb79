// Accumulator to memory, each warpgroup its own 64 rows: O through shared memory and one TMA store, which
// clips what lies outside the tensor; the LSE straight from registers.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "../core/convert.cuh"
#include "../core/layout.cuh"
#include "../core/mask.cuh"
#include "fwd_args.cuh"
#include "fwd_traits.cuh"
#include "softmax.cuh"

namespace flash_cute::sm90 {

template <class Traits, class Accumulator>
CUTE_DEVICE void fwd_epilogue(FwdArgs const& args, TileCoord const& tile, int warpgroup,
                              typename Traits::SharedStorage& smem, PipelineState<1> const q_state,
                              PipelinedSoftmax const& softmax,
                              Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kRows;
  FwdParams const& params = args.params;
  // Read anew for each tile: the compiler would else keep the epilogue's addresses through the mainloop, and
  // spill at head dim 256.
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  thread %= 128;
  int const first_row = tile.m_block * Traits::kBlockM + warpgroup * kRows;
  bool const stores = thread == 0;  // the thread that issues, and later waits for, the TMA stores

  typename Traits::MmaPV mma;
  auto acc = rowcol_view(tOrO);  // (rows, head dim)
  auto cO = make_identity_tensor(Shape<Int<kRows>, Int<Traits::kHeadDim>>{});
  auto tOcO = rowcol_view(mma.get_slice(thread).partition_C(cO));  // (rows, head dim) -> (row, column)
  float* const lse = params.lse + (int64_t{tile.batch} * params.heads_q + tile.head) * params.len_q;
  CUTE_UNROLL
  for (int i = 0; i < PipelinedSoftmax::kRows; ++i) {
    int const row = first_row + get<0>(tOcO(i, _0{}));
    float const sum = softmax.sum(i);
    if (get<1>(tOcO(_0{}, _0{})) == 0 && row < params.len_q) lse[row] = softmax.lse(i, sum, params.scale);
    // Sum 0: no key seen gives 0; keys seen, all with score -inf, give 0/0 as in the definition.
    bool const blind = !row_sees_a_key<typename Traits::Mask>(params, row);
    float const inverse = blind ? 0.f : reciprocal(sum);
    CUTE_UNROLL
    for (int j = 0; j < size<1>(acc); ++j) acc(i, j) = blind ? 0.f : acc(i, j) * inverse;
  }
  auto rO = make_tensor_like<Element>(tOrO);  // (MMA, MMA_M, MMA_D)
  convert(tOrO, rO);

  auto sO = make_tensor(make_smem_ptr(smem.o(warpgroup)), typename Traits::SmemLayoutQ{});  // (64, D)
  auto const copy_o = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma).get_slice(thread);
  if constexpr (Traits::kTile.o_buffer) {
    if (stores) tma_store_wait<0>();  // the last tile's O has been read
  }
  named_sync(kEpilogue + warpgroup, 128);  // and, where O shares Q's place, all four warps are done with Q
  copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, copy_o.retile_S(rO), copy_o.partition_D(sO));
  tma_store_fence();
  named_sync(kEpilogue + warpgroup, 128);  // O is complete
  if (stores) {
    int const head = tile.head, batch = tile.batch;
    CUTE_UNROLL
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      SM90_TMA_STORE_4D::copy(&args.out, smem.o(warpgroup) + chunk * kRows * Traits::kChunk, chunk * Traits::kChunk,
                              first_row, head, batch);
    }
    tma_store_arrive();
    if constexpr (!Traits::kTile.o_buffer) tma_store_wait<0>();
  }
  if constexpr (!Traits::kTile.o_buffer) {
    __syncwarp();
    smem.q_pipeline[warpgroup].release(q_state);
  }
}

}  // namespace flash_cute::sm90
