// dK and dV to memory, each warpgroup its own 64 rows: through shared memory, in K's and V's place, and one TMA
// store each, which clips what lies outside the tensor.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "../core/convert.cuh"
#include "bwd_args.cuh"
#include "bwd_traits.cuh"

namespace flash_cute::sm90 {

template <class Traits, class Accumulator>
CUTE_DEVICE void bwd_epilogue(BwdArgs const& args, typename Traits::SharedStorage& smem,
                              Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                              Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Element = typename Traits::Element;
  int const thread = threadIdx.x - 128;
  int const warpgroup = thread / 128;
  typename Traits::MmaKeys mma;
  auto const copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma).get_slice(thread);

  auto to_smem = [&](Element* place, auto const& acc, float factor) {
    auto sX = make_tensor(make_smem_ptr(place), typename Traits::SmemLayoutOut{});  // (BLK_N, D)
    auto scaled = make_tensor_like<float>(acc);                                     // (MMA, MMA_N, MMA_D)
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) scaled(i) = acc(i) * factor;
    auto rX = make_tensor_like<Element>(acc);  // (MMA, MMA_N, MMA_D)
    convert(scaled, rX);
    copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, copy_out.retile_S(rX), copy_out.partition_D(sX));
  };
  named_sync(kHalfStep, Traits::kConsumerThreads);  // everybody is done with K, which all of dQ read
  to_smem(smem.v, tdVrdV, 1.f);
  to_smem(smem.k, tdKrdK, args.params.scale);
  tma_store_fence();
  named_sync(kResults + warpgroup, 128);  // the warpgroup's rows are complete
  if (thread % 128 == 0) {
    KeyTile const tile(args);
    int const row = warpgroup * Traits::kKeys;
    CUTE_UNROLL
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      int const offset = (chunk * Traits::kBlockN + row) * Traits::kChunk;
      SM90_TMA_STORE_4D::copy(&args.dv, smem.v + offset, chunk * Traits::kChunk, tile.n_block * Traits::kBlockN + row,
                              tile.head_kv, tile.batch);
      SM90_TMA_STORE_4D::copy(&args.dk, smem.k + offset, chunk * Traits::kChunk, tile.n_block * Traits::kBlockN + row,
                              tile.head_kv, tile.batch);
    }
    tma_store_arrive();
    tma_store_wait<0>();
  }
}

}  // namespace flash_cute::sm90
