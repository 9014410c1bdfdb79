// The portable forward: one CTA per row tile of a query head; mma.sync, cp.async, ldmatrix.
#pragma once

#include "contract/plan.h"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "sm80/forward/common/place_masked_tile.cuh"
#include "sm80/forward/common/place_tile.cuh"
#include "traits.cuh"

namespace flash_cute::sm80::forward::rows {

// `sequence`: a Sequence in shared memory; for dense batches, with a mask or without, the parameters themselves.
template <class Traits, class Lengths>
CUTE_DEVICE void compute_tile(FwdParams const& params, Lengths const& sequence, RowTileCoord const& tile,
                              typename Traits::Storage& smem) {
  typename Traits::Mma mma;
  auto tOrO = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  clear(tOrO);
  constexpr int kRows = 2 * decltype(size<1>(tOrO))::value;  // per thread
  auto softmax =
      Traits::Products::template make_softmax<kRows, Traits::kPowerScale>(params.scale_log2, params.power_scale);

  mainloop<Traits>(params, sequence, tile, smem, softmax, tOrO);
  epilogue<Traits>(params, sequence, tile, smem, softmax, tOrO);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.ctas_per_sm)
    fwd_kernel(__grid_constant__ FwdParams const params) {
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::Storage*>(smem_raw);
  if constexpr (Traits::kVariant.reads_mask) {
    place_masked_tile<Traits>(params, smem.tile);
    compute_tile<Traits>(params, params, smem.tile.coord, smem);
  } else if constexpr (Traits::kVariant.reads_sequences) {
    place_tile<Traits>(params, smem.tile);
    if (smem.tile.coord.m_block >= 0) compute_tile<Traits>(params, smem.tile.sequence, smem.tile.coord, smem);
  } else {
    compute_tile<Traits>(params, params, params.order.coord(blockIdx.x), smem);
  }
}

}  // namespace flash_cute::sm80::forward::rows
