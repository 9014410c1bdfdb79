// The portable forward: one CTA per row tile of a query head; mma.sync, cp.async, ldmatrix.
#pragma once

#include "../../plan.h"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::fwd {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.ctas_per_sm)
    fwd_kernel(__grid_constant__ FwdParams const params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  RowTileCoord const tile = params.order.coord(blockIdx.x);

  typename Traits::Mma mma;
  auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  clear(tOrO);
  OnlineSoftmax<2 * decltype(size<1>(tOrO))::value> softmax(params.scale_log2);

  mainloop<Traits>(params, tile, smem, softmax, tOrO);
  epilogue<Traits>(params, tile, smem, softmax, tOrO);
}

}  // namespace flash_cute::sm80::fwd
